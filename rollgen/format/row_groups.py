"""What is kept at hand of row groups and shards that are read again and again, in bounds: for one thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from rollgen.format.reader import ShardReader, StoredShard

CACHE_BYTES: Final = 256 << 20
"""Decoded row groups kept by a process; one of 64k tokens takes some 5 MB."""


class Sized(Protocol):
    """Something that says what memory it takes."""

    @property
    def nbytes(self) -> int:
        """Bytes."""


RowGroup = TypeVar("RowGroup", bound=Sized)


class RowGroupCache(Generic[RowGroup]):
    """The row groups used last, by number; `load` makes one that is not there."""

    def __init__(self, load: Callable[[int], RowGroup], max_bytes: int = CACHE_BYTES) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, RowGroup] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, number: int) -> RowGroup:
        if (row_group := self._kept.get(number)) is None:
            row_group = self._kept[number] = self._load(number)
            self._bytes += row_group.nbytes
        self._kept.move_to_end(number)
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))
        return row_group

    def __iter__(self) -> Iterator[int]:
        """The numbers of those that are kept."""
        return iter([*self._kept])

    def drop(self, number: int) -> None:
        """Forget one that is kept."""
        self._bytes -= self._kept.pop(number).nbytes


class OpenShards:
    """The shards read last, open: a footer is parsed once for a run of row groups. Not to be shared or forked."""

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._open: OrderedDict[StoredShard, ShardReader] = OrderedDict()

    def __getitem__(self, stored: StoredShard) -> ShardReader:
        shard = self._open.get(stored)
        if shard is None:
            shard = self._open[stored] = stored.open()
        self._open.move_to_end(stored)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)[1].close()
        return shard

    def drop_copy(self, stored: StoredShard) -> bool:
        """Close this one, and forget a copy in which there was damage: `StoredShard.drop_copy`."""
        if stored in self._open:
            self._open.pop(stored).close()
        return stored.drop_copy()

    def close(self) -> None:
        """Close them all."""
        while self._open:
            self._open.popitem()[1].close()
