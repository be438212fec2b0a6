"""Parquet files from anywhere: bounded before pyarrow decodes them, verified while it does, checked afterwards.

Shards, plans and retry lists are read through here. A file can claim or decompress to any size, so `read` walks the
page headers of what it is asked for first (`pages.py`), and decodes only what stays below these limits:

    MAX_VALUES          values of one column of a row group, at every level of its lists
    MAX_DECODED_BYTES   of all columns that are read of it, decompressed and with dictionaries looked up

Afterwards every text is UTF-8, which pyarrow does not look at, and every column has the rows that the footer says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.files import open_descriptor
from rollgen.format.footer import RowGroup, read_footer, row_groups
from rollgen.format.pages import check_chunk

MAX_VALUES: Final = 1 << 28
MAX_DECODED_BYTES: Final = 2 << 30
_FOOTER_STRING_LIMIT: Final = 4 << 20
_FOOTER_CONTAINER_LIMIT: Final = 1 << 18
"""Most bytes of one string and most entries of one list in a footer: a hostile one cannot ask for more memory."""
_VALUE_BYTES: Final = 4
_DELTA_BYTE_ARRAY: Final = 7
_ZSTD_MEMORY: Final = "not enough memory"
"""How libzstd says that it got none, which pyarrow passes on as if the data were bad."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedParquet:
    """An open file. Close it, or use it as a context manager. Its methods raise ValueError and what pyarrow raises."""

    path: Path
    descriptor: int
    size: int
    file: pq.ParquetFile
    schema: pa.Schema
    """As the file has it."""
    groups: tuple[RowGroup, ...]
    leaves: dict[str, tuple[int, ...]]
    """The Parquet columns that each column consists of."""

    @property
    def row_counts(self) -> list[int]:
        """Number of rows of each row group."""
        return [group.rows for group in self.groups]

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Close the file: also when the interpreter ends, and names of this module are gone."""
        self.file.close(force=True)
        _close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, index: int, columns: Sequence[str], *, use_threads: bool = False) -> pa.Table:
        """Some columns of a row group, in the order given: at least one, each of which the file has once."""
        self.check(index, columns)
        leaves = [leaf for name in columns for leaf in self.leaves[name]]
        table = self.file.reader.read_row_group(index, column_indices=leaves, use_threads=use_threads)
        if len(table) != self.groups[index].rows:
            raise ValueError(f"{len(table)} rows, the footer says {self.groups[index].rows}")
        _check_values(table)
        return table if table.column_names == list(columns) else table.select(columns)

    def check(self, index: int, columns: Iterable[str]) -> None:
        """Whether `read` may decode these columns: their page headers and what they come to, but no data.

        Texts count as often as a dictionary is referred to: at most rows times all of it, which is many times the truth
        where rows are many and texts short. So where all that could come to too much, the truth is looked up.
        """
        sizes = {}
        for name in columns:
            with _of_column(name):
                sizes[name] = self._check_column(index, name)
        decoded = sum(size.bytes + size.looked_up for size in sizes.values())
        if sum(size.bytes for size in sizes.values()) <= MAX_DECODED_BYTES:
            for name in sorted(sizes, key=lambda name: sizes[name].looked_up, reverse=True):
                if decoded > MAX_DECODED_BYTES and sizes[name].looked_up:
                    with _of_column(name):
                        decoded += self._looked_up_bytes(index, name) - sizes[name].looked_up
        if decoded > MAX_DECODED_BYTES:
            raise ValueError(f"{decoded} bytes once decoded; the limit is {MAX_DECODED_BYTES}")

    def column_bytes(self) -> dict[str, int]:
        """Compressed bytes by column, page headers included."""
        return {
            name: sum(group.chunk(leaf).bytes for group in self.groups for leaf in leaves)
            for name, leaves in self.leaves.items()
        }

    def bounds(self, index: int, column: str) -> tuple[bytes, bytes] | None:
        """Smallest and largest value of a flat column in a row group, in plain encoding; None where it is not told."""
        (leaf,) = self.leaves[column]
        return self.groups[index].bounds(leaf)

    def _check_column(self, index: int, name: str) -> _Decoded:
        """What a column comes to, its pages having been checked."""
        group, decoded, looked_up = self.groups[index], 0, 0
        for leaf in self.leaves[name]:
            chunk = group.chunk(leaf)
            content = check_chunk(self.descriptor, chunk, self.size)
            if chunk.values != group.rows and not (chunk.values > group.rows and self._is_nested(name)):
                raise ValueError(f"{chunk.values} values for {group.rows} rows")
            if chunk.values > MAX_VALUES:
                raise ValueError(f"{chunk.values} values; the limit is {MAX_VALUES}")
            decoded += max(content.bytes, chunk.values * _VALUE_BYTES)
            if content.dictionary and self._path_of_texts(name):
                looked_up += chunk.values * content.dictionary
            if _DELTA_BYTE_ARRAY in chunk.encodings:  # each value may repeat all that came before it
                decoded += chunk.values * content.bytes
        return _Decoded(decoded, looked_up)

    def _is_nested(self, name: str) -> bool:
        return bool(pa.types.is_nested(self.schema.field(name).type))

    def _path_of_texts(self, name: str) -> str | None:
        """The Parquet column that holds the texts of a column, in lists or not; None where it holds no texts."""
        kind, path = self.schema.field(name).type, self.file.metadata.schema.column(self.leaves[name][0]).path
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        return str(path) if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None

    def _looked_up_bytes(self, index: int, name: str) -> int:
        """Bytes of the texts of a column that has a dictionary, none of which is made: memory is that of its pages."""
        with ExitStack() as resources:
            again = resources.enter_context(os.fdopen(os.dup(self.descriptor), "rb"))  # its name may be gone by now
            path = self._path_of_texts(name)
            file = _open_parquet(pa.PythonFile(again), read_dictionary=[path])
            resources.callback(file.close, force=True)
            (column,) = file.read_row_group(index, columns=[path], use_threads=False).columns
        return sum(_text_bytes(part) for part in column.chunks)


class _Decoded(NamedTuple):
    """What a column of a row group comes to."""

    bytes: int
    """As it lies in its pages."""
    looked_up: int
    """At most, over and above, of the texts that it has in a dictionary."""


@contextmanager
def _of_column(name: str) -> Iterator[None]:
    """Name the column that is damaged."""
    try:
        yield
    except (OSError, ValueError) as error:
        if _is_of_machine(error):
            raise
        raise ValueError(f"{name}: {error}") from None


def _check_values(table: pa.Table) -> None:
    """That texts are UTF-8 and lists are well formed."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        for name in table.column_names:
            try:
                table[name].validate(full=True)
            except pa.ArrowInvalid as error:
                raise ValueError(f"{name}: {error}") from None
        raise


