"""Rows copied out of stored shards into a new one, and compared: what `compact.py` and `merge.py` have in common.

    write     the rows as Arrow, out of verified row groups; the new row groups end where those of a writer would
    compare   the new shard, read back, with the old row groups, read again: row by row and column by column

What is changed of a row, if anything, is one function of a whole row group, so that the comparison is with what it
gives. Memory is CACHE_BYTES and a few row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa

from rollgen.curate.layout import Index, Run
from rollgen.errors import DatasetError
from rollgen.format.columns import RowGroupFilling, stored_sizes
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine
from rollgen.format.reader import count_mask_ids, open_shard, read_row_group
from rollgen.format.row_groups import CACHE_BYTES, RowGroupCache
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


def _old_row_groups(index: Index, change: Change) -> RowGroupCache[pa.Table]:
    """The row groups of the old shards, by their numbers in the index, verified and changed."""

    def load(row_group: int) -> pa.Table:
        shard, number = index.row_groups[row_group]
        with index.shards[shard].open() as reader:
            return change(row_group, read_row_group(reader, number))

    return RowGroupCache(load, CACHE_BYTES)


def _row_groups(index: Index, rows: Int64Array, schema: pa.Schema, change: Change) -> Iterator[pa.Table]:
    """The tables of a new shard's row groups, which end by the rule of those that are made of completions."""
    old, filling = _old_row_groups(index, change), RowGroupFilling()
    pieces: list[pa.Table] = []
    for run in index.runs(rows):
        for piece, is_last in _cut(old[run.row_group].select(schema.names), run, filling):
            pieces.append(piece)
            if is_last:
                yield pa.concat_tables(pieces).combine_chunks()
                pieces = []
    if pieces:
        yield pa.concat_tables(pieces).combine_chunks()


def _cut(table: pa.Table, run: Run, filling: RowGroupFilling) -> Iterator[tuple[pa.Table, bool]]:
    """A run's rows in pieces, each with whether it is the last one of its new row group."""
    first, end = run.first, run.first + run.rows
    for after, size in enumerate(stored_sizes(table.slice(first, run.rows)), first + 1):
        closed = filling.is_closed_by(size)
        if closed or after == end:
            yield _copy(table, first, after), closed
            first = after


def _copy(table: pa.Table, first: int, end: int) -> pa.Table:
    """Rows in memory of their own: a slice would keep the whole row group."""
    return table.take(pa.array(np.arange(first, end)))


def _compare(path: Path, index: Index, rows: Int64Array, change: Change) -> tuple[int, int]:
    """Read a new shard and, again, the old rows that it should hold. Returns its tokens and mask ids.

    Slices are compared, where rows were copied by position: what one of the two does wrong, the other shows.
    """
    old = _old_row_groups(index, change)
    tokens = mask_ids = start = 0
    with open_shard(path) as shard:
        for number, size in enumerate(shard.row_group_rows):
            table = read_row_group(shard, number)
            offset = 0
            for run in index.runs(rows[start : start + size]):
                wanted = old[run.row_group].slice(run.first, run.rows)
                if not table.slice(offset, run.rows).equals(wanted):
                    raise DatasetError(f"{path}: row group {number}: is not equal to the rows that were to be copied")
                offset += run.rows
            tokens += int(table["response_length"].to_numpy().sum(dtype=np.int64))
            mask_ids += count_mask_ids(table)
            start += size
    if start != len(rows):
        raise DatasetError(f"{path}: {start} rows were written, {len(rows)} were to be")
    return tokens, mask_ids
