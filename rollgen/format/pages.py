"""What pyarrow does not check about Parquet pages: that each one carries a checksum, and that its header is sane.

`page_checksum_verification=True` verifies the CRC-32 of a page's *data*, and only where there is one: a page without is
passed silently, and so is a page whose *header* was damaged in a way that still decodes (measured: one flipped bit of
`num_values` drops the last values of a list column without an error). `check_pages` walks the headers, some 10 µs each.

Headers are Thrift structs in the compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), field numbers as in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, `struct PageHeader`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from operator import index
from typing import Any, BinaryIO, Final, NamedTuple

_HEADER_BYTES: Final = 32 << 10
"""Upper bound of a header: four statistics of at most 4 KiB each, and a few integers."""
_WINDOW_BYTES: Final = 64 << 10
"""Read at a time: most column chunks are smaller, and each read gives the GIL away."""
_PAGE_TYPE: Final = 1
_COMPRESSED_SIZE: Final = 3
_CRC: Final = 4
_MAX_DEPTH: Final = 4
_NUM_VALUES: Final = 1
_DICTIONARY_PAGE: Final = 2
_NESTED_HEADERS: Final = {0: 5, _DICTIONARY_PAGE: 7, 3: 8}
"""Page type (data, dictionary, data v2) to the field that holds its own header; other types never occur in a chunk."""
_ENCODING_FIELDS: Final = {5: 2, 7: 2, 8: 4}
"""Where each of these nested headers keeps its encoding; all keep the number of values first."""
_ENCODING_NAMES: Final = {
    0: "PLAIN",
    2: "PLAIN_DICTIONARY",
    3: "RLE",
    4: "BIT_PACKED",
    5: "DELTA_BINARY_PACKED",
    6: "DELTA_LENGTH_BYTE_ARRAY",
    7: "DELTA_BYTE_ARRAY",
    8: "RLE_DICTIONARY",
    9: "BYTE_STREAM_SPLIT",
}


def check_pages(file: BinaryIO, metadata: Any, row_group: int, columns: Collection[str]) -> None:
    """Walk the pages of some columns of a row group (`metadata`: `pq.FileMetaData`), reading their headers only.

    Call it after pyarrow has decoded these columns: it ends the process when asked for the metadata of a column chunk
    that it cannot parse, where decoding the same chunk raises. Raises ValueError, naming the column, for a page without
    checksum or with a header that contradicts the footer.
    """
    schema, chunks = metadata.schema, metadata.row_group(row_group)
    for leaf in range(metadata.num_columns):
        if schema.column(leaf).path.partition(".")[0] in columns:
            _check_chunk(file, chunks.column(leaf))


def _check_chunk(file: BinaryIO, chunk: Any) -> None:
    # A chunk without dictionary says None, or 0 when another writer made it.
    position = chunk.dictionary_page_offset or chunk.data_page_offset
    end = position + chunk.total_compressed_size
    encodings = chunk.encodings
    values, start, window = 0, position, b""
    while position < end:
        if position + _HEADER_BYTES > start + len(window) < end:
            start, window = position, os.pread(file.fileno(), min(_WINDOW_BYTES, end - position), position)
        page = _read_page_header(window[position - start : position - start + _HEADER_BYTES])
        if page is None:
            raise ValueError(f"{chunk.path_in_schema}: damaged page header at byte {position}")
        if not page.has_checksum:
            raise ValueError(f"{chunk.path_in_schema}: the page at byte {position} carries no checksum")
        if page.encoding not in encodings:
            raise ValueError(f"{chunk.path_in_schema}: the page header at byte {position} contradicts the footer")
        values += page.values
        position += page.bytes
    if (position, values) != (end, chunk.num_values):
        raise ValueError(f"{chunk.path_in_schema}: the page headers do not add up to what the footer says")


class _Page(NamedTuple):
    bytes: int
    """Header and data."""
    values: int
    """0 for a dictionary page."""
    encoding: str
    has_checksum: bool


def _read_page_header(data: bytes) -> _Page | None:
    """The page whose header `data` begins with, or None when it does not decode."""
    try:
        header, length = read_struct(data)
        nested_field = _NESTED_HEADERS[header[_PAGE_TYPE]]
        nested = header[nested_field]
        encoding = _ENCODING_NAMES[nested[_ENCODING_FIELDS[nested_field]]]
        values = 0 if header[_PAGE_TYPE] == _DICTIONARY_PAGE else index(nested[_NUM_VALUES])
        return _Page(length + max(0, header[_COMPRESSED_SIZE]), values, encoding, _CRC in header)
    except (KeyError, IndexError, TypeError):
        return None


def read_struct(data: bytes) -> tuple[dict[int, Any], int]:
    """Decode one compact-protocol struct of booleans, integers, binaries and structs: `({field: value}, length)`.

    Raises IndexError when `data` ends too early, KeyError for a field type or a depth that page headers do not use.
    """
    return _struct(data, 0, 0)


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The struct at this position, and the position after it."""
    if depth > _MAX_DEPTH:
        raise KeyError(depth)
    fields: dict[int, Any] = {}
    field = 0
    while head := data[at]:  # a zero byte ends the struct
        if head >> 4:
            field, at = field + (head >> 4), at + 1
        else:
            field, at = _integer(data, at + 1)
        fields[field], at = _value(data, at, head & 0x0F, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (5, 6, 4):  # int32, int64, int16
        return _integer(data, at)
    if kind in (1, 2):  # a boolean is its own type: 1 true, 2 false
        return kind == 1, at
    if kind == 8:  # binary
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind == 12:
        return _struct(data, at, depth + 1)
    raise KeyError(kind)


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag integer: 0, -1, 1, -2, ... are stored as 0, 1, 2, 3, ..."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