def _text_bytes(texts: pa.Array) -> int:
    """Of texts that are looked up in a dictionary, or of lists of such."""
    while not isinstance(texts, pa.DictionaryArray):
        texts = texts.flatten()
    return int(pc.sum(pc.binary_length(texts.dictionary).take(texts.indices)).as_py() or 0)  # as int64


def open_parquet(path: Path, check: Callable[[bytes], None] | None = None) -> CheckedParquet:
    """Open a Parquet file. `check` gets its footer (`read_footer`) before anything in there is believed.

    Raises OSError, ValueError, DatasetError for anything but a regular file, and what pyarrow and `check` raise.
    """
    with ExitStack() as on_error:
        descriptor = open_descriptor(path)
        on_error.callback(os.close, descriptor)
        size = os.fstat(descriptor).st_size
        footer = read_footer(descriptor, size)
        if check is not None:
            check(footer)
        groups = row_groups(footer)
        file = _open_parquet(pa.OSFile(str(path)))  # a path would be looked up among all filesystems first
        on_error.callback(file.close, force=True)
        metadata, schema = file.metadata, file.schema_arrow
        if len(groups) != metadata.num_row_groups or sum(group.rows for group in groups) != metadata.num_rows:
            raise ValueError(f"the row groups do not add up to the {metadata.num_rows} rows of the footer")
        if any(group.columns != metadata.num_columns for group in groups):
            raise ValueError(f"a row group has not the {metadata.num_columns} columns of the footer")
        on_error.pop_all()
    return CheckedParquet(path, descriptor, size, file, schema, groups, _leaves(metadata, schema))


def has_columns(stored: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether a file has these columns, each once and exactly of this type; it may have more."""
    return all(stored.get_field_index(field.name) >= 0 and stored.field(field.name).equals(field) for field in wanted)


@contextmanager
def translated(place: str, problem: str, fix: str) -> Iterator[None]:
    """Turn what this module and pyarrow raise into one line, `place: problem: reason; fix`. Raises DatasetError.

    Where it was the machine that failed, that says nothing about the file: then it raises Unreadable.
    """
    try:
        yield
    except FileNotFoundError:
        raise MissingFile(f"{place}: missing; {fix}") from None
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or "out of memory"
        if _is_of_machine(error):
            raise Unreadable(f"{place}: this machine could not read it: {reason}; mend that, and try again") from None
        raise DatasetError(f"{place}: {problem}: {reason}; {fix}") from None


def _is_of_machine(error: Exception) -> bool:
    """Whether the system refused memory or a read. What pyarrow raises about content is an OSError without errno."""
    refused = isinstance(error, OSError) and error.errno is not None
    return refused or isinstance(error, MemoryError) or _ZSTD_MEMORY in str(error)


def _open_parquet(file: pa.NativeFile, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        file,
        page_checksum_verification=True,
        thrift_string_size_limit=_FOOTER_STRING_LIMIT,
        thrift_container_size_limit=_FOOTER_CONTAINER_LIMIT,
        **options,
    )


def _leaves(metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, tuple[int, ...]]:
    if metadata.num_columns == len(schema.names):  # as in all that rollgen writes
        return {name: (leaf,) for leaf, name in enumerate(schema.names)}
    leaves: dict[str, tuple[int, ...]] = {}
    for leaf in range(metadata.num_columns):
        name = metadata.schema.column(leaf).path.partition(".")[0]
        leaves[name] = (*leaves.get(name, ()), leaf)
    return leaves
