"""Who gets which batch: the arithmetic of ranks and workers, and where an iteration starts, in every process.

Global batches of an epoch are numbered 0, 1, ... A step takes the next `world_size` of them from the position at which
the iteration started; rank r gets the r-th. Worker j of W makes the steps j, j + W, ... of its rank, which is the order
in which a DataLoader takes them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils.data import get_worker_info

from rollgen.errors import ResumeRefused, UsageError

Uneven = Literal["pad", "drop"]

MAX_WORKERS: Final = 1023
"""DataLoader workers of one rank."""
_EPOCH_BITS: Final = 32
_EPOCH_MASK: Final = (1 << _EPOCH_BITS) - 1


class Cursor(NamedTuple):
    """A place between two steps, the same for all ranks."""

    epoch: int
    position: int
    """Global batches of the epoch that come before."""


PLACE_KEYS: Final = frozenset({*Cursor._fields, "done", "rank", "world_size", "worker", "workers"})
"""What a state may say about a place, all of them whole numbers: a cursor, and of a worker's state the rest too."""


class Share(NamedTuple):
    """What one worker of one rank makes of an epoch, from a cursor on."""

    start: Cursor
    total: int
    """Global batches of the epoch."""
    rank: int
    world_size: int
    worker: int
    workers: int
    uneven: Uneven

    @property
    def steps(self) -> int:
        """Of each rank, over all its workers. An incomplete last one counts with `pad`, and does not with `drop`."""
        left = self.total - self.start.position
        return -(-left // self.world_size) if self.uneven == "pad" else left // self.world_size

    def batches(self, done: int = 0) -> Iterator[tuple[int | None, Cursor]]:
        """Number of each batch, None for an empty one, and the cursor after its step; without the first `done`."""
        for step in range(self.worker + done * self.workers, self.steps, self.workers):
            number = self.start.position + step * self.world_size + self.rank
            after = Cursor(self.start.epoch, self.start.position + (step + 1) * self.world_size)
            is_last = step + 1 == self.steps
            yield number if number < self.total else None, Cursor(self.start.epoch + 1, 0) if is_last else after


@dataclass(slots=True)
class Progress:
    """How far an iteration of this process has come."""

    start: Cursor
    done: int
    """Batches of it that were handed out: here, or before it was restored."""


class _Slot(IntEnum):
    """Columns of what each process has in shared memory."""

    WORK = 0
    """Key of the DataLoader iterator that it last worked for, and the epoch it began for it: one word, written at once.

    0: none since the start was set.
    """
    FIRST = 1
    """The epoch that this iterator began with, written before WORK is."""
    SKIPPED = 2
    """Batches that the first iteration leaves out: a worker had made them before it was restored."""


class StartPoint:
    """Where the next iteration starts, for the main process and its DataLoader workers together.

    Set in the main process, in memory shared with the workers, so that it reaches workers that are running already. The
    first iteration after it was set starts there, and each further one with the epoch after the last that anyone began.
    Workers of one DataLoader iterator know each other by a key, so that they begin the same epoch, however many there
    are, whoever is first, and though some worker of an earlier iterator was ended before it began. A worker that is so
    slow to come that the start was set again since it was made works for nobody, and does not count.

    One iterator at a time: workers of two would take each other's rows.
    """

    def __init__(self) -> None:
        self._start = _shared(2)
        """Epoch and position."""
        self._settings = _shared(1)
        """How often it was set, in the main process."""
        self._known_settings = 0
        """How often it had been set when this process was made; or later, where the process could not miss it."""
        self._slots = _shared(1 + MAX_WORKERS, len(_Slot))
        """A row for the main process, and one for each number of a worker."""
        self._running: Progress | None = None
        """Of the latest iteration of this process."""

    @property
    def epoch(self) -> int:
        """That the next iteration begins, or continues."""
        return self._next_epoch(self._slots[:, _Slot.WORK])

    @property
    def was_used(self) -> bool:
        """Whether an iteration has begun since it was set."""
        return bool(self._slots[:, _Slot.WORK].any())

    def set(self, start: Cursor, *, skipped: int = 0) -> None:
        """Start there next. A restored worker clears away what was before, not what its fellows, restored too, set."""
        slot = _slot()
        if not slot:
            self._settings += 1
        self._known_settings = int(self._settings)
        keys = self._slots[:, _Slot.WORK] >> _EPOCH_BITS
        self._start[:] = torch.tensor(start)
        self._slots[(keys != 0) & (keys != _key()) if slot else slice(None)] = 0
        self._slots[slot] = torch.tensor([0, 0, skipped])
        self._running = None

    def begin(self) -> Progress:
        """Begin an iteration in this process, which counts in the result the batches that it hands out."""
        key, mine = _key(), self._slots[_slot()]
        start = Cursor(*self._start.tolist())
        is_late = self._running is None and self._known_settings != int(self._settings)
        self._known_settings = int(self._settings)  # persistent workers begin further iterations when told, not late
        if is_late:
            self._running = Progress(start, 0)
            return self._running
        if int(mine[_Slot.WORK]) >> _EPOCH_BITS == key:  # workers that persist
            epoch = (int(mine[_Slot.WORK]) & _EPOCH_MASK) + 1
        else:
            slots = self._slots.clone()  # fellows may be writing theirs
            team = slots[slots[:, _Slot.WORK] >> _EPOCH_BITS == key]
            epoch = int(team[0, _Slot.FIRST]) if len(team) else self._next_epoch(slots[:, _Slot.WORK])
            mine[_Slot.FIRST] = epoch
        mine[_Slot.WORK] = key << _EPOCH_BITS | epoch
        self._running = Progress(Cursor(epoch, 0), 0)
        if epoch == start.epoch:
            self._running = Progress(start, int(mine[_Slot.SKIPPED]))
        return self._running

    def check_undisturbed(self) -> None:
        """Raise UsageError in a worker whose row another DataLoader iterator has taken: both are in use."""
        slot = _slot()
        if slot and int(self._slots[slot, _Slot.WORK]) >> _EPOCH_BITS not in (0, _key()):
            raise UsageError("two DataLoader iterators are reading one stream at the same time: give each a stream")

    def _next_epoch(self, work: Tensor) -> int:
        begun = work[work != 0] & _EPOCH_MASK
        return 1 + int(begun.max()) if len(begun) else int(self._start[0])

    def state(self, rank: int, world_size: int) -> dict[str, int]:
        """Where the iteration of this process stands; before the first one, where it will start.

        Raises UsageError in the main process when DataLoader workers do the iterating: only they know.
        """
        if not self.was_used:
            epoch, position = self._start.tolist()
            return {"epoch": epoch, "position": position}
        worker, workers = this_worker()
        if self._running is None or (get_worker_info() is None and self._running.start.epoch + 1 != self.epoch):
            raise UsageError("state_dict: workers are ahead of what was used; pass the batch that was used last")
        place = {"rank": rank, "world_size": world_size, "worker": worker, "workers": workers}
        return {**self._running.start._asdict(), "done": self._running.done, **place}

    def load(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Start where a state says that `state`, or a cursor, has given. Raises ResumeRefused when it is another's."""
        if "done" in state:
            worker, workers = this_worker()
            here = {"rank": rank, "world_size": world_size, "worker": worker, "workers": workers}
            for name, value in here.items():
                if state.get(name) != value:
                    raise ResumeRefused(
                        f"the state is of {name} {state.get(name)}, this is {name} {value}; a state that "
                        "`state_dict(batch)` makes fits any number of ranks and workers"
                    )
        self.set(Cursor(state["epoch"], state["position"]), skipped=state.get("done", 0))


def _shared(*shape: int) -> Tensor:
    """int64 zeros that DataLoader workers see too, forked or spawned. Their memory has no name that a crash leaves."""
    zeros = torch.zeros(shape, dtype=torch.int64)
    zeros.untyped_storage().share_memory_()
    return zeros


def _key() -> int:
    """31 bits, not 0, that the workers of one DataLoader iterator have in common; new each time in a main process.

    From the seed that a DataLoader draws for each iterator, and the number of workers: the seeds are equal when the
    caller seeds torch before each epoch.
    """
    info = get_worker_info()
    drawn = secrets.randbits(64) if info is None else hash((info.seed - info.id, info.num_workers))
    return 1 + drawn % ((1 << 31) - 1)


def this_worker() -> tuple[int, int]:
    """Number of this DataLoader worker and how many there are; 0 of 1 in the main process."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _slot() -> int:
    info = get_worker_info()
    slot = 0 if info is None else 1 + info.id
    if slot > MAX_WORKERS:
        raise UsageError(f"num_workers: at most {MAX_WORKERS} workers can share a stream")
    return slot


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The rank and how many there are: as given, else torch.distributed's, else 0 of 1.

    Raises UsageError for one without the other, for a rank that does not exist, and when the environment says that
    there are several processes and nobody says which this is: each would read everything.
    """
    if rank is None and world_size is None:
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        processes = os.environ.get("WORLD_SIZE", "1")
        if processes not in ("", "1"):
            raise UsageError(
                f"WORLD_SIZE is {processes}, but torch.distributed is not initialised: call init_process_group first, "
                "or pass rank= and world_size="
            )
        return 0, 1
    if rank is None or world_size is None:
        raise UsageError("rank and world_size belong together: pass both, or neither")
    if not (isinstance(rank, int) and isinstance(world_size, int)):
        raise UsageError(f"rank and world_size must be whole numbers, not {rank!r} and {world_size!r}")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank must be from 0 to {world_size - 1} (world_size - 1), not {rank}")
    return rank, world_size


def check_rank(rank: int, world_size: int) -> None:
    """Raise UsageError when torch.distributed was initialised after the rank was looked up, and says another one."""
    if distributed.is_available() and distributed.is_initialized():
        now = distributed.get_rank(), distributed.get_world_size()
        if now != (rank, world_size):
            raise UsageError(
                f"the stream was made for rank {rank} of {world_size}, torch.distributed says {now[0]} of {now[1]}: "
                "make it after init_process_group, or pass rank= and world_size="
            )


def check_same_on_all_ranks(identity: Mapping[str, Any], world_size: int) -> None:
    """Raise UsageError when the ranks of torch.distributed would read different datasets, or in different orders.

    Copies on several hosts may differ, and so may what damage left of them. Nothing is compared where torch.distributed
    is not initialised, or has another number of ranks: then these are not the ones that share a stream.
    """
    if not (distributed.is_available() and distributed.is_initialized()) or this_worker() != (0, 1):
        return
    if world_size == 1 or distributed.get_world_size() != world_size:
        return
    everyone: list[Any] = [None] * world_size
    group = distributed.new_group(backend="gloo")  # the default one may need a device that is not chosen yet
    distributed.all_gather_object(everyone, dict(identity), group=group)
    distributed.destroy_process_group(group)
    for rank, theirs in enumerate(everyone):
        for name, value in identity.items():
            if theirs[name] != value:
                raise UsageError(f"rank {rank} has another {name} than this one: {theirs[name]!r}, not {value!r}")
