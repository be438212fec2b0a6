"""Where the shards of one task go: `data/part-r<hash>-<seq>.parquet`, committed on the node that made them.

It is a `ShardWriter`'s place without a journal: the driver, who holds the writer's slot, appends the lines to its own.
A shard whose line never reaches the journal is complete, and recovery adds the line.

Two who should not be there may still be: a replica of a driver that was killed and has a successor, and a replica that
Ray takes for dead, whose task another one makes again. Both find out before they publish, in the start section: the
first because the writer's lock is free or says another attempt, the second because the next number of its task is taken
by a shard that it did not make. Temporary names are of each process alone, so that nobody writes into the file of
another. What is there of a task is found by its numbered names: nobody lists a directory of many shards for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from rollgen.errors import RollgenError
from rollgen.format.commit import is_current, start_section
from rollgen.format.files import link
from rollgen.format.journal import JournalLine, durable_line, shard_name, temporary_name
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
        paths = (self._path(number) for number in itertools.count())
        self._known = list(itertools.takewhile(Path.exists, paths))

    @property
    def stored(self) -> list[Path]:
        """Shards of this task that were there before this slot was, and those that it has published."""
        return self._known

    def temporary(self) -> Path:
        """See `writer.ShardPlace`; so below."""
        return self._data / f"{temporary_name(self._task, len(self._known))}-{_PROCESS}"

    def publish(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """Raises Abandoned or Overtaken, having published nothing."""
        directory, path = self._employer.directory, self._path(len(self._known))
        line = durable_line(temporary, path.name, rows=rows, tokens=tokens, mask_ids=mask_ids)
        with start_section(directory):
            if not is_current(*self._employer):
                raise Abandoned(f"{directory}: attempt {self._employer.attempt} is over")
            try:
                link(temporary, path)  # the caller removes the other name
            except FileExistsError:
                raise Overtaken(f"{directory}: task {self._task} is made by another process too") from None
        self._known.append(path)
        return line

    def append(self, line: JournalLine) -> None:
        """The shard's name is durable on return. Its line is not: see above."""
        fsync_directory(self._data)
        self._committed(self._data / line.file, line)

    def _path(self, number: int) -> Path:
        """Of the shards of this task, which are numbered without a gap."""
        return self._data / shard_name(self._task, number)
