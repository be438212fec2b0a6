"""What a Parquet footer says of its row groups: where each column's pages are, and how many bytes and values they hold.

Read without pyarrow, which ends the process when asked for a column chunk whose sizes contradict each other (measured
with pyarrow 26: `Definition level histogram size mismatch`), and needed before it decodes anything. Field numbers:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, `struct FileMetaData`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from rollgen.format.thrift import (
    BINARY,
    FLAT,
    I32,
    I64,
    INT32,
    INT64,
    LIST,
    NAME,
    PLAIN,
    STRUCT,
    Field,
    Shape,
    ThriftError,
    list_of,
    read_field_head,
    read_integer,
    read_list_head,
    read_struct,
    skip_struct,
    skip_value,
    struct_of,
)

MAX_FOOTER_BYTES: Final = 16 << 20
"""A footer takes 2 to 4 KB for a row group of a shard."""
MAX_ROW_GROUPS: Final = 1 << 12
MAX_CHUNKS: Final = 1 << 17
"""Column chunks of all row groups together: pyarrow takes 1 KB for each."""
_TAIL_BYTES: Final = 8
"""The footer's length and the magic bytes."""
_MAGIC: Final = b"PAR1"

_ROW_GROUPS: Final = (4, LIST)
_COLUMNS: Final = (1, LIST)
_ROWS: Final = (3, I64)

_OPTIONAL: Final = True
_SIZES_STRUCT: Final = struct_of(
    (
        Field(1, I64, INT64, _OPTIONAL),
        Field(2, LIST, list_of(INT64, range(5), I64), _OPTIONAL),
        Field(3, LIST, list_of(INT64, range(5), I64), _OPTIONAL),
    )
)
_META_STRUCT: Final = struct_of(
    (
        Field(1, I32, INT32),
        Field(2, LIST, list_of(INT32, range(1, 5), I32)),
        Field(3, LIST, list_of(NAME, range(1, 6), BINARY)),
        Field(4, I32, INT32),
        Field(5, I64, INT64),
        Field(6, I64, INT64),
        Field(7, I64, INT64),
        Field(9, I64, INT64),
        Field(11, I64, INT64, _OPTIONAL),
        Field(12, STRUCT, FLAT, _OPTIONAL),
        Field(13, LIST, list_of(FLAT, range(1, 4), STRUCT), _OPTIONAL),
        Field(16, STRUCT, _SIZES_STRUCT, _OPTIONAL),
    )
)
_COLUMN_STRUCT: Final = struct_of(
    (
        Field(2, I64, INT64),
        Field(3, STRUCT, _META_STRUCT),
        Field(4, I64, INT64, _OPTIONAL),
        Field(5, I32, INT32, _OPTIONAL),
        Field(6, I64, INT64, _OPTIONAL),
        Field(7, I32, INT32, _OPTIONAL),
    )
)
"""Column chunks as pyarrow writes them for a shard."""

_SIZES: Final = Shape({2: I64, 3: I64}, re.compile(_SIZES_STRUCT))
_GEOMETRIES: Final = Shape({2: I32}, PLAIN.simple)
_META: Final = Shape(
    {2: I32, 3: BINARY, 8: PLAIN, 13: PLAIN, 16: _SIZES, 17: _GEOMETRIES}, re.compile(_META_STRUCT, re.DOTALL)
)
_COLUMN: Final = Shape({3: _META}, re.compile(_COLUMN_STRUCT, re.DOTALL))
_OF_GROUP: Final = {4: PLAIN}
_OF_FILE: Final = {2: PLAIN, 5: PLAIN, 7: PLAIN}
"""Where the format has lists. Beside the row groups and their columns, which are read below."""

_META_DATA: Final = 3 << 4 | STRUCT
_ENCODINGS: Final = 2 << 4 | LIST
_CODEC: Final = 4 << 4 | I32
_VALUES: Final = 5 << 4 | I64
_UNCOMPRESSED: Final = 6 << 4 | I64
_COMPRESSED: Final = 7 << 4 | I64
_DATA_PAGE: Final = 9 << 4 | I64
_DICTIONARY_PAGE: Final = 11 << 4 | I64
_OF_CHUNK: Final = frozenset({_META_DATA, _ENCODINGS})
_STATISTICS: Final = 12 << 4 | STRUCT
_MAX_VALUE: Final = 5 << 4 | BINARY
_MIN_VALUE: Final = 6 << 4 | BINARY


