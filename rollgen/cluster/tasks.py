"""What is owed, cut into tasks: positions (see `loop/owed.py`) of consecutive prompts, with a name for their shards.

A task is one row of a Ray dataset: numbers and a name, so that the prompts themselves are read where they are used,
from the plan in the dataset directory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from rollgen.loop.owed import Owed
    from rollgen.rollouts import Int64Array

TASK_SCHEMA: Final = pa.schema(
    [("name", pa.string()), ("starts", pa.list_(pa.int64())), ("stops", pa.list_(pa.int64()))]
)
"""Positions as runs: those from `starts[i]` up to `stops[i]`."""
MAX_TASKS: Final = 20_000
"""Of a round, about: the driver holds each as an object of Ray."""
TASKS_PER_REPLICA: Final = 4
"""At least, where there is enough to do: who is done early takes from those who are late."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Samples that one replica makes together."""

    name: str
    """The writer's name in its shards: `r` and 16 hexadecimal digits."""
    positions: Int64Array
    """int64 [S], in plan order."""

    @classmethod
    def of(cls, positions: Int64Array, attempt: str) -> Self:
        """Named by a hash of what it makes and for whom: no other task, of this attempt or another, has that name."""
        sha256 = hashlib.sha256(attempt.encode() + np.sort(positions).astype("<i8").tobytes())
        return cls("r" + sha256.hexdigest()[:16], positions)

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """From a table of one row of TASK_SCHEMA."""
        [row] = table.to_pylist()
        runs = zip(row["starts"], row["stops"], strict=True)
        return cls(row["name"], np.concatenate([np.arange(start, stop) for start, stop in runs]))

    def to_table(self) -> pa.Table:
        """As one row of TASK_SCHEMA."""
        breaks = np.flatnonzero(np.diff(self.positions) != 1) + 1
        runs = np.split(self.positions, breaks)
        row = {"name": self.name, "starts": [int(r[0]) for r in runs], "stops": [int(r[-1]) + 1 for r in runs]}
        return pa.Table.from_pylist([row], schema=TASK_SCHEMA)


def cut_tasks(owed: Owed, attempt: str, *, replicas: int, window: int) -> list[Task]:
    """Everything that can be asked for, as tasks of about `task_size` samples.

    The samples of a prompt stay together, unless they alone are more than that.
    """
    positions, prompts = owed.places()
    size = task_size(len(positions), replicas=replicas, window=window)
    return [Task.of(part, attempt) for part in np.split(positions, _cuts(prompts, size)) if len(part)]


def task_size(owed: int, *, replicas: int, window: int) -> int:
    """Half of what an engine keeps in flight, less when replicas would be idle, more when there would be too many."""
    fair = owed // (replicas * TASKS_PER_REPLICA)
    return max(1, min(window // 2, fair), -(-owed // MAX_TASKS))


def _cuts(prompts: Int64Array, size: int) -> Int64Array:
    """Every `size` samples, or at the next prompt where that begins less than `size` later."""
    evenly = np.arange(size, len(prompts), size)
    starts = np.append(np.flatnonzero(np.diff(prompts)) + 1, len(prompts))
    following = starts[np.searchsorted(starts, evenly)]
    return np.unique(np.where(following - evenly < size, following, evenly))
