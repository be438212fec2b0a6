"""Which shards a compaction replaces, and which rows go where: arithmetic on keys, which writes nothing.

Replaced are the shards with fewer than half of the tokens wanted, and those that share a prompt with another shard.
(One without rows, which only other software writes, stays: there is nothing to copy.)
Their prompts are dealt to new shards one after the other, whole, each shard closed once it has the tokens wanted: by
`prompt_index`, or in a dataset without a plan, where that is a hash, in the order in which they came, so that the rows
of a new shard lie near each other in the old ones. A merge deals the same way. Memory is about 70 bytes a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.errors import DatasetError
from rollgen.format.journal import JournalLine
from rollgen.format.keys import Keys
from rollgen.format.reader import ShardReader, StoredShard, read_columns
from rollgen.format.schema import FOOTER_ENGINE, shard_schema

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array, Int64Array


class KeyColumns(NamedTuple):
    """R rows in the order of shards, and in file order in each."""

    prompt_index: Int64Array
    sample_index: Int32Array
    generation: Int32Array
    response_length: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Where each row of a dataset is. Rows and row groups are numbered through, in the order of shards."""

    shards: tuple[StoredShard, ...]
    lines: tuple[JournalLine, ...]
    """Of each shard."""
    engines: tuple[bytes, ...]
    """Of each shard, what its footer says."""
    rows: KeyColumns
    row_groups: tuple[tuple[int, int], ...]
    """Of each row group, the number of its shard and its own number there."""
    starts: Int64Array
    """int64 [row groups + 1], the first row of each row group."""
    sizes: Int64Array
    """int64 [row groups], bytes, decompressed."""

    @classmethod
    def joined(cls, parts: Sequence[Index]) -> Index:
        """Of several datasets, one after the other."""
        shards = np.cumsum([0, *(len(part.shards) for part in parts)]).tolist()
        row_groups = (
            (first + shard, group)
            for first, part in zip(shards, parts, strict=False)
            for shard, group in part.row_groups
        )
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        return cls(
            tuple(chain.from_iterable(part.shards for part in parts)),
            tuple(chain.from_iterable(part.lines for part in parts)),
            tuple(chain.from_iterable(part.engines for part in parts)),
            KeyColumns(*map(np.concatenate, zip(*(part.rows for part in parts), strict=True))),
            tuple(row_groups),
            np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
            np.concatenate([part.sizes for part in parts]),
        )

    @property
    def keys(self) -> Keys:
        """Of all rows."""
        return Keys(*self.rows[:3])

    def order(self) -> Int64Array:
        """int64 [R], all rows in rising order of their keys. Raises DatasetError for a key that is there twice."""
        return self.keys.unique_order(self._stored)

    def current(self) -> npt.NDArray[np.bool_]:
        """bool [R]: the rows of the highest generation of their sample. Raises as `order`."""
        return self.keys.current(self._stored)

    def _stored(self, row: int) -> StoredShard:
        return self.locate(row)[0]

    @property
    def shard_starts(self) -> Int64Array:
        """int64 [shards + 1], the first row of each shard."""
        owners = np.array([shard for shard, _ in self.row_groups], np.int64)
        starts: Int64Array = self.starts[np.searchsorted(owners, np.arange(len(self.shards) + 1))]
        return starts

    def shard_of(self, rows: npt.ArrayLike) -> Int64Array:
        """int64, the number of the shard of each of these rows."""
        return np.searchsorted(self.shard_starts, rows, side="right") - 1

    def row_group_of(self, rows: npt.ArrayLike) -> Int64Array:
        """int64, the number of the row group of each of these rows."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def locate(self, row: int) -> tuple[StoredShard, int]:
        """The shard of a row, and its place in there."""
        shard = int(self.shard_of(row))
        return self.shards[shard], row - int(self.shard_starts[shard])

    def engines_of(self, rows: Int64Array) -> bytes:
        """What the footer of a shard of these rows says: the engines of all shards that they are from, each once."""
        engines = (self.engines[shard].split(b", ") for shard in np.unique(self.shard_of(rows)).tolist())
        return b", ".join(dict.fromkeys(chain.from_iterable(engines)))

    def windows(self, rows: Int64Array, max_bytes: int) -> Iterator[Int64Array]:
        """These rows, in this order, in stretches of one size, about so many bytes: rows of a row group count alike."""
        of_a_row = self.sizes / np.maximum(np.diff(self.starts), 1)
        sizes = np.ceil(of_a_row[self.row_group_of(rows)]).astype(np.int64)
        total, start = int(sizes.sum()), 0
        for end in _ends(sizes, math.ceil(total / max(1, round(total / max_bytes)))):
            yield rows[start:end]
            start = end

    def stretches(self, rows: Int64Array) -> Int64Array:
        """int64 [S + 1], where among these rows, in this order, S stretches begin and end: as few as possible.

        The rows of a stretch follow each other in one row group.
        """
        broken = (np.diff(rows) != 1) | (np.diff(self.row_group_of(rows)) != 0)
        return np.unique(np.concatenate([[0], np.flatnonzero(broken) + 1, [len(rows)]]))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What a compaction does."""

    replaced: tuple[int, ...]
    """Numbers of the old shards; empty when there is nothing to do."""
    shards: tuple[Int64Array, ...]
    """Of each new shard its rows, in order: int64, numbers of the index."""
    split_prompts: int
    """Prompts of the dataset whose rows are in several shards now."""


