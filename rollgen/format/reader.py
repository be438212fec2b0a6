"""Opening datasets and shards: nothing that this module returns has escaped a checksum.

    open_dataset(directory)   manifest + journal + the shards in place, in the order of their names
    open_shard(path, ...)     size and footer against the journal line; format version, config digest, schema
    read_row_group(shard, i)  page headers and page checksums, every time; a Table of exactly the v1 types
    read_columns(shard, ...)  the same of all row groups, for narrow columns
    check_row_groups(shard)   page headers alone
    verify_shard(path, ...)   all of the above over the whole file, one row group in memory at a time

A shard of format 1.0 has no column `generation`: it reads as 0, which is what a shard of that time means.

pyarrow verifies page data, `parquet.py` the page headers, the journal's footer hash the rest: with a journal line any
changed bit that could change a value is an error. Each error names the file, and the row group where there is one.
A file that is hostile rather than damaged is an error too, and takes no more memory than the limits of `parquet.py`.
Cost: opening 0.4 ms a shard; verified reading about 10 million tokens a second on two cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.errors import DatasetError, MissingFile
from rollgen.format.journal import JournalLine, committed_shards, file_sha256, is_unfinished, read_journal
from rollgen.format.manifest import Manifest, check_format_version, read_manifest
from rollgen.format.parquet import CheckedParquet, open_parquet, translated
from rollgen.format.schema import (
    DATA_DIR,
    FOOTER_CONFIG_DIGEST,
    FOOTER_FORMAT_VERSION,
    MANIFEST_FILE,
    OPTIONAL_COLUMNS,
    shard_schema,
)

_ADDED: Final = {"generation": pa.scalar(0, pa.int32())}
"""Columns that a MINOR added, and what a shard without them means."""
_ALWAYS_STORED: Final = "prompt_index"
REMAKE: Final = (
    "`rollgen repair` takes it out of the dataset; what was planned of it, `rollgen generate --resume` makes again"
)
"""What helps with a shard that is missing or damaged, with a plan or without."""
KEY_COLUMNS: Final = ("prompt_index", "sample_index", "prompt_id", "generation")
"""What tells the samples of a dataset apart."""
_MEND: Final = "`rollgen repair` mends the one of the two that is damaged"


@dataclass(frozen=True, slots=True, eq=False)
class ShardReader:
    """An open shard. Close it, or use it as a context manager."""

    place: str
    """In errors: the path, or the URL."""
    schema: pa.Schema
    """The v1 columns, with their v1 types: what `read_row_group` returns."""
    stored: frozenset[str]
    """Names of the columns that the file has."""
    parquet: CheckedParquet

    @property
    def file(self) -> pq.ParquetFile:
        """The file as pyarrow has it: for its key/value metadata. To be asked for no column chunk: see `footer.py`."""
        return self.parquet.file

    @property
    def row_group_rows(self) -> list[int]:
        """Number of rows of each row group."""
        return self.parquet.row_counts

    def close(self) -> None:
        """Close the file."""
        self.parquet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StoredKeys(NamedTuple):
    """The keys of a shard's rows, in file order."""

    prompt_index: npt.NDArray[np.int64]
    sample_index: npt.NDArray[np.int32]
    prompt_id: pa.ChunkedArray
    generation: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A committed shard and what is known of it. Holds no handle: cheap, and safe to pickle."""

    path: Path
    line: JournalLine | None
    """None when the file is in place but its journal line is not (yet) written: a live run, or a crash between."""
    config_digest: str

    @property
    def name(self) -> str:
        """Of the file, inside `data/`."""
        return self.path.name

    @property
    def place(self) -> str:
        """In errors."""
        return str(self.path)

    def part(self, columns: Sequence[str], row_group: int | None = None) -> StoredShard:
        """The same shard for one who will read no more than these columns, of one row group or of all.

        What lies elsewhere need not be fetched whole (`rollgen.remote.stored`); a file that is here is here.
        """
        return self

    def open(self) -> ShardReader:
        """Open and check the shard: `open_shard`."""
        try:
            return open_shard(self.path, line=self.line, config_digest=self.config_digest)
        except MissingFile:
            directory = self.path.parent.parent
            if is_unfinished(directory) or self.name in read_journal(directory).retired:
                raise MissingFile(
                    f"{self.place}: replaced, or set aside, since the dataset was opened; start again"
                ) from None
            raise

    def sha256(self) -> str:
        """Of the whole file, as the journal has it, or else as it is."""
        return self.line.sha256 if self.line else file_sha256(self.path)

    def drop_copy(self) -> bool:
        """Forget a copy in which there was damage; False where there is nothing else to read."""
        return False


@dataclass(frozen=True, slots=True)
class StoredDataset:
    """A dataset directory, as it was when `open_dataset` looked."""

    directory: Path
    manifest: Manifest
    shards: tuple[StoredShard, ...]
    """Sorted by name."""


def open_dataset(directory: Path) -> StoredDataset:
    """Read the manifest and the journal and list the shards, opening none of them.

    Raises DatasetError when there is no manifest, when its shards carry no page checksums, when a shard of the journal
    is missing, or while shards are being replaced. Retired shards are left out: they were set aside or replaced.
    """
    journal, paths = committed_shards(directory)
    manifest = read_manifest(directory)  # after it: a retry is in the manifest before its first shard is there
    if not manifest.page_checksums:
        raise DatasetError(f"{directory / MANIFEST_FILE}: page_checksums is false: damage would go unseen")
    shards = tuple(
        StoredShard(path, journal.committed.get(path.name), manifest.config_digest)
        for path in paths
        if path.name not in journal.retired
    )
    missing = sorted(journal.committed.keys() - {shard.path.name for shard in shards})
    if missing:
        raise MissingFile(f"{directory / DATA_DIR / missing[0]}: missing, though committed; {REMAKE}")
    return StoredDataset(directory, manifest, shards)


def open_shard(
    path: Path, *, line: JournalLine | None = None, config_digest: str | None = None, place: str | None = None
) -> ShardReader:
    """Open a shard and check all but its pages.

    With `line`, size, footer hash and row count are compared with it; with `config_digest`, the shard must be of that
    dataset. Errors name `place`, the path unless it is given. Raises DatasetError for a truncated, damaged or foreign
    file, MissingFile and Unreadable.
    """
    place = place or str(path)
    with _translated(place), ExitStack() as on_error:
        if line is None:
            parquet = open_parquet(path)
        else:
            check_size(path.stat().st_size, place, line)
            parquet = open_parquet(path, partial(check_footer_hash, place, line))
        on_error.callback(parquet.close)
        schema = _check_footer(place, parquet, config_digest)
        rows = sum(parquet.row_counts)
        if line is not None and rows != line.rows:
            raise DatasetError(f"{place}: {rows} rows, the journal says {line.rows}; {_MEND}")
        on_error.pop_all()
    return ShardReader(place, schema, frozenset(parquet.schema.names), parquet)


def read_row_group(
    shard: ShardReader, index: int, columns: Sequence[str] | None = None, *, use_threads: bool = True
) -> pa.Table:
    """Read a row group, or some `columns` of it in the order given, with every page verified.

    The table has exactly the types of `shard.schema`, whatever list flavour or nullability the file was written with;
    a column of a later MINOR than the shard's is filled in. Raises DatasetError naming file and row group for damage,
    and for a null where the format allows none.
    """
    names = shard.schema.names if columns is None else list(columns)
    stored = [name for name in names if name in shard.stored] or [_ALWAYS_STORED]
    try:
        schema = pa.schema([shard.schema.field(name) for name in names])
    except KeyError as error:
        raise DatasetError(f"{shard.place}: {error.args[0]}, though the manifest says so: edited or damaged") from None
    with _translated(f"{shard.place}: row group {index}"):
        table = shard.parquet.read(index, stored, use_threads=use_threads)
        return _normalised(_filled(table, schema), schema)


def read_row_groups(
    shard: ShardReader, columns: Sequence[str] | None = None, *, use_threads: bool = True
) -> Iterator[pa.Table]:
    """`read_row_group` of each in turn, so that one is in memory at a time."""
    for index in range(len(shard.row_group_rows)):
        yield read_row_group(shard, index, columns, use_threads=use_threads)


def check_row_groups(shard: ShardReader) -> None:
    """The page headers of all columns and what they come to: whether another library may decode them.

    Raises DatasetError naming file and row group.
    """
    for index in range(len(shard.row_group_rows)):
        with _translated(f"{shard.place}: row group {index}"):
            shard.parquet.check(index, shard.parquet.schema.names)


def read_columns(shard: ShardReader, columns: Sequence[str]) -> pa.Table:
    """Some columns of all rows, in file order, read and checked like `read_row_group`: for columns that are narrow."""
    # Handing so little to threads would cost more than reading it.
    groups = list(read_row_groups(shard, columns, use_threads=False))
    if len(groups) == 1:
        return groups[0]
    return pa.concat_tables(groups or [pa.schema([shard.schema.field(name) for name in columns]).empty_table()])


def count_mask_ids(table: pa.Table) -> int:
    """Ids over all supports of a table of rows."""
    return sum(len(chunk.flatten().flatten()) for chunk in table["sampling_mask"].chunks)


def stored_keys(shard: ShardReader) -> StoredKeys:
    """The keys of all rows: what a resumed run need not make again."""
    table = read_columns(shard, KEY_COLUMNS)
    return StoredKeys(
        prompt_index=table["prompt_index"].to_numpy(),
        sample_index=table["sample_index"].to_numpy(),
        prompt_id=table["prompt_id"],
        generation=table["generation"].to_numpy(),
    )


def verify_shard(
    path: Path, *, line: JournalLine | None = None, config_digest: str | None = None, place: str | None = None
) -> None:
    """Read every page of every column, one row group at a time. Raises as `open_shard` does, at the first damage."""
    with open_shard(path, line=line, config_digest=config_digest, place=place) as shard:
        for _ in read_row_groups(shard):
            pass


def _translated(place: str) -> AbstractContextManager[None]:
    """Turn what is raised about a file into one line that names `place`."""
    return translated(place, "damaged or not a shard", REMAKE)


def check_size(size: int, place: str, line: JournalLine) -> None:
    """Raise DatasetError when a shard has not the committed size."""
    if size != line.bytes:
        raise DatasetError(f"{place}: {size} bytes, the journal says {line.bytes}: truncated or overwritten; {REMAKE}")


def check_footer_hash(place: str, line: JournalLine, footer: bytes) -> None:
    """Raise DatasetError when a footer (`read_footer`) is not the committed one."""
    if hashlib.sha256(footer).hexdigest() != line.footer_sha256:
        raise DatasetError(f"{place}: the footer is not the one that was committed; {REMAKE}")


def _check_footer(place: str, parquet: CheckedParquet, config_digest: str | None) -> pa.Schema:
    """Check the key/value metadata and the stored schema. Returns the v1 schema of the columns the shard has."""
    metadata = parquet.file.metadata.metadata or {}
    if FOOTER_FORMAT_VERSION not in metadata:
        raise DatasetError(f"{place}: not a rollgen shard: its footer has no {FOOTER_FORMAT_VERSION.decode()}")
    check_format_version(metadata[FOOTER_FORMAT_VERSION].decode(), place)
    stored_digest = metadata.get(FOOTER_CONFIG_DIGEST, b"").decode()
    if config_digest is not None and stored_digest != config_digest:
        raise DatasetError(f"{place}: belongs to another dataset (config digest {stored_digest[:12] or 'absent'})")
    return _check_schema(place, parquet.schema)


def _check_schema(place: str, stored: pa.Schema) -> pa.Schema:
    """Accept other list flavours, nullability and further columns (a later MINOR); refuse any other difference."""
    schema = shard_schema(**{name: name in stored.names for name in OPTIONAL_COLUMNS})
    if stored.equals(schema):
        return schema
    for field in schema:
        if field.name in _ADDED and field.name not in stored.names:
            continue
        position = stored.get_field_index(field.name)  # -1 also when the name occurs twice
        if position < 0:
            raise DatasetError(f"{place}: column {field.name} is missing, or there twice; not a rollgen shard")
        if not _same_shape(stored.field(position).type, field.type):
            found = stored.field(position).type
            raise DatasetError(f"{place}: column {field.name} is {found}, not {field.type}; not a rollgen shard")
    return schema


def _same_shape(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Equal up to list flavour, string flavour, and nullability and name of list elements."""
    if pa.types.is_list(wanted):
        is_list = pa.types.is_list(stored) or pa.types.is_large_list(stored)
        return is_list and _same_shape(stored.value_type, wanted.value_type)
    return bool(stored == wanted) or (pa.types.is_string(wanted) and pa.types.is_large_string(stored))


def _filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of `schema`, in its order; one that the file lacks holds its default in all rows."""
    if table.column_names == schema.names:
        return table
    for name in set(schema.names) - set(table.column_names):
        table = table.append_column(schema.field(name), pa.repeat(_ADDED[name], len(table)))
    return table.select(schema.names)


def _normalised(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast a table of another writer to the v1 types. Raises ValueError for a null where v1 has none."""
    if table.schema.equals(schema):
        return table
    for field in schema:
        _check_elements(table[field.name], field)
    return table.cast(schema)  # refuses nulls in the column itself


def _check_elements(column: Any, field: pa.Field) -> None:
    """Refuse nulls inside lists: a cast would keep them, and numpy turn them into numbers."""
    wanted = field.type
    while pa.types.is_list(wanted):
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=column.type.value_type)
        if column.null_count and not wanted.value_field.nullable:
            raise ValueError(f"column {field.name} holds {column.null_count} null elements")
        wanted = wanted.value_type
