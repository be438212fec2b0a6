"""The commit protocol of a shard, the journal, and what a writer finds when it comes back after a crash.

A Parquet file without a footer is lost whole, so the shard is the unit of durability:

    data/.tmp-<writer>-<seq>   written, closed, reopened and verified, fsynced, hashed
    data/part-<writer>-<seq>.parquet   the same file, linked to a name that cannot exist yet; directory fsynced
    journal/<writer>.jsonl     one line appended and fsynced

A shard whose journal line is missing (a crash between the last two steps) is complete: recovery verifies it and adds
the line. A shard that is missing or damaged is retired by a second line (`"retired": true`) and its samples are owed
again; readers pass over retired files.

Each writer holds `journal/<writer>.lock` while it lives, so leftovers under its name belong to a dead one and may be
removed: by the next writer of that name, those of `rollgen compact` by any, and those beside the manifest by a writer
that is alone. The lock file says which part of the prompts it makes, and by which plan: live writers share one division
into parts, and no two make the same one. Whoever starts or leaves does so under `journal/start-section.lock`, one at a
time; who starts first completes a replacement of shards that was interrupted (`replacement.py`).

Of a dataset in object storage the directory is where its writer works. A shard is in it until its line is appended,
which sends both (`Remote`); the numbers of shards, the other writers and the start section are those of the storage.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple, Protocol, Self
from uuid import uuid4

from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format import replacement
from rollgen.format.files import check_hard_links, link, open_regular, refuse_links, remove_leftover
from rollgen.format.journal import (
    JournalLine,
    durable_line,
    list_shards,
    parse_shard_name,
    read_journal,
    shard_name,
    temporary_name,
)
from rollgen.format.jsonlines import append_line, parse_object, truncate_torn_tail
from rollgen.format.locks import is_locked, open_lock
from rollgen.format.manifest import fsync_directory
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, QUARANTINE_DIR

TASK_NAMES = "r" + 16 * "[0-9a-f]"
"""Pattern of the names under which shards are built on other machines, for a writer whose journal takes their lines."""
PART_NAME = re.compile(r"s(?P<number>\d{1,9})of(?P<of>\d{1,9})")
"""Names of those who make a part (`--shard`), whose siblings pass over them."""
WHOLE_NAME = "w0"
"""Of who makes everything, and commits for the tasks of a cluster."""
_WRITER_NAME = re.compile(r"[A-Za-z0-9_]+")
_RESERVED_NAME = re.compile(rf"s\d+of\d+|{TASK_NAMES}")
"""What looks like the name of a part, and those of tasks."""
_START_LOCK = "start-section.lock"
"""Not the lock of a writer: no writer's name has a hyphen."""
_MAX_LOCK_BYTES = 1 << 12


class Part(NamedTuple):
    """Which prompts a writer makes: those whose number is `number` modulo `of`."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def conflicts(self, other: Part) -> bool:
        """Whether a prompt could be in both. Other divisions than ours count: they overlap somewhere."""
        return self.of != other.of or self.number == other.number


WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True)
class Holder:
    """What the lock file of a live writer says of it."""

    part: Part = WHOLE
    attempt: str = ""
    """A name that no other attempt has, of this writer or another."""
    plan_sha256: str | None = None
    """Of the plan that it works on, once it has one."""

    def to_json(self) -> bytes:
        """The lock file's content."""
        said = {"part": self.part, "attempt": self.attempt, "plan_sha256": self.plan_sha256}
        return json.dumps(said).encode() + b"\n"


class Fetched(NamedTuple):
    """Some columns of a shard that is in object storage."""

    line: JournalLine
    place: str
    """Its URL, for errors."""
    is_listed: bool
    """Whether there is an object of this name at all."""
    path: Callable[[], Path]
    """Waits for them. Raises MissingFile, DatasetError when the object is not the committed one, and Unreadable."""


