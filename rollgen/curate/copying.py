"""Rows copied out of stored shards into a new one, and compared: what `compact.py` and `merge.py` have in common.

    write     the rows as Arrow, out of verified row groups; the new row groups end where those of a writer would
    compare   the new shard, read back, with the old row groups, read again: row by row and column by column

What is changed of a row, if anything, is one function of a whole row group, so that the comparison is with what it
gives. Rows are taken in the order of the old row groups, as many at once as fill CACHE_BYTES there: each is decoded
once for them, wherever they lie. Memory is some three times that, however short the rows, for few tables hold them all;
five times, where row groups are as large themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa

from rollgen.curate.layout import Index
from rollgen.errors import DatasetError
from rollgen.format.columns import RowGroupFilling, stored_sizes
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import Manifest
from rollgen.format.reader import ShardReader, count_mask_ids, open_shard, read_row_group, read_row_groups
from rollgen.format.row_groups import CACHE_BYTES, OpenShards
from rollgen.format.schema import FOOTER_ENGINE
from rollgen.format.writer import footer_metadata, manifest_schema, write_parquet

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

_MOST_BYTES: Final = 2 * CACHE_BYTES
"""Rows decoded at once, as Arrow: 1.1 to 1.3 times what they are in row groups. Offsets of texts end at 2^31."""
_BATCH_ROWS: Final = 1024
"""Rows put in order at once."""

Change: TypeAlias = Callable[[int, pa.Table], pa.Table]
"""What becomes of a row group: its number in the index and its table with all columns, to the table that is stored."""


def as_it_is(row_group: int, table: pa.Table) -> pa.Table:
    """The `Change` that is none."""
    return table


def copy_rows(
    slot: WriterSlot, path: Path, index: Index, rows: Int64Array, manifest: Manifest, change: Change = as_it_is
) -> JournalLine:
    """Write these rows, in this order, as a shard of `slot` under its temporary name, and compare it with them.

    Returns the line that it is to have. Raises OSError, and DatasetError for a damaged row group or a difference.
    """
    footer = footer_metadata(manifest) | {FOOTER_ENGINE: index.engines_of(rows)}
    schema = manifest_schema(manifest).with_metadata(footer)
    write_parquet(path, _row_groups(index, rows, schema, change), schema)
    tokens, mask_ids = _compare(path, index, rows, change)
    return slot.set_aside(path, rows=len(rows), tokens=tokens, mask_ids=mask_ids)


def _row_groups(index: Index, rows: Int64Array, schema: pa.Schema, change: Change) -> Iterator[pa.Table]:
    """The tables of a new shard's row groups, which end by the rule of those that are made of completions."""
    filling = RowGroupFilling()
    pieces: list[pa.Table] = []
    for window in index.windows(rows, CACHE_BYTES):
        for gathered in _gathered(index, window, schema, change):
            for piece, is_last in _cut(gathered, filling):
                pieces.append(piece)
                if is_last:
                    pieces = [pa.concat_tables(pieces).combine_chunks()]
                    yield pieces.pop()  # not to be held here as well
    if pieces:
        yield pa.concat_tables(pieces).combine_chunks()


def _gathered(index: Index, rows: Int64Array, schema: pa.Schema, change: Change) -> Iterator[pa.Table]:
    """These rows, in this order, _BATCH_ROWS at a time; half by half where they are more than can be held.

    (In a row group a text is stored once that many of its rows have.)
    """
    taken = _taken(index, rows, schema, change)
    if taken is None:
        for half in np.array_split(rows, 2):
            yield from _gathered(index, half, schema, change)
    else:
        table, order = taken
        for start in range(0, len(rows), _BATCH_ROWS):
            yield table.take(pa.array(order[start : start + _BATCH_ROWS]))


def _taken(index: Index, rows: Int64Array, schema: pa.Schema, change: Change) -> tuple[pa.Table, Int64Array] | None:
    """These rows as one table, each row group decoded once, and their places there; None for more than _MOST_BYTES."""
    columns: dict[str, list[pa.Array]] = {name: [] for name in schema.names}
    found, size = [np.zeros(0, np.int64)], 0
    for table, places, at in _by_row_group(index, rows, change):
        part = table.select(schema.names).take(pa.array(at))
        size += part.nbytes
        if size > _MOST_BYTES and len(rows) > 1:
            return None
        for name in schema.names:
            columns[name] += part[name].chunks
        found.append(places)
    whole = {name: pa.concat_arrays(columns.pop(name)) for name in schema.names}
    return pa.table(whole, schema=schema), np.argsort(np.concatenate(found))


def _by_row_group(index: Index, rows: Int64Array, change: Change) -> Iterator[tuple[pa.Table, Int64Array, Int64Array]]:
    """Each row group that has some of these rows, verified and changed; their places in `rows`, and those in there."""
    owners = index.row_group_of(rows)
    order = np.argsort(owners, kind="stable")
    found, first = np.unique(owners[order], return_index=True)
    with closing(OpenShards(limit=1)) as shards:
        for row_group, places in zip(found.tolist(), np.split(order, first[1:]), strict=False):
            shard, number = index.row_groups[row_group]
            table = read_row_group(shards[index.shards[shard]], number)
            yield change(row_group, table), places, rows[places] - index.starts[row_group]


def _cut(table: pa.Table, filling: RowGroupFilling) -> Iterator[tuple[pa.Table, bool]]:
    """Its rows in pieces, each with whether it is the last one of its new row group."""
    first = 0
    for after, size in enumerate(stored_sizes(table), 1):
        closed = filling.is_closed_by(size)
        if closed or after == len(table):
            yield table.slice(first, after - first), closed
            first = after


def _compare(path: Path, index: Index, rows: Int64Array, change: Change) -> tuple[int, int]:
    """Read a new shard and, again, the old rows that it should hold. Returns its tokens and mask ids."""
    tokens = mask_ids = start = 0
    with open_shard(path) as shard:
        for table in _loads(shard):
            different = _difference(table, index, rows[start : start + len(table)], change)
            if different is not None:
                raise DatasetError(f"{path}: row {start + different}: is not the row that was to be copied")
            tokens += int(table["response_length"].to_numpy().sum(dtype=np.int64))
            mask_ids += count_mask_ids(table)
            start += len(table)
    if start != len(rows):
        raise DatasetError(f"{path}: {start} rows were written, {len(rows)} were to be")
    return tokens, mask_ids


def _difference(table: pa.Table, index: Index, rows: Int64Array, change: Change) -> int | None:
    """The first row of a stretch that is not as it should be.

    Slices are compared, where rows were copied by position: what one of the two does wrong, the other shows.
    """
    edges = index.stretches(rows)
    for old, stretches, firsts in _by_row_group(index, rows[edges[:-1]], change):
        members: list[list[int]] = np.stack([edges[stretches], edges[stretches + 1], firsts], axis=1).tolist()
        for start, end, first in members:
            if not table.slice(start, end - start).equals(old.slice(first, end - start)):
                return start
    return None


def _loads(shard: ShardReader) -> Iterator[pa.Table]:
    """Its row groups, verified, as many at once as fill CACHE_BYTES."""
    tables: list[pa.Table] = []
    for table in read_row_groups(shard):
        tables.append(table)
        if sum(table.nbytes for table in tables) >= CACHE_BYTES:
            yield pa.concat_tables(tables)
            tables = []
    if tables:
        yield pa.concat_tables(tables)
