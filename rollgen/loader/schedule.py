"""Who gets which batch: the arithmetic of ranks and workers, and where an iteration starts, in every process.

Global batches of an epoch are numbered 0, 1, ... A step takes the next `world_size` of them from the position at which
the iteration started; rank r gets the r-th. Worker j of W makes the steps j, j + W, ... of its rank, which is the order
in which a DataLoader takes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils.data import get_worker_info

from rollgen.errors import ResumeRefused, UsageError

Uneven = Literal["pad", "drop"]

MAX_WORKERS: Final = 1023
"""DataLoader workers of one rank."""


class Cursor(NamedTuple):
    """A place between two steps, the same for all ranks."""

    epoch: int
    position: int
    """Global batches of the epoch that come before."""


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


class StartPoint:
    """Where the next iteration starts, for the main process and its DataLoader workers together.

    Set in the main process, in memory shared with the workers, so that it reaches workers that are running already. The
    first iteration after it was set starts there, the n-th after that at the beginning of the n-th epoch after; each
    process counts its own, in a slot that a worker of the next epoch finds again. So all of these iterations must be
    made by the same team, the main process or as many workers: another one would not know how many there were.
    """

    def __init__(self) -> None:
        self._start = _shared(2)
        """Epoch and position."""
        self._begun = _shared(1 + MAX_WORKERS)
        """Iterations begun since, by slot: 0 is the main process, 1 + j worker j."""
        self._skipped = _shared(1 + MAX_WORKERS)
        """Batches that the first of them leaves out, by slot: a worker had made them before it was restored."""
        self._team = _shared(1)
        """Who makes them: 0 nobody so far, 1 the main process, 1 + W its W workers."""
        self._running: Progress | None = None
        """Of the latest iteration of this process."""

    @property
    def epoch(self) -> int:
        """That the next iteration begins, or continues."""
        begun = self._begun.max() if get_worker_info() is None else self._begun[_slot()]
        return int(self._start[0] + begun)

    @property
    def was_used(self) -> bool:
        """Whether an iteration has begun since it was set."""
        return bool(self._begun.any())

    def set(self, start: Cursor, *, skipped: int = 0) -> None:
        """Start there next. A worker that is restored sets its own slot only: the others do so too."""
        slots = slice(None) if get_worker_info() is None else _slot()
        self._start[:] = torch.tensor(start)
        self._begun[slots] = 0
        self._skipped[slots] = skipped
        self._team[0] = 0
        self._running = None

    def begin(self) -> Progress:
        """Begin an iteration in this process, which counts in the result the batches that it hands out.

        Raises UsageError when another team made the iterations before.
        """
        slot = _slot()
        self._join_team(0 if get_worker_info() is None else this_worker()[1])
        epoch, position = self._start.tolist()
        begun, skipped = int(self._begun[slot]), int(self._skipped[slot])
        self._begun[slot] += 1
        first = Progress(Cursor(epoch, position), skipped)
        self._running = first if begun == 0 else Progress(Cursor(epoch + begun, 0), 0)
        return self._running

    def _join_team(self, workers: int) -> None:
        before = int(self._team[0]) - 1
        if before not in (-1, workers):
            raise UsageError(
                f"num_workers is {workers}, and was {before} in the iteration before: call set_epoch in the main "
                "process, so that all workers begin the same epoch"
            )
        self._team[0] = 1 + workers

    def state(self, rank: int, world_size: int) -> dict[str, int]:
        """Where the iteration of this process stands; before the first one, where it will start.

        Raises UsageError in the main process when DataLoader workers do the iterating: only they know.
        """
        worker, workers = this_worker()
        if self._running is None:
            if get_worker_info() is None and self._begun[1:].any():
                raise UsageError("state_dict: workers are ahead of what was used; pass the batch that was used last")
            epoch, position = self._start.tolist()
            return {"epoch": epoch, "position": position}
        place = {"rank": rank, "world_size": world_size, "worker": worker, "workers": workers}
        return {**self._running.start._asdict(), "done": self._running.done, **place}

    def load(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Start where a state says that `state`, or a cursor, has given. Raises ResumeRefused when it is another's."""
        if "done" in state:
            worker, workers = this_worker()
            here = {"rank": rank, "world_size": world_size, "worker": worker, "workers": workers}
            for name, value in here.items():
                if state[name] != value:
                    raise ResumeRefused(
                        f"the state is of {name} {state[name]}, this is {name} {value}; a state that "
                        "`state_dict(batch)` makes fits any number of ranks and workers"
                    )
        self.set(Cursor(state["epoch"], state["position"]), skipped=state.get("done", 0))


def _shared(size: int) -> Tensor:
    """int64 zeros that DataLoader workers see too, forked or spawned. Their memory has no name that a crash leaves."""
    zeros = torch.zeros(size, dtype=torch.int64)
    zeros.untyped_storage().share_memory_()
    return zeros


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
