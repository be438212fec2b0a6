"""The keys of all rows of a dataset, and which of these rows are current: 16 bytes a row, no tokens read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rollgen.errors import DatasetError
from rollgen.format.reader import StoredShard, read_columns
from rollgen.format.schema import shard_schema

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array, Int64Array


class Keys(NamedTuple):
    """Of N rows."""

    prompt_index: Int64Array
    sample_index: Int32Array
    generation: Int32Array

    @property
    def order(self) -> Int64Array:
        """int64 [N], stable: rows of a sample are neighbours, the latest generation last."""
        order: Int64Array = np.lexsort((self.generation, self.sample_index, self.prompt_index))
        return order

    def taken(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Keys:
        """Those of some rows."""
        return Keys(self.prompt_index[rows], self.sample_index[rows], self.generation[rows])

    def joined(self, others: Keys) -> Keys:
        """Those of these rows, then those of others."""
        return Keys(
            np.concatenate([self.prompt_index, others.prompt_index]),
            np.concatenate([self.sample_index, others.sample_index]),
            np.concatenate([self.generation, others.generation]),
        )


class ShardRows(NamedTuple):
    """The R rows of a dataset, in the order of shards and of rows in each."""

    keys: Keys
    starts: Int64Array
    """int64 [shards + 1], the first row of each shard."""

    def is_current(self, shards: Sequence[StoredShard]) -> npt.NDArray[np.bool_]:
        """bool [R]: the rows of the highest generation of their sample.

        Raises DatasetError when a key is there twice: a shard was copied.
        """
        order = self.keys.order
        prompt, sample, generation = (column[order] for column in self.keys)
        followed = (prompt[1:] == prompt[:-1]) & (sample[1:] == sample[:-1])
        twins = np.flatnonzero(followed & (generation[1:] == generation[:-1]))
        if twins.size:
            one, other = (shards[self._shard_of(order[twins[0] + offset])].place for offset in (0, 1))
            raise DatasetError(f"{other}: holds samples that {one} holds too; remove one of the two copies")
        current = np.ones(len(order), np.bool_)
        current[order[:-1][followed]] = False
        return current

    def _shard_of(self, row: np.int64) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1


def read_rows(shards: Sequence[StoredShard]) -> ShardRows:
    """The keys of all rows, every page verified. Raises DatasetError for damage."""
    tables = [shard_schema(support_logprobs=False).empty_table().select(Keys._fields)]
    for stored in shards:
        with stored.open() as shard:
            tables.append(read_columns(shard, Keys._fields))
    columns = [np.concatenate([table[name].to_numpy() for table in tables]) for name in Keys._fields]
    return ShardRows(Keys(*columns), np.cumsum([len(table) for table in tables], dtype=np.int64))
