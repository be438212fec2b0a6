"""`BatchMaker`: the batches of one epoch, by number; reads each row group once while it is in use.

Numbers are asked for in rising order. A row group is kept until the last batch of the epoch that needs it, or until
more bytes are kept than allowed: then the one used least recently goes, and is read again if it must be.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

import numpy as np

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.reader import ShardReader, StoredShard
from rollgen.format.row_groups import OpenShards, RowGroupCache
from rollgen.loader.batch import BATCH_SCALARS, Layout, RolloutBatch, assemble
from rollgen.loader.index import Index, Loss, report_loss
from rollgen.loader.order import Epoch, Units, last_uses, samples_of
from rollgen.loader.samples import Samples, empty_samples, gather
from rollgen.loader.schedule import Cursor

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array


class BatchMaker:
    """For one thread. Use as a context manager: it keeps files open.

    lost   takes, by row group, what damage took; None: damage raises DatasetError
    """

    def __init__(
        self,
        index: Index,
        units: Units,
        epoch: Epoch,
        *,
        layout: Layout,
        pad_id: int,
        cache_bytes: int,
        lost: dict[int, Loss] | None,
        routed_experts: bool = False,
    ) -> None:
        self._index, self._units, self._epoch = index, units, epoch
        self._layout, self._pad_id = layout, pad_id
        self._lost = lost
        self._scalars = index.scalars(BATCH_SCALARS)
        self._experts = index.experts() if routed_experts else None
        self._unreadable: set[int] = set()  # in this epoch: the next one tries again
        self._last_uses = last_uses(units, epoch, index.locate(np.arange(len(index)))[0], len(index.groups))
        self._shards = OpenShards()
        self._row_groups = RowGroupCache(self._load, cache_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._shards.close()

    def make(self, number: int | None, cursor: Cursor) -> RolloutBatch:
        """Global batch `number`, None for an empty one; `cursor` is what it carries."""
        wanted = np.zeros(0, np.int64) if number is None else samples_of(self._units, self._epoch.batch(number))
        samples, there = self._read(wanted)
        if number is not None:
            for group in self._row_groups:
                if self._last_uses[group] <= number:
                    self._row_groups.drop(group)
        return assemble(
            samples,
            layout=self._layout,
            pad_id=self._pad_id,
            dataset_index=self._index.dataset[there],
            cursor=cursor,
            lost=len(wanted) - len(there),
        )

    def _read(self, wanted: Int64Array) -> tuple[Samples, Int64Array]:
        """The samples wanted, and which of them are there."""
        group, row = self._index.locate(wanted)
        loaded = {number: self._load_or_lose(number) for number in np.unique(group).tolist()}
        sources = {number: samples for number, samples in loaded.items() if samples is not None}
        if not sources:
            stored, vocab_size = self._index.has_support_logprobs, self._index.vocab_size
            none = empty_samples(
                vocab_size,
                self._scalars,
                support_logprobs=stored,
                experts=self._experts,
                rewards=self._index.rewards.values if self._index.rewards else (),
            )
            return none, wanted[:0]
        there = np.isin(group, list(sources))
        source = np.searchsorted(list(sources), group[there])
        return gather(list(sources.values()), source, row[there]), wanted[there]

    def _load_or_lose(self, group: int) -> Samples | None:
        if group in self._unreadable:
            return None
        try:
            return self._row_groups[group]
        except (MissingFile, Unreadable):  # no damage
            raise
        except DatasetError as error:
            if self._lost is None:
                raise
            self._unreadable.add(group)
            if group not in self._lost:
                self._lost[group] = self._index.loss(group, error)
                report_loss(self._lost[group])
            return None

    def _load(self, group: int) -> Samples:
        return self._index.load(group, self._scalars, self._experts is not None, self._opened, self._shards.drop_copy)

    def _opened(self, part: StoredShard) -> AbstractContextManager[ShardReader]:
        return nullcontext(self._shards[part])
