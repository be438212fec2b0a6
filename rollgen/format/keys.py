"""The keys of all rows of a dataset, and which of these rows are current: 16 bytes a row, no tokens read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rollgen.errors import DatasetError
from rollgen.format.reader import StoredShard, read_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from rollgen.rollouts import Int32Array, Int64Array

    Bools = npt.NDArray[np.bool_]


class Keys(NamedTuple):
    """Which sample each of N rows holds."""

    prompt_index: Int64Array
    sample_index: Int32Array
    generation: Int32Array

    @classmethod
    def of(cls, table: pa.Table) -> Keys:
        """Of a table that has these columns."""
        return cls(*(table[name].to_numpy() for name in cls._fields))

    @classmethod
    def joined(cls, parts: Iterable[Keys]) -> Keys:
        """One after the other."""
        none = cls(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))
        return cls(*(np.concatenate(column) for column in zip(none, *parts, strict=True)))

    def take(self, rows: Int64Array | Bools | slice) -> Keys:
        """Those of some rows."""
        return Keys(self.prompt_index[rows], self.sample_index[rows], self.generation[rows])

    def name(self, row: int) -> str:
        """One of them in words."""
        prompt, sample, generation = (column[row] for column in self)
        return f"prompt {prompt}, sample {sample}" + (f", generation {generation}" if generation else "")

    def order(self) -> Int64Array:
        """int64 [N]: rows in rising order of the keys, equal ones as they stand."""
        order: Int64Array = np.lexsort((self.generation, self.sample_index, self.prompt_index))
        return order

    def steps(self) -> Int64Array:
        """int64 [N - 1]: the sign of each key less the one before: 0 where a key is there twice in a row."""
        step = np.zeros(max(len(self.prompt_index) - 1, 0), np.int64)
        for column in self:  # compared, because differences of damaged numbers may overflow
            step = np.where(step == 0, (column[1:] > column[:-1]).astype(np.int64) - (column[1:] < column[:-1]), step)
        return step

    def last_rows_of(self, asked: Keys) -> Int64Array:
        """int64 [N]: of each of the N `asked` the last row that has its key, -1 where none has. A sort, and no loop."""
        count = len(self.prompt_index)
        both = Keys.joined([self, asked])
        order = both.order()  # stable: of equal keys first ours, the last one last
        sample = np.cumsum(np.append(0, both.take(order).steps() != 0))[: len(order)]
        latest = np.maximum.accumulate(np.where(order < count, np.arange(len(order)), -1))
        found = (latest >= 0) & (sample[latest] == sample)
        rows = np.full(len(order), -1)
        rows[order[found]] = order[latest[found]]
        return rows[count:]

    def unique_order(self, shard_of: Callable[[int], StoredShard]) -> Int64Array:
        """As `order`. Raises DatasetError when a key is there twice: a shard was copied; `shard_of` a row names it."""
        order = self.order()
        twins = np.flatnonzero(self.take(order).steps() == 0)
        if twins.size:
            one, other = (shard_of(int(order[twins[0] + offset])) for offset in (0, 1))
            raise DatasetError(f"{other.place}: holds samples that {one.name} holds too; remove one of the two copies")
        return order

    def current(self, shard_of: Callable[[int], StoredShard]) -> Bools:
        """bool [N]: the rows of the highest generation of their sample. Raises as `unique_order`."""
        return ~self._superseded(self.unique_order(shard_of))

    def superseded(self) -> Bools:
        """bool [N]: the rows of which there is a higher generation here. No key is there twice."""
        return self._superseded(self.order())

    def _superseded(self, order: Int64Array) -> Bools:
        prompt, sample, _ = self.take(order)
        followed = (prompt[1:] == prompt[:-1]) & (sample[1:] == sample[:-1])
        superseded = np.zeros(len(order), np.bool_)
        superseded[order[:-1][followed]] = True
        return superseded


class ShardRows(NamedTuple):
    """The R rows of a dataset, in the order of shards and of rows in each."""

    keys: Keys
    shards: Sequence[StoredShard]
    starts: Int64Array
    """int64 [shards + 1], the first row of each shard."""

    def current(self) -> Bools:
        """bool [R]: as `Keys.current`."""
        return self.keys.current(self._shard_of)

    def _shard_of(self, row: int) -> StoredShard:
        return self.shards[int(np.searchsorted(self.starts, row, side="right")) - 1]


def read_rows(shards: Sequence[StoredShard]) -> ShardRows:
    """The keys of all rows, every page verified. Raises DatasetError for damage."""
    parts = []
    for stored in shards:
        with stored.open() as shard:
            parts.append(Keys.of(read_columns(shard, Keys._fields)))
    starts = np.cumsum([0, *(len(part.prompt_index) for part in parts)], dtype=np.int64)
    return ShardRows(Keys.joined(parts), shards, starts)