class Chunk(NamedTuple):
    """One column of one row group."""

    start: int
    """Where its pages begin in the file."""
    bytes: int
    """Of its pages, headers included, as they lie there."""
    uncompressed: int
    """The same, decompressed."""
    values: int
    """Nulls and empty lists count."""
    encodings: tuple[int, ...]
    codec: int
    """`enum CompressionCodec`."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group; its chunks are read when they are asked for."""

    rows: int
    _footer: bytes
    _places: tuple[int, ...]
    """Of its chunks in the footer."""

    @property
    def columns(self) -> int:
        """Number of its chunks, one for each leaf of the schema."""
        return len(self._places)

    def chunk(self, leaf: int) -> Chunk:
        """The chunk of a leaf column. Raises ValueError when it is none."""
        try:
            column, _ = read_struct(self._footer, self._places[leaf], _COLUMN, wanted=_OF_CHUNK)
            return _to_chunk(column[_META_DATA])
        except KeyError:
            raise ThriftError(f"the footer lacks a field of the column chunk {leaf}") from None

    def bounds(self, leaf: int) -> tuple[bytes, bytes] | None:
        """Smallest and largest value of a leaf column, in plain encoding; None where the footer does not tell."""
        column, _ = read_struct(self._footer, self._places[leaf], _COLUMN)
        statistics = column.get(_META_DATA, {}).get(_STATISTICS, {})
        if _MIN_VALUE in statistics and _MAX_VALUE in statistics:
            return statistics[_MIN_VALUE], statistics[_MAX_VALUE]
        return None


def _to_chunk(fields: dict[int, Any]) -> Chunk:
    start, dictionary = fields[_DATA_PAGE], fields.get(_DICTIONARY_PAGE, 0)
    if 0 < dictionary < start or (dictionary and not fields[_VALUES]):  # without values there is no data page
        start = dictionary
    return Chunk(
        start,
        fields[_COMPRESSED],
        fields[_UNCOMPRESSED],
        fields[_VALUES],
        tuple(fields[_ENCODINGS]),
        fields[_CODEC],
    )


def read_footer(file: int, size: int) -> bytes:
    """Footer, its length and the magic bytes of the file with this descriptor and size. Raises ValueError."""
    tail = os.pread(file, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    length = int.from_bytes(tail[:4], "little")
    if size < len(_MAGIC) + _TAIL_BYTES or tail[4:] != _MAGIC or length > size - len(_MAGIC) - _TAIL_BYTES:
        raise ValueError("no Parquet footer: the file is truncated or damaged")
    if length > MAX_FOOTER_BYTES:
        raise ValueError(f"a footer of {length} bytes; the limit is {MAX_FOOTER_BYTES}")
    return os.pread(file, length + _TAIL_BYTES, size - _TAIL_BYTES - length)


@lru_cache(maxsize=4)
def row_groups(footer: bytes) -> tuple[RowGroup, ...]:
    """The row groups that a footer (`read_footer`) lists. Raises ValueError. Kept for a while: 30 us each."""
    data = footer[:-_TAIL_BYTES]
    at = field = 0
    groups: tuple[RowGroup, ...] = ()
    try:
        while data[at]:
            field, kind, at = read_field_head(data, at, field)
            if (field, kind) == _ROW_GROUPS:
                groups, at = _read_row_groups(data, at)
            else:
                at = skip_value(data, at, kind, _OF_FILE.get(field))
    except IndexError:
        raise ThriftError("footer: ends too early") from None
    except ThriftError as error:
        raise ThriftError(f"footer: {error}") from None
    return groups


def _read_row_groups(data: bytes, at: int) -> tuple[tuple[RowGroup, ...], int]:
    size, at = read_list_head(data, at, PLAIN)
    if size > MAX_ROW_GROUPS:
        raise ValueError(f"{size} row groups; the limit is {MAX_ROW_GROUPS}")
    groups, chunks = [], 0
    for _ in range(size):
        group, at = _read_row_group(data, at)
        chunks += group.columns
        if chunks > MAX_CHUNKS:
            raise ValueError(f"more than {MAX_CHUNKS} column chunks, the limit")
        groups.append(group)
    return tuple(groups), at


def _read_row_group(data: bytes, at: int) -> tuple[RowGroup, int]:
    field = rows = 0
    places: list[int] = []
    while data[at]:
        field, kind, at = read_field_head(data, at, field)
        if (field, kind) == _COLUMNS:
            places, at = _places_of_columns(data, at)
        elif (field, kind) == _ROWS:
            rows, at = read_integer(data, at, I64)
        else:
            at = skip_value(data, at, kind, _OF_GROUP.get(field))
    return RowGroup(rows, data, tuple(places)), at + 1


def _places_of_columns(data: bytes, at: int) -> tuple[list[int], int]:
    size, at = read_list_head(data, at, _COLUMN)
    if size > MAX_CHUNKS:
        raise ValueError(f"{size} column chunks; the limit is {MAX_CHUNKS}")
    places = []
    for _ in range(size):
        places.append(at)
        at = skip_struct(data, at, _COLUMN)
    return places, at
