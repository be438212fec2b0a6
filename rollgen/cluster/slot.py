"""Where the shards of one task go: `data/part-r<hash>-<seq>.parquet`, committed on the node that made them.

It is a `ShardWriter`'s place without a journal: the driver, who holds the writer's slot, appends the lines to its own.
A shard whose line never reaches the journal is complete, and recovery adds the line.

Two who should not be there may still be: a replica of a driver that was killed and has a successor, and a replica that
Ray takes for dead, whose task another one makes again. Both find out before they publish, in the start section: the
first because the writer's lock is free or says another attempt, the second because a shard of its task is there that it
did not make. Temporary names are of each process alone, so that nobody writes into the file of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from rollgen.errors import RollgenError
from rollgen.format.commit import is_current, start_section
from rollgen.format.journal import JournalLine, file_sha256, footer_sha256, shard_name, temporary_name
from rollgen.format.manifest import fsync_directory
from rollgen.format.schema import DATA_DIR

_PROCESS: Final = uuid4().hex[:8]


class Abandoned(RollgenError):
    """The attempt that this task is of is over: its driver is gone, or has given the task to others."""


class Overtaken(RollgenError):
    """Another process makes this task too, and has stored some of it."""


class Employer(NamedTuple):
    """The attempt that tasks are made for."""

    directory: Path
    writer: str
    attempt: str
    """As the writer's lock file says: see `commit.is_current`."""


class TaskSlot:
    """The place of one task, of which other processes may have stored a part. `writer.ShardPlace`.

    `committed` is called, in the thread that writes, with the path and the line of each shard that is durable.
    """

    def __init__(self, employer: Employer, task: str, committed: Callable[[Path, JournalLine], None]) -> None:
        self._employer = employer
        self._task = task
        self._committed = committed
        self._data = employer.directory / DATA_DIR
        self._known = _task_shards(employer.directory, task)

    @property
    def stored(self) -> list[Path]:
        """Shards of this task that were there before this slot was, and those that it has published."""
        return self._known

    def temporary(self) -> Path:
        """See `writer.ShardPlace`; so below."""
        return self._data / f"{temporary_name(self._task, len(self._known))}-{_PROCESS}"

    def publish(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """Raises Abandoned or Overtaken, having published nothing."""
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        line = JournalLine(
            file=shard_name(self._task, len(self._known)),
            bytes=temporary.stat().st_size,
            sha256=file_sha256(temporary),
            footer_sha256=footer_sha256(temporary),
            rows=rows,
            tokens=tokens,
            mask_ids=mask_ids,
        )
        with start_section(self._employer.directory):
            self._check()
            os.link(temporary, self._data / line.file)
        self._known.append(self._data / line.file)
        return line

    def append(self, line: JournalLine) -> None:
        """The shard's name is durable on return. Its line is not: see above."""
        fsync_directory(self._data)
        self._committed(self._data / line.file, line)

    def _check(self) -> None:
        if not is_current(*self._employer):
            raise Abandoned(f"{self._employer.directory}: attempt {self._employer.attempt} is over")
        if _task_shards(self._employer.directory, self._task) != self._known:
            raise Overtaken(f"{self._employer.directory}: task {self._task} is made by another process too")


def _task_shards(directory: Path, task: str) -> list[Path]:
    """The shards of a task that are in place, in the order of their making."""
    return sorted((directory / DATA_DIR).glob(f"part-{task}-*.parquet"))
