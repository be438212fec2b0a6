"""How fast a run is at its last commits: tokens a second of the writers that are at work, or of the last that were.

Each writer's rate is that of its commits since it began to sample, or of those of the last RECENT_SECONDS; rates of
writers that work beside each other add up. A commit's time is the modification time of its shard, and when sampling
began says the log of the attempt, because a model may load for minutes before. Times of files are believed only as long
as the manifest's own time agrees with what it says: in a copy of a directory they mean nothing. (`throughput.py`, which
looks further back, holds each of them against the logs, whose times are text.)
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from rollgen.errors import DatasetError
from rollgen.format.commit import PART_NAME, TASK_NAMES, WHOLE_NAME
from rollgen.format.files import open_regular
from rollgen.format.schema import JOURNAL_DIR, LOGS_DIR, MANIFEST_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from rollgen.format.manifest import Attempt, Manifest

RECENT_SECONDS: Final = 600.0
"""Over which a rate is measured: several commits, unless they are far apart."""
_CLOCK_SECONDS: Final = 60.0
"""By which the manifest's modification time may differ from the start that it records."""
_LOG: Final = re.compile(r"\d{8}T\d{6}-(?P<writer>[A-Za-z0-9_]+)\.log")
_SAMPLING: Final = re.compile(rb"^(\S+) phase: generate$", re.MULTILINE)
_LOG_HEAD: Final = 1 << 16
"""Bytes of a log that are searched for the beginning of sampling: what comes before is a few lines."""
_LOG_TAIL: Final = 1 << 14
"""Bytes that hold the last line of a log."""
_ENDED_SECONDS: Final = 2.0
"""Logs round down to seconds."""
_COPY_SECONDS: Final = 5.0
"""By which the modification time of a log may differ from the time of its last line: what writes them is quick."""
_SILENT_SECONDS: Final = 120.0
"""For which a log that goes on, or that a kill has cut off, may have said nothing: it tells progress every minute."""


class Commit(NamedTuple):
    """A shard, as far as it tells of speed."""

    writer: str
    time: float
    tokens: int


class Session(NamedTuple):
    """The sampling of one attempt, as its log tells it."""

    writer: str
    began: float
    """When it began to sample."""
    ended: float
    """No commit of it is later."""
    is_copied: bool
    """Whether the log was written at another time than its last line says: those of other files mean nothing either."""


def is_task(writer: str) -> bool:
    """Whether this is the name of a task of a cluster, and not of a writer with a journal."""
    return re.fullmatch(TASK_NAMES, writer) is not None


def tokens_per_second(
    directory: Path, manifest: Manifest, commits: Iterable[Commit], at_work: frozenset[str] | None
) -> float | None:
    """Of the writers `at_work`; None for those of the last attempt, and of who worked beside it.

    None when there is nothing to measure by, as before the first commit of an attempt.
    """
    started = last_start(directory, manifest)
    if started is None:
        return None
    begun = {session.writer: session.began for session in sessions(directory)}  # the last one of each
    by_writer = defaultdict(list)
    for commit in commits:
        by_writer[WHOLE_NAME if is_task(commit.writer) else commit.writer].append(commit)
    last = {name for name, those in by_writer.items() if max(commit.time for commit in those) > started}
    names = last if at_work is None else at_work
    began = {name: max(begun.get(name, started), _earliest(directory, name, started, at_work)) for name in by_writer}
    return sum(_rate(by_writer[name], began[name]) for name in names & began.keys()) or None


def started_at(directory: Path, attempt: Attempt) -> float:
    """When an attempt started: seconds since the epoch. Raises DatasetError when the manifest has no time there."""
    try:
        return datetime.fromisoformat(attempt.started_at).timestamp()
    except ValueError:
        path = directory / MANIFEST_FILE
        raise DatasetError(f"{path}: started_at of an attempt is not an ISO 8601 time") from None


def last_start(directory: Path, manifest: Manifest) -> float | None:
    """When the last attempt started; None when file times do not agree with it."""
    if not manifest.attempts:
        return None
    started = started_at(directory, manifest.attempts[-1])
    written = (directory / MANIFEST_FILE).stat().st_mtime
    return started if abs(written - started) <= _CLOCK_SECONDS else None


def sessions(directory: Path) -> Iterator[Session]:
    """Of each attempt that keeps a log and came to sample, oldest first."""
    for path in sorted((directory / LOGS_DIR).glob("*.log")):
        if (name := _LOG.fullmatch(path.name)) and (session := _session(path, name["writer"])) is not None:
            yield session


def _session(log: Path, writer: str) -> Session | None:
    """What a log tells; None for an attempt that did not come to sample, and for what is no log."""
    with suppress(OSError, DatasetError, ValueError), open_regular(log) as file:
        found = _SAMPLING.search(file.read(_LOG_HEAD))
        if found is None:
            return None
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL))
        stamp, said = file.read().splitlines()[-1].split(b" ", 1)
        later = _ENDED_SECONDS if said.startswith(b"ended") else _SILENT_SECONDS
        last, written = _seconds(stamp), os.fstat(file.fileno()).st_mtime
        return Session(writer, _seconds(found[1]), last + later, is_copied=abs(written - last) > _COPY_SECONDS)
    return None


def _seconds(stamp: bytes) -> float:
    """Of a line of a log, since the epoch. Raises ValueError."""
    return datetime.fromisoformat(stamp.decode()).timestamp()


def _earliest(directory: Path, writer: str, started: float, at_work: frozenset[str] | None) -> float:
    """What a writer made before is of an earlier attempt: who makes a part may have begun before the last to start."""
    if PART_NAME.fullmatch(writer) is None:
        return started
    if at_work is not None and writer in at_work:
        with suppress(FileNotFoundError):  # it has ended meanwhile
            return (directory / JOURNAL_DIR / f"{writer}.lock").stat().st_mtime
    return 0.0


def _rate(commits: Sequence[Commit], began: float) -> float:
    """Tokens a second of one writer over its last commits since it `began`; 0 without any.

    The time of a commit is that since the one before it, or since the beginning.
    """
    since = [commit for commit in commits if commit.time > began]
    if not since:
        return 0.0
    last = max(commit.time for commit in since)
    begin = max((commit.time for commit in since if commit.time <= last - RECENT_SECONDS), default=began)
    return sum(commit.tokens for commit in since if commit.time > begin) / (last - begin)