class Remote(Protocol):
    """The dataset in object storage that a directory is the workspace of: see `rollgen.remote.workspace`."""

    url: str
    next_number: int
    """Of the next commit, and so of the next shard."""

    def section(self, given_up: Callable[[], bool] | None = None) -> AbstractContextManager[None]:
        """The start section of all its writers: plan and manifest are those of the dataset in it, and after it."""

    def others(self) -> dict[str, Holder]:
        """The other writers that are alive."""

    def declare(self, holder: Holder) -> None:
        """Let them know."""

    def commit(self, line: JournalLine) -> None:
        """Send a line, and its shard before it unless the line retires one. The shard is not here any more then.

        Raises DatasetError when the storage has failed for too long.
        """

    def set_aside(self, shard: Path) -> Path:
        """Keep a shard of the workspace that is not to be sent where nothing removes it. Returns where."""
        ...

    def give_up(self) -> None:
        """Wait no longer for a storage that fails, nor to see who is alive. From any thread, or a signal's."""

    def clear(self) -> None:
        """Remove the dataset. In the start section."""

    def fetched(self, lines: Sequence[JournalLine], columns: Sequence[str]) -> Iterator[Fetched]:
        """These shards in turn, each with these columns in a file that is there until the next one is asked for."""

    def present(self, columns: Sequence[str]) -> AbstractContextManager[None]:
        """Every shard of the dataset is in the directory meanwhile, as far as these columns go."""


def live_writers(directory: Path) -> frozenset[str]:
    """Names of the writers that are alive now: those whose lock is held. A look, which changes nothing.

    Raises DatasetError for a lock that is no regular file or cannot be opened: who is alive cannot be told then.
    """
    locks = (directory / JOURNAL_DIR).glob("*.lock")
    return frozenset(path.stem for path in locks if path.name != _START_LOCK and is_locked(path))


def is_current(directory: Path, writer: str, attempt: str) -> bool:
    """Whether this attempt of a writer is alive. Stays so while the caller holds the start section.

    Raises DatasetError for a lock that cannot be read.
    """
    held = is_locked(directory / JOURNAL_DIR / f"{writer}.lock")
    return held and read_holder(directory, writer).attempt == attempt


@contextmanager
def start_section(directory: Path, given_up: Callable[[], bool] | None = None) -> Iterator[None]:
    """What starting or leaving writers do one after the other. Waits for its turn, until `given_up` says so.

    Whoever holds it knows that no writer comes to life meanwhile. Raises UsageError when the directory cannot be
    written, or must not because of a link, and ResumeRefused when the wait was given up.
    """
    refuse_links(directory)
    path = directory / JOURNAL_DIR / _START_LOCK
    with writable(path):
        lock = open_lock(path, given_up)
    if lock is None:
        raise ResumeRefused(f"{path}: another rollgen starts or leaves there; wait for it, or stop it")
    with lock:
        yield


