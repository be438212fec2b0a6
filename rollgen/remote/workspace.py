"""A run whose dataset is in object storage: the local directory that it works in, and what it sends from there.

    with Workspace("s3://bucket/run", "w0", WHOLE) as workspace:
        with WriterSlot(workspace.directory, "w0", WHOLE, remote=workspace) as slot:
            ...

Everything works in `workspace.directory` as in any dataset directory, with the small files of the dataset in it
(`mirror.py`) and none of its shards. Each commit is made there first and then sent, in this order:

    failures and logs of this writer
    data/part-<writer>-<number>.parquet       created exclusively, and verified
    journal/<writer>-<number>.jsonl           its line; created exclusively: from now on it is committed
    the local shard is removed

While the storage fails, a commit tries again for OUTAGE_SECONDS; sampling goes on meanwhile. What cannot be sent stays
in the workspace, and goes with the next commit or the next start on this machine. What waits and may not be sent is set
aside beside the workspace, where nothing removes it. A start takes the writer's lock (`lease.py`), sees to what others
have left (`arrival.py`), and then resumes as ever; an end sends the failures and logs, and removes the workspace unless
shards, failures or logs wait in it. A plain copy of all objects is a dataset directory.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Final, Self
from uuid import uuid4

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable, Unsent, UsageError
from rollgen.format.commit import WHOLE, Fetched, Holder, Part, quarantine
from rollgen.format.done import Problem
from rollgen.format.files import check_hard_links
from rollgen.format.journal import RECORD_FILE, JournalLine, list_shards, read_journal, shard_name
from rollgen.format.jsonlines import encode_line
from rollgen.format.layout import OWN_FILES
from rollgen.format.reader import check_size
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, MANIFEST_FILE
from rollgen.remote.arrival import Arrival, foreign_objects, is_journal_object, is_retirement, journal_object
from rollgen.remote.cache import cache_directory
from rollgen.remote.lease import SECTION_LOCK, Lease, State, Watch, lock_name, lost, writer_of_lock
from rollgen.remote.mirror import Mirror
from rollgen.remote.objects import THREADS, ObjectStore, for_each, output_store
from rollgen.remote.partial import fetch_columns

_FOLDER: Final = "workspaces"
_MAX_RETIREMENTS_BYTES: Final = 1 << 24
_ELSEWHERE: Final = "name another place in XDG_CACHE_HOME"
OUTAGE_SECONDS = 300.0
"""For which a commit is tried again while the storage fails. Restarts and expired credentials take minutes."""
_PAUSES: Final = (1.0, 30.0)
"""Seconds between two tries: the first pause, which doubles from try to try, and the longest one."""
_OUTAGE: Final = (MissingFile, Unreadable, Unsent)
"""What a storage that fails for a while may raise."""


def workspace_directory(url: str, writer: str) -> Path:
    """Where a writer of this dataset works, on this machine. Raises UsageError where nobody knows our home.

    The same URL may mean another bucket at another endpoint.
    """
    store = ObjectStore(url)
    key = hashlib.sha256(f"{store.endpoint}\n{store.url}\n{writer}".encode()).hexdigest()[:32]
    return cache_directory(_FOLDER) / key


@contextmanager
def glimpse(url: str, *, clean: bool = False) -> Iterator[Path]:
    """A directory with the small files of what is there now, for those who only look: a dry run.

    Raises UsageError as `Workspace` does. Takes no lock, and changes nothing.
    """
    store = output_store(url)
    with tempfile.TemporaryDirectory() as scratch:
        with _as_usage():
            names = store.list()
            _check(store.url, names, clean=clean)
            Mirror(store, Path(scratch), "").pull(names)
        yield Path(scratch)


class Workspace:
    """A writer's place in a dataset in object storage. Use as a context manager; see `format.commit.Remote`.

    With `clean`, what is there will be replaced. `note` is told what a user should know, from any thread: an outage at
    once, whatever the main thread waits for. `problem_in` gives the `format.done.Problem` of the dataset whose small
    files are in a directory. Raises UsageError for a URL that cannot be reached, written, or used because other objects
    are there, and for a workspace that cannot be made; OSError where the local disk fails later;
    ResumeRefused when a writer is alive that makes some of the same prompts; DatasetError for a damaged journal.
    """

    def __init__(
        self,
        url: str,
        writer: str,
        part: Part = WHOLE,
        *,
        clean: bool = False,
        note: Callable[[str], None],
        problem_in: Callable[[Path], Problem],
    ) -> None:
        self._store = output_store(url)
        self.url = self._store.url
        self.directory = workspace_directory(self.url, writer)
        self.next_number = 0
        """Of the next commit, and of its shard. One that is committed and not removed yet is the next one still."""
        self._writer = writer
        self._part = part
        self._clean = clean
        self._note = note
        self._problem_in = problem_in
        self._watch = Watch(self._store)
        self._lease = Lease(self._store, lock_name(writer), Holder(part, uuid4().hex), self._watch)
        self._mirror = Mirror(self._store, self.directory, writer)
        self._outage: float | None = None
        """When the storage began to fail that fails now."""
        self._given_up = threading.Event()
        self._committed: tuple[JournalLine, int] | None = None
        """The latest, with its number."""
        self._entered: Lease | None = None
        """The start section, while it is ours."""
        self._local_lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as on_error:
            on_error.callback(self._unlock)
            self._lock()
            arrival = Arrival(
                self._store,
                self.directory,
                self._writer,
                self._part,
                self._mirror,
                self._watch,
                self._note,
                self.fetched,
                self.set_aside,
                self._problem_in,
                clean=self._clean,
            )
            with _as_usage():
                _check(self.url, self._store.list(), clean=self._clean)
                arrival.await_others()
            with ExitStack() as section:
                with _as_usage():
                    section.enter_context(self._section())
                    state = self._lease.acquire(self._note)
                    on_error.callback(self._lease.release)
                    self._lease.prove()
                self.next_number = arrival.settle(silent=state is State.SILENT)
            on_error.pop_all()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            self._lease.check()
            self._mirror.push_own()
        except (DatasetError, ResumeRefused) as error:
            if kind is None:
                raise
            self._note(str(error))
        finally:
            self._lease.release()
            self._leave()

    @contextmanager
    def section(self, given_up: Callable[[], bool] | None = None) -> Iterator[None]:
        """The start section of all writers: what they have changed is here in it, and what is changed in it is sent.

        Nothing is sent when the block is left by an exception. Raises ResumeRefused when the wait for it is given up,
        or another process has gone on under this writer's name: nothing is changed then.
        """
        with self._section(given_up) as section:
            self._lease.check()
            self._mirror.pull_shared()
            self._entered = section
            try:
                yield
            finally:
                self._entered = None
            section.check()
            self._mirror.push_shared()

    def others(self) -> dict[str, Holder]:
        """The other writers that are alive, or may be.

        One that would keep our plan from growing is waited for, until it is known to be alive.
        """
        locks = {name: writer for name in self._store.list(JOURNAL_DIR) if (writer := writer_of_lock(name))}
        looks = {name: self._watch.look(name) for name, writer in locks.items() if writer != self._writer}
        for name, (state, sign) in looks.items():
            if state is State.UNKNOWN and self._differs(sign.holder):
                looks[name] = self._watch.settle(name, self._note, self._given_up.is_set)
        alive = (State.ALIVE, State.UNKNOWN)
        return {locks[name]: sign.holder for name, (state, sign) in looks.items() if state in alive}

    def declare(self, holder: Holder) -> None:
        """Say this of the writer, in its lock. Raises as `section` does."""
        self._lease.say(holder)

    def commit(self, line: JournalLine) -> None:
        """Send a shard that is in the workspace, or a retirement. It is committed, and not here any more, on return.

        Raises DatasetError when the storage has failed for OUTAGE_SECONDS, or it was given up, and OSError when the
        local disk has: to be called again, as by whom that has failed afterwards. Raises DatasetError at once for a
        shard that is damaged, or another one in its place, and ResumeRefused when another process has gone on under
        this writer's name.
        """
        pause, longest = _PAUSES
        while True:
            try:
                self._commit(line)
            except _OUTAGE as error:
                if not self._may_recover(error):
                    raise
            else:
                self._outage = None
                return
            self._given_up.wait(pause)
            pause = min(2 * pause, longest)

    def give_up(self) -> None:
        """Wait neither for a storage that fails (a commit raises then), nor to see whether another writer is alive.

        From any thread, or a signal's.
        """
        self._given_up.set()

    def _may_recover(self, error: DatasetError) -> bool:
        """Whether another try is worth it. Tells the user, once per outage."""
        now = time.monotonic()
        if self._outage is None and OUTAGE_SECONDS > 0 and not self._given_up.is_set():
            self._note(f"{error}; the commit is tried again for {OUTAGE_SECONDS:g} s, and sampling goes on meanwhile")
        self._outage = now if self._outage is None else self._outage
        return now < self._outage + OUTAGE_SECONDS and not self._given_up.is_set()

    def _commit(self, line: JournalLine) -> None:
        path = self.directory / DATA_DIR / line.file
        if self._committed is None or self._committed[0] != line:
            self._send(line, path)
            self._committed = line, self.next_number
        if not line.retired:
            path.unlink(missing_ok=True)
        self.next_number = self._committed[1] + 1  # not before: whoever names the next shard counts those that are here

    def _send(self, line: JournalLine, path: Path) -> None:
        self._lease.check()
        self._mirror.push_own()
        assert line.retired or line.file == shard_name(self._writer, self.next_number)
        if not line.retired:
            self._store.upload(path, f"{DATA_DIR}/{line.file}", line.sha256)
        if not self._store.create(journal_object(self._writer, self.next_number), encode_line(line)):
            raise lost(self._store, lock_name(self._writer))

    def clear(self) -> None:
        """Remove the dataset and nothing else, the manifest first. In the start section.

        Numbers go on, and whatever only retires shards stays: it may be the fence of a writer that comes back much
        later. Raises ResumeRefused when the section, or this writer's name, is another process's by now, or a dataset
        is there that was not to be replaced.
        """
        assert self._entered is not None
        names = self._store.list()
        if MANIFEST_FILE in names and not self._clean:
            raise ResumeRefused(f"{self.url}: a run has appeared there meanwhile; continue it with --resume")
        kept = self._retirements(names)
        for pattern in OWN_FILES:
            for name in fnmatch.filter(names, pattern):
                if name not in kept:
                    self._entered.check_again()
                    self._lease.check_again()
                    self._store.delete(name)
        self._mirror.forget()

    def _retirements(self, names: Collection[str]) -> set[str]:
        """Journal objects that commit nothing."""
        found: set[str] = set()

        def look(name: str) -> None:
            if is_retirement(self._store.read(name, _MAX_RETIREMENTS_BYTES)):
                found.add(name)

        for_each(look, filter(is_journal_object, names))
        return found

    def set_aside(self, shard: Path) -> Path:
        """Keep a shard of the workspace that is not to be sent where nothing removes it. Returns where."""
        place = self.directory.with_suffix(".aside")
        place.mkdir(mode=0o700, exist_ok=True)
        return quarantine(place, shard)

    def fetched(self, lines: Sequence[JournalLine], columns: Sequence[str]) -> Iterator[Fetched]:
        """These shards in turn, each with these columns in a file that is there until the next one is asked for."""
        sizes = self._store.list(DATA_DIR) if lines else {}
        with ThreadPoolExecutor(THREADS) as threads, ExitStack() as on_exit:
            on_exit.callback(threads.shutdown, cancel_futures=True)
            coming: deque[Fetched] = deque()
            for line in lines:
                place = f"{self.url}/{DATA_DIR}/{line.file}"
                path = self.directory / DATA_DIR / f".tmp-fetched-{line.file}"
                size = sizes.get(f"{DATA_DIR}/{line.file}")
                fetch = threads.submit(self._fetch, line, size, columns, path)
                coming.append(Fetched(line, place, size is not None, fetch.result))
                if len(coming) > THREADS:
                    yield from _used(coming.popleft())
            while coming:
                yield from _used(coming.popleft())

    @contextmanager
    def present(self, columns: Sequence[str]) -> Iterator[None]:
        """Every shard of the dataset is here meanwhile, under its name, as far as these columns go."""
        data = self.directory / DATA_DIR
        here = {path.name for path in list_shards(self.directory)}
        lines = [line for name, line in sorted(read_journal(self.directory).committed.items()) if name not in here]
        made: list[Path] = []
        try:
            made.extend(shard.path().rename(data / shard.line.file) for shard in self.fetched(lines, columns))
            yield
        finally:
            for path in made:
                path.unlink()

    def _fetch(self, line: JournalLine, size: int | None, columns: Sequence[str], path: Path) -> Path:
        place = f"{self.url}/{DATA_DIR}/{line.file}"
        if size is None:
            raise MissingFile(f"{place}: missing")
        check_size(size, place, line)
        fetch_columns(self._store, line, columns, path)
        return path

    def _differs(self, other: Holder) -> bool:
        """Whether another writer works by another plan than this one."""
        plans = {self._lease.holder.plan_sha256, other.plan_sha256}
        return len(plans) == 2 and None not in plans

    @contextmanager
    def _section(self, given_up: Callable[[], bool] | None = None) -> Iterator[Lease]:
        lease = Lease(self._store, SECTION_LOCK, Holder(self._part, uuid4().hex), self._watch)
        lease.acquire(self._note, wait=True, given_up=given_up or (lambda: False))
        try:
            yield lease
        finally:
            lease.release()

    def _lock(self) -> None:
        """Make the workspace this process's own: what another one works with must not be tidied."""
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._local_lock = self.directory.with_suffix(".lock").open("ab")
            fcntl.flock(self._local_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in ("", DATA_DIR, JOURNAL_DIR):
                (self.directory / name).mkdir(mode=0o700, exist_ok=True)
            (self.directory / lock_name(self._writer)).touch()  # by which a directory is known as a run's
            check_hard_links(self.directory / ".tmp-link", fix=_ELSEWHERE)
        except BlockingIOError:
            raise ResumeRefused(
                f"{self.url}: another rollgen on this machine is writing this dataset; wait for it, or stop it"
            ) from None
        except OSError as error:
            place = error.filename or self.directory
            raise UsageError(f"{place}: cannot keep there what is to be sent: {error.strerror}; {_ELSEWHERE}") from None

    def _leave(self) -> None:
        """Remove the workspace, unless it holds what is nowhere else."""
        with ExitStack() as on_exit:
            on_exit.callback(self._unlock)
            waiting = []
            if shards := list_shards(self.directory):
                waiting.append(f"finished shards that could not be sent: {len(shards)}; they wait")
            if self._mirror.has_unsent:
                waiting.append("failures and logs that could not be sent wait")
            for what in waiting:
                self._note(f"{self.url}: {what} in {self.directory} and go with --resume on this machine")
            if not waiting:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _unlock(self) -> None:
        if self._local_lock is not None:
            self._local_lock.close()
            self._local_lock = None


def _check(url: str, names: Collection[str], *, clean: bool) -> None:
    """Raises UsageError when no run may start there."""
    if f"{JOURNAL_DIR}/{RECORD_FILE}" in names:
        raise UsageError(f"{url}: was copied while it was being compacted; complete that in a local copy")
    if MANIFEST_FILE in names:
        return
    if foreign := foreign_objects(names):
        raise UsageError(
            f"--out {url}: holds objects that are not a rollgen run, such as {foreign[0]}; choose another URL"
        )
    if not clean and any(name.startswith(f"{DATA_DIR}/") for name in names):
        raise UsageError(
            f"--out {url}: holds shards but no {MANIFEST_FILE}; put it back from a copy, replace the run with --clean, "
            "or choose another --out"
        )


def _used(shard: Fetched) -> Iterator[Fetched]:
    """Give it away, and remove its file afterwards."""
    yield shard
    with suppress(DatasetError):
        shard.path().unlink(missing_ok=True)


@contextmanager
def _as_usage() -> Iterator[None]:
    """At the first contact a storage that fails is a mistake in the command, or in the environment."""
    try:
        yield
    except DatasetError as error:
        raise UsageError(str(error)) from error