def read_index(shards: Sequence[StoredShard], optional: Mapping[str, bool]) -> Index:
    """Read the keys of all rows, verified. Raises DatasetError, naming the shard, for one that cannot be rewritten:

    damaged, without a journal line, with other `optional` columns than the manifest says, or columns of a later MINOR.
    """
    columns = [_columns(shard_schema(support_logprobs=False).empty_table().select(KeyColumns._fields))]
    row_groups, sizes, decoded, engines, lines = [], [], [], [], []
    for number, stored in enumerate(shards):
        with stored.open() as shard:
            lines.append(_check(stored, shard, optional))
            columns.append(_columns(read_columns(shard, KeyColumns._fields)))
            engines.append(shard.file.metadata.metadata[FOOTER_ENGINE])
            row_groups += [(number, group) for group in range(len(shard.row_group_rows))]
            sizes += shard.row_group_rows
            decoded += [_decoded_bytes(shard, group) for group in range(len(shard.row_group_rows))]
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    rows = KeyColumns(*map(np.concatenate, zip(*columns, strict=True)))
    return Index(
        tuple(shards), tuple(lines), tuple(engines), rows, tuple(row_groups), starts, np.array(decoded, np.int64)
    )


def plan_layout(index: Index, *, shard_tokens: int, planned: bool) -> Layout:
    """Choose the shards to replace and deal out their rows. Raises as `Index.order`."""
    order = index.order()
    prompt, shard = index.rows.prompt_index[order], index.shard_of(order)
    # Between rows of one prompt in order, each place where the shard changes: both shards hold that prompt.
    changes = np.flatnonzero((prompt[1:] == prompt[:-1]) & (shard[1:] != shard[:-1]))
    small = [number for number, line in enumerate(index.lines) if line.rows and line.tokens < shard_tokens / 2]
    replaced = np.unique(np.concatenate([np.array(small, np.int64), shard[changes], shard[changes + 1]]))
    rows = order[np.isin(shard, replaced)]
    dealt = tuple(deal(index.rows, rows, shard_tokens, planned=planned))
    split_prompts = len(np.unique(prompt[changes]))
    if len(dealt) >= len(replaced) and not split_prompts:
        return Layout((), (), 0)
    return Layout(tuple(replaced.tolist()), dealt, split_prompts)


def _columns(table: pa.Table) -> KeyColumns:
    return KeyColumns(*(column.to_numpy() for column in table.columns))


def _decoded_bytes(shard: ShardReader, group: int) -> int:
    chunks = shard.parquet.groups[group]
    return sum(chunks.chunk(leaf).uncompressed for leaf in range(chunks.columns))


def _check(stored: StoredShard, shard: ShardReader, optional: Mapping[str, bool]) -> JournalLine:
    """Its line."""
    if stored.line is None:
        raise DatasetError(
            f"{stored.path}: has no journal line: its writer was interrupted; `rollgen repair` verifies it and adds one"
        )
    if unknown := sorted(shard.stored - set(shard.schema.names)):
        raise DatasetError(f"{stored.path}: has columns that this version does not know: {unknown[0]}; upgrade rollgen")
    for name, wanted in optional.items():
        if (name in shard.stored) != wanted:
            raise DatasetError(f"{stored.path}: the manifest says {name} is {wanted}, this shard not")
    if FOOTER_ENGINE not in shard.file.metadata.metadata:
        raise DatasetError(f"{stored.path}: its footer has no {FOOTER_ENGINE.decode()}; not a rollgen shard")
    return stored.line


def deal(rows: KeyColumns, chosen: Int64Array, shard_tokens: int, *, planned: bool) -> Iterator[Int64Array]:
    """The chosen rows, sorted by key, as new shards: whole prompts, each shard sorted by key.

    Shards follow the keys where they are `planned`, else the order in which prompts came.
    """
    prompts, first = np.unique(rows.prompt_index[chosen], return_index=True)
    ends = np.append(first[1:], len(chosen))
    tokens = np.add.reduceat(rows.response_length[chosen], first, dtype=np.int64) if len(chosen) else first
    came = np.arange(len(prompts)) if planned else np.argsort(np.minimum.reduceat(chosen, first), kind="stable")
    start = 0
    for end in _ends(tokens[came], shard_tokens):
        members = np.sort(came[start:end])
        yield np.concatenate([chosen[first[one] : ends[one]] for one in members])
        start = end


def _ends(sizes: Int32Array | Int64Array, wanted: int) -> list[int]:
    """Ends of consecutive stretches of `sizes`, each closed once it adds up to `wanted`; the last one is what is left.

    The same as going from one to the next with a counter, in a step a stretch.
    """
    totals = np.cumsum(sizes, dtype=np.int64)
    ends, before = [], 0
    while (end := int(np.searchsorted(totals, before + wanted)) + 1) < len(sizes):
        ends.append(end)
        before = int(totals[end - 1])
    return [*ends, len(sizes)] if len(sizes) else []
