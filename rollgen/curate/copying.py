"""Rows copied out of stored shards into a new one, and compared: what `compact.py` and `merge.py` have in common.

    write     the rows as Arrow, out of verified row groups; the new row groups end where those of a writer would
    compare   the new shard, read back, with the old row groups, read again: row by row and column by column

What is changed of a row, if anything, is one function of a whole row group, so that the comparison is with what it
gives. Rows are taken in the order of the old row groups, as many at once as fill CACHE_BYTES: each is decoded once for
them, wherever they lie. Memory is about twice that, and a few row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from rollgen.curate.layout import Index, Run
from rollgen.errors import DatasetError
from rollgen.format.columns import RowGroupFilling, stored_sizes
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine
from rollgen.format.reader import ShardReader, count_mask_ids, open_shard, read_row_group
from rollgen.format.row_groups import CACHE_BYTES
from rollgen.format.writer import write_parquet

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

Change: TypeAlias = Callable[[int, pa.Table], pa.Table]
"""What becomes of a row group: its number in the index and its table with all columns, to the table that is stored."""


def as_it_is(row_group: int, table: pa.Table) -> pa.Table:
    """The `Change` that is none."""
    return table


def copy_rows(
    slot: WriterSlot, path: Path, index: Index, rows: Int64Array, schema: pa.Schema, change: Change = as_it_is
) -> JournalLine:
    """Write these rows, in this order, as a shard of `slot` under its temporary name, and compare it with them.

    Returns the line that it is to have. Raises OSError, and DatasetError for a damaged row group or a difference.
    """
    write_parquet(path, _row_groups(index, rows, schema, change), schema)
    tokens, mask_ids = _compare(path, index, rows, change)
    return slot.set_aside(path, rows=len(rows), tokens=tokens, mask_ids=mask_ids)


def _row_groups(index: Index, rows: Int64Array, schema: pa.Schema, change: Change) -> Iterator[pa.Table]:
    """The tables of a new shard's row groups, which end by the rule of those that are made of completions."""
    filling = RowGroupFilling()
    pieces: list[pa.Table] = []
    for window in index.windows(rows, CACHE_BYTES):
        for run in _gathered(index, window, schema, change):
            for piece, is_last in _cut(run, filling):
                pieces.append(piece)
                if is_last:
                    yield pa.concat_tables(pieces).combine_chunks()
                    pieces = []
    if pieces:
        yield pa.concat_tables(pieces).combine_chunks()


def _gathered(index: Index, rows: Int64Array, schema: pa.Schema, change: Change) -> list[pa.Table]:
    """The runs of these rows, in order: each row group is decoded once, and what is not asked for is let go."""
    runs = [*index.runs(rows)]
    found: list[pa.Table] = [None] * len(runs)
    for table, places in _by_row_group(index, runs, change):
        chosen = table.select(schema.names)
        for place in places:
            run = runs[place]  # in memory of its own: a slice would keep the whole row group
            found[place] = chosen.take(pa.array(np.arange(run.first, run.first + run.rows)))
    return found


def _by_row_group(index: Index, runs: Sequence[Run], change: Change) -> Iterator[tuple[pa.Table, list[int]]]:
    """Each row group that has some of these runs, verified and changed, with their places."""
    places = sorted(range(len(runs)), key=lambda place: runs[place].row_group)
    for row_group, members in groupby(places, key=lambda place: runs[place].row_group):
        shard, number = index.row_groups[row_group]
        with index.shards[shard].open() as reader:
            yield change(row_group, read_row_group(reader, number)), [*members]


def _cut(run: pa.Table, filling: RowGroupFilling) -> Iterator[tuple[pa.Table, bool]]:
    """A run's rows in pieces, each with whether it is the last one of its new row group."""
    first = 0
    for after, size in enumerate(stored_sizes(run), 1):
        closed = filling.is_closed_by(size)
        if closed or after == len(run):
            yield run.slice(first, after - first), closed
            first = after


def _compare(path: Path, index: Index, rows: Int64Array, change: Change) -> tuple[int, int]:
    """Read a new shard and, again, the old rows that it should hold. Returns its tokens and mask ids.

    Slices are compared, where rows were copied by position: what one of the two does wrong, the other shows.
    """
    tokens = mask_ids = start = 0
    with open_shard(path) as shard:
        for table in _stretches(shard):
            runs = [*index.runs(rows[start : start + len(table)])]
            offsets = np.cumsum([0, *(run.rows for run in runs)]).tolist()
            for old, places in _by_row_group(index, runs, change):
                for run, offset in ((runs[place], offsets[place]) for place in places):
                    if not table.slice(offset, run.rows).equals(old.slice(run.first, run.rows)):
                        raise DatasetError(f"{path}: row {start + offset}: is not the row that was to be copied")
            tokens += int(table["response_length"].to_numpy().sum(dtype=np.int64))
            mask_ids += count_mask_ids(table)
            start += len(table)
    if start != len(rows):
        raise DatasetError(f"{path}: {start} rows were written, {len(rows)} were to be")
    return tokens, mask_ids


def _stretches(shard: ShardReader) -> Iterator[pa.Table]:
    """Its row groups, verified, as many at once as fill CACHE_BYTES."""
    tables: list[pa.Table] = []
    for number in range(len(shard.row_group_rows)):
        tables.append(read_row_group(shard, number))
        if sum(table.nbytes for table in tables) >= CACHE_BYTES:
            yield pa.concat_tables(tables)
            tables = []
    if tables:
        yield pa.concat_tables(tables)