class WriterSlot:
    """One writer's exclusive place in a dataset: its lock, its journal, its sequence of shard names.

    `writer` matches `[A-Za-z0-9_]+`. Use as a context manager. Raises ResumeRefused when a writer of that name, or one
    whose part could hold the same prompts, is alive, UsageError when the directory cannot be written or has no hard
    links, and DatasetError when the journal is damaged or a replacement of shards was interrupted and cannot be
    completed. With `afresh` it neither looks at what is there nor changes it: for a caller that will remove or mend it.
    With `remote`, `directory` is the workspace of a dataset in object storage.
    """

    def __init__(
        self, directory: Path, writer: str, part: Part = WHOLE, *, afresh: bool = False, remote: Remote | None = None
    ) -> None:
        self.directory = directory
        self.writer = writer
        self.part = part
        self.attempt = uuid4().hex
        """Says in the lock file which attempt this is."""
        self.remote = remote
        self._afresh = afresh
        self._journal_path = directory / JOURNAL_DIR / f"{writer}.jsonl"
        self._lock: IO[bytes] | None = None
        self._sequence = 0

    def __enter__(self) -> Self:
        with self.section(), ExitStack() as on_error:
            on_error.callback(self.__exit__)
            self._check_others()
            self._take_lock()
            if not self._afresh:
                self._come_back()
            on_error.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.close()  # releases the lock
            self._lock = None

    @property
    def held(self) -> bool:
        """Whether it has been entered and not left, in this process: a forked child has let go."""
        return self._lock is not None and not self._lock.closed

    @contextmanager
    def section(self, given_up: Callable[[], bool] | None = None) -> Iterator[None]:
        """The start section of this dataset (`start_section`), wherever it is."""
        with start_section(self.directory, given_up), self.remote.section(given_up) if self.remote else nullcontext():
            yield

    def present(self, columns: Sequence[str]) -> AbstractContextManager[None]:
        """Every shard of the dataset is in the directory meanwhile, as far as these columns go."""
        return self.remote.present(columns) if self.remote else nullcontext()

    def others(self) -> dict[str, Holder]:
        """The other writers that are alive."""
        if self.remote is not None:
            return self.remote.others()
        return {
            name: read_holder(self.directory, name) for name in sorted(live_writers(self.directory) - {self.writer})
        }

    def declare(self, plan_sha256: str) -> None:
        """Let other writers know by which plan this one works. In the start section."""
        self._say(Holder(self.part, self.attempt, plan_sha256))

    def renew(self) -> None:
        """Take another name for this attempt: who works for it under the old one has no part in it from now on.

        See `is_current`. In the start section. The time of the lock file stays: it says when this writer started.
        """
        assert self._lock is not None
        times = os.fstat(self._lock.fileno())
        self.attempt = uuid4().hex
        self._say(replace(read_holder(self.directory, self.writer), attempt=self.attempt))
        os.utime(self._lock.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))

    def _come_back(self) -> None:
        """Complete what was decided, remove what was not, and go on after the last name."""
        replacement.complete(self.directory)
        others = self.others().keys()
        for writer in {self.writer, replacement.COMPACTOR} - others:
            _remove_leftovers(self.directory / DATA_DIR, f".tmp-{writer}-*")
        if not others:  # else a manifest or a plan may be one of theirs, or a shard that is built for them
            _remove_leftovers(self.directory, ".tmp-*")
            _remove_leftovers(self.directory / DATA_DIR, f".tmp-{TASK_NAMES}-*")
        truncate_torn_tail(self._journal_path)
        self._sequence = self._next_sequence()

    def _check_others(self) -> None:
        for writer, other in self.others().items():
            if self.part == other.part == WHOLE:
                raise ResumeRefused(
                    f"{self.directory}: another rollgen (writer {writer!r}) is writing this dataset; wait for it, or "
                    "stop it"
                )
            if self.part.conflicts(other.part):
                raise ResumeRefused(
                    f"{self.directory}: writer {writer!r} is alive and makes part {other.part} of the prompts, which "
                    f"part {self.part} of writer {self.writer!r} does not go with; wait for it, or stop it"
                )

    def _take_lock(self) -> None:
        path = self.directory / JOURNAL_DIR / f"{self.writer}.lock"
        with writable(path):
            (self.directory / DATA_DIR).mkdir(exist_ok=True)
            self._lock = open_lock(path)
            if self._lock is None:
                raise ResumeRefused(f"{path}: another rollgen is writing this dataset; wait for it, or stop it")
            check_hard_links(self.directory / f".tmp-{self.writer}-link")
            self._say(Holder(self.part, self.attempt))

    def _say(self, holder: Holder) -> None:
        assert self._lock is not None
        self._lock.truncate(0)
        self._lock.write(holder.to_json())
        os.fsync(self._lock.fileno())  # other machines may read it
        if self.remote is not None:
            self.remote.declare(holder)

    @property
    def _number(self) -> int:
        """Of the next shard."""
        if self.remote is None:
            return self._sequence
        return self.remote.next_number + len(list_shards(self.directory))  # after those that wait

    def temporary(self) -> Path:
        """Where the next shard is built: beside its target, under a name no reader looks at."""
        return self.directory / DATA_DIR / temporary_name(self.writer, self._number)

    def publish(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """Give a closed and verified file its final name. It is a committed shard once `append` has taken the line."""
        line = self._line(temporary, rows=rows, tokens=tokens, mask_ids=mask_ids)
        link(temporary, self.directory / DATA_DIR / line.file)  # the caller removes the other name
        self._sequence += 1
        return line

    def set_aside(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """Keep a closed and verified file under its temporary name, for a `Replacement`: the line is that of later."""
        line = self._line(temporary, rows=rows, tokens=tokens, mask_ids=mask_ids)
        self._sequence += 1
        return line

    def _line(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """The line of a file that is on disk from now on, with the next name."""
        name = shard_name(self.writer, self._number)
        return durable_line(temporary, name, rows=rows, tokens=tokens, mask_ids=mask_ids)

    def append(self, line: JournalLine) -> None:
        """Append one line to this writer's journal. The shard's name and the line are durable on return.

        Of a remote dataset they are sent; when that raises DatasetError, the shard waits here for another call.
        """
        fsync_directory(self.directory / DATA_DIR)
        if self.remote is not None:
            self.remote.commit(line)
        append_line(self._journal_path, line, durable=True)
        fsync_directory(self._journal_path.parent)

    def retire(self, line: JournalLine) -> None:
        """Take a shard out of the dataset, durably. The file itself is not touched."""
        self.append(replace(line, retired=True))

    def _next_sequence(self) -> int:
        """Past every name that was ever used: in place, in quarantine, or known to the journal only."""
        journal = read_journal(self.directory)
        files = [*list_shards(self.directory), *(self.directory / QUARANTINE_DIR).glob("part-*.parquet")]
        names = {path.name for path in files} | journal.committed.keys() | journal.retired.keys()
        taken = [parsed for name in names if (parsed := parse_shard_name(name))]
        return 1 + max((sequence for writer, sequence in taken if writer == self.writer), default=-1)


def writer_name(part: Part) -> str:
    """Under which name `rollgen generate` makes a part, or everything."""
    return WHOLE_NAME if part == WHOLE else f"s{part.number}of{part.of}"


def check_writer_name(writer: str) -> None:
    """Raise UsageError for a name that no shard could carry, or that is not for writers of samples."""
    if writer in (replacement.COMPACTOR, replacement.REPAIRER):
        raise UsageError(f"writer: {writer!r} is the name under which `rollgen {writer}` writes; use another")
    if _RESERVED_NAME.fullmatch(writer):
        raise UsageError(f"writer: {writer!r} is a name that `rollgen generate` gives to its parts; use another")
    if not _WRITER_NAME.fullmatch(writer):
        raise UsageError(f"writer: {writer!r} is no name for a writer; use letters, digits and underscores")


def _remove_leftovers(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        remove_leftover(path)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an OSError into one line that names its file, or else `path`. Raises UsageError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room there" if full else "make it writable, or use another directory (for a dataset, a copy of it)"
        raise UsageError(f"{error.filename or path}: cannot be written: {error.strerror}; {fix}") from None


def read_holder(directory: Path, writer: str) -> Holder:
    """What a live writer's lock file says; of one that says nothing, the whole. Raises DatasetError for anything else:

    whoever wrote that is no writer that we know, and would not keep to a part.
    """
    path = directory / JOURNAL_DIR / f"{writer}.lock"
    with open_regular(path) as file:
        content = file.read(_MAX_LOCK_BYTES)
    if not content:
        return Holder()
    try:
        said = parse_object(content)
        match said:
            case {"part": [int(number), int(of)]} if 0 <= number < of < 1 << 31:
                return Holder(Part(number, of), said.get("attempt", ""), said.get("plan_sha256"))
    except ValueError:
        pass
    raise DatasetError(f"{path}: damaged, though its writer is alive; stop that, and start again")


def quarantine(directory: Path, shard: Path) -> Path:
    """Move a damaged shard out of `data/`. Nothing is deleted; its samples become owed."""
    target = quarantine_place(directory, shard.name)
    shard.rename(target)
    fsync_directory(target.parent)
    return target


def quarantine_place(directory: Path, name: str) -> Path:
    """A free name in `quarantine/`, made from `name`: nothing that is there, be it a link, is taken over."""
    place = directory / QUARANTINE_DIR
    place.mkdir(exist_ok=True)
    stem, suffix = name.split(".", 1)
    names = itertools.chain([name], (f"{stem}.{number}.{suffix}" for number in itertools.count(1)))
    return next(found for found in map(place.joinpath, names) if not os.path.lexists(found))
