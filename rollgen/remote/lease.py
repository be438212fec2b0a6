"""Who is alive, said by objects: the locks of writers that share no file system.

    journal/<writer>.lock         held by a writer while it lives
    journal/start-section.lock    held by whoever starts, leaves, or changes plan and manifest

An object cannot be locked, so a lock is an object that is there. It is created exclusively, and its holder writes it
again every REFRESH_SECONDS with another beat. A lock that has not changed while somebody watched it for DEAD_SECONDS is
that of a dead holder. No clocks are compared for that: only one that was written OLD_SECONDS ago, by which no storage
lets clocks differ that it answers, needs not be watched. On the holder's own machine its process is looked at. The lock
of a dead holder is written over, or removed.

A holder that was only silent (suspended, cut off) finds that it has lost the lock, at its next beat or commit. One that
was suspended between a look at its lock and the beat after it writes over a lock that may be another's by then: as it
cannot tell, it has lost it. That a dead lock is taken by one of two watchers only is not promised: what keeps two
writers apart for certain is the exclusive creation of each commit's journal object (`workspace.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from rollgen.errors import MissingFile, ResumeRefused, RollgenError, Unreadable, UsageError
from rollgen.format.commit import Holder, Part
from rollgen.format.jsonlines import parse_object
from rollgen.format.schema import JOURNAL_DIR
from rollgen.remote.objects import ObjectStore

REFRESH_SECONDS = 15.0
DEAD_SECONDS = 60.0
"""Of silence. A model takes about as long to load."""
OLD_SECONDS: Final = 1800.0
"""S3 refuses requests of clocks that are 900 s off, the others do so too."""
POLL_SECONDS = 2.0
SECTION_LOCK: Final = f"{JOURNAL_DIR}/start-section.lock"
_MAX_LOCK_BYTES: Final = 1 << 12
_TRIES: Final = 3
_MOMENT_SECONDS: Final = 1.0
_FIELDS: Final = ("nonce", "host", "pid", "started", "beat")
"""Of a lock, beside those of `Holder`."""
_held: Final[set[str]] = set()
"""Nonces of the locks that this process holds."""
_WRITER_LOCK: Final = re.compile(rf"{JOURNAL_DIR}/([A-Za-z0-9_]+)\.lock")


def lock_name(writer: str) -> str:
    """Of a writer's lock."""
    return f"{JOURNAL_DIR}/{writer}.lock"


def writer_of_lock(name: str) -> str | None:
    """The writer whose lock this object is."""
    match = _WRITER_LOCK.fullmatch(name)
    return match and match[1]


@dataclass(frozen=True, slots=True)
class Sign:
    """What a lock object says."""

    holder: Holder = field(default_factory=Holder)
    nonce: str = ""
    """Of this holding of the lock, by this process."""
    host: str = ""
    """Of a machine, since its last boot, and a container there: where `pid` means the same."""
    pid: int = 0
    started: int = 0
    """When the process started, in clock ticks since the machine did: process ids are used again."""
    beat: int = 0

    @classmethod
    def of_this_process(cls, holder: Holder) -> Sign:
        """The first sign of a lock that this process holds."""
        pid = os.getpid()
        return cls(holder, uuid4().hex, _this_host(), pid, _start_of(pid) or 0)

    @classmethod
    def parse(cls, content: bytes) -> Sign:
        """Of a lock whose content makes no sense, one that nothing is known of, which may be anyone's."""
        try:
            said = parse_object(content)
            return cls(_holder(said), *(_checked(said, name) for name in _FIELDS))
        except (ValueError, KeyError, TypeError):
            return cls()

    def to_json(self) -> bytes:
        """The lock's content."""
        said = json.loads(self.holder.to_json())
        return json.dumps(said | {name: getattr(self, name) for name in _FIELDS}).encode() + b"\n"


class State(Enum):
    """What a look at a lock tells of its holder."""

    GONE = "gone"
    """There is no lock."""
    DEAD = "dead"
    """Its process is."""
    SILENT = "silent"
    """No beat for DEAD_SECONDS: dead, suspended, or cut off."""
    ALIVE = "alive"
    UNKNOWN = "unknown"
    """Not watched for long enough."""


class Watch:
    """Looks at locks, and remembers since when they say the same."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._seen: dict[str, tuple[bytes, float]] = {}

    def look(self, name: str) -> tuple[State, Sign]:
        """Raises DatasetError when the storage does not answer."""
        began = time.monotonic()  # what comes may be as old as that, whatever time it takes to come
        content = _read(self._store, name)
        if content is None:
            self._seen.pop(name, None)
            return State.GONE, Sign()
        sign = Sign.parse(content)
        known = self._seen.get(name)
        if known is None or known[0] != content:
            self._seen[name] = (content, time.monotonic())
        if sign.host == _this_host() and not _is_held(sign):
            return State.DEAD, sign
        if known is not None and known[0] != content:
            return State.ALIVE, sign
        if (known is not None and began - known[1] >= DEAD_SECONDS) or (known is None and self._is_old(name)):
            return State.SILENT, sign
        return (State.ALIVE if sign.host == _this_host() else State.UNKNOWN), sign

    def _is_old(self, name: str) -> bool:
        try:
            old = self._store.age(name) >= OLD_SECONDS
        except MissingFile:  # just removed
            return False
        if old:
            content, since = self._seen[name]
            self._seen[name] = (content, since - DEAD_SECONDS)
        return old

    def settle(
        self, name: str, note: Callable[[str], None], given_up: Callable[[], bool] = lambda: False
    ) -> tuple[State, Sign]:
        """Look until it is known, or until it is given up: for DEAD_SECONDS at most."""
        state, sign = self.look(name)
        if state is State.UNKNOWN:
            note(f"{self._store.url}/{name}: waiting up to {DEAD_SECONDS:.0f} s to see whether its holder is alive")
        while state is State.UNKNOWN and not given_up():
            time.sleep(POLL_SECONDS)
            state, sign = self.look(name)
        return state, sign


class Lease:
    """One lock, held by this process from `acquire` to `release`."""

    def __init__(self, store: ObjectStore, name: str, holder: Holder, watch: Watch) -> None:
        self._store = store
        self._name = name
        self._watch = watch
        self._sign = Sign.of_this_process(holder)
        self._lock = threading.Lock()
        """Of the sign, which two threads write."""
        self._is_lost = False
        """For good, whatever the lock says: this may have written over another's."""
        self._checked_at = -math.inf
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def holder(self) -> Holder:
        """What it says."""
        return self._sign.holder

    def acquire(
        self, note: Callable[[str], None], *, wait: bool = False, given_up: Callable[[], bool] = lambda: False
    ) -> State:
        """Take the lock; returns what was found: SILENT means that its old holder may wake up. It is held on return.

        Raises ResumeRefused when its holder is alive and it is not to `wait`, or has `given_up`.
        """
        _held.add(self._sign.nonce)
        try:
            state = self._take(note, wait, given_up)
        except BaseException:
            self.release()  # it may be there, and only the answer was lost
            raise
        self._ended.clear()
        self._thread = threading.Thread(target=self._refresh, name="rollgen-lease", daemon=True)
        self._thread.start()
        return state

    def _take(self, note: Callable[[str], None], wait: bool, given_up: Callable[[], bool]) -> State:
        told = False
        while True:
            if self._store.create(self._name, self._sign.to_json()):
                return State.GONE
            state, _ = self._watch.settle(self._name, note, given_up)
            if state in (State.DEAD, State.SILENT):
                self._write(since=_now())
                return state
            if given_up() or (state is State.ALIVE and not wait):
                raise taken(self._store, self._name)
            if not told and state is State.ALIVE:
                note(f"{self._store.url}/{self._name}: waiting for another writer that starts")
                told = True
            time.sleep(POLL_SECONDS / 4)

    def prove(self) -> None:
        """See that nobody can create the lock while it is held. Raises UsageError where that does not keep others out.

        To be called once it is held.
        """
        if self._store.create(self._name, replace(self._sign, nonce=uuid4().hex).to_json()):
            self._store.delete(self._name)
            raise UsageError(
                f"{self._store.url}: this storage creates an object where there is one already, so that it cannot keep "
                "two writers apart; write to a directory, or to a storage that creates exclusively (S3, GCS, Azure)"
            )

    def release(self) -> None:
        """Remove the lock, if it is this one's still. One that cannot be removed is a dead one's from now on."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            with suppress(RollgenError):
                if self._is_ours():
                    self._store.delete(self._name)
        finally:
            _held.discard(self._sign.nonce)

    def say(self, holder: Holder) -> None:
        """Let others know. Raises as `check` does."""
        with self._lock:
            self._beat(holder)

    def check(self) -> None:
        """Raise ResumeRefused when somebody else has taken the lock, DatasetError when the storage does not answer."""
        now = _now()
        if self._is_lost or not self._is_ours():
            raise lost(self._store, self._name)
        self._checked_at = now

    def check_again(self) -> None:
        """As `check`, unless the last time was a moment ago: for one of many steps."""
        if _now() - self._checked_at > _MOMENT_SECONDS:
            self.check()

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            try:
                with self._lock:
                    self._beat(self._sign.holder)
            except ResumeRefused:
                return
            except RollgenError:  # the storage does not answer: others may see that as silence
                pass

    def _beat(self, holder: Holder) -> None:
        """Write the next sign. Raises as `check` does."""
        for _ in range(_TRIES):
            since = _now()
            self.check()
            if _now() - since <= REFRESH_SECONDS:  # else ask again: nothing has been written over yet
                break
        self._sign = replace(self._sign, holder=holder, beat=self._sign.beat + 1)
        self._write(since)

    def _write(self, since: float) -> None:
        """Write the lock, which was nobody else's `since` then. Raises ResumeRefused when that is too long ago."""
        self._store.replace(self._name, self._sign.to_json())
        if _now() - since > DEAD_SECONDS - REFRESH_SECONDS:  # before that, nobody can have thought that it is dead
            self._is_lost = True
            raise lost(self._store, self._name)

    def _is_ours(self) -> bool:
        content = _read(self._store, self._name)
        return content is not None and Sign.parse(content).nonce == self._sign.nonce


def _read(store: ObjectStore, name: str) -> bytes | None:
    """The content of a lock; None when it is neither to be had nor listed: a storage may err about one of the two.

    Raises Unreadable when it contradicts itself again and again: locks come and go, but not so often.
    """
    for _ in range(_TRIES):
        try:
            return store.read(name, _MAX_LOCK_BYTES)
        except MissingFile:
            if name not in store.list(JOURNAL_DIR):
                return None
    raise Unreadable(f"{store.url}/{name}: is listed, and cannot be read: the storage contradicts itself, try again")


def taken(store: ObjectStore, name: str) -> ResumeRefused:
    """What a writer is told whose name another one has that is alive."""
    return ResumeRefused(f"{store.url}/{name}: another rollgen is writing this dataset; wait for it, or stop it")


def lost(store: ObjectStore, name: str) -> ResumeRefused:
    """What a writer is told that was taken for dead."""
    return ResumeRefused(
        f"{store.url}/{name}: this process was silent for too long (suspended, or cut off from the storage), and "
        "another has gone on in its place; nothing that it makes from now on counts: continue with --resume when that "
        "one is done"
    )


def _now() -> float:
    """Seconds, those included that this machine was suspended for."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_held(sign: Sign) -> bool:
    """Whether the process of this machine that held this lock may do so still."""
    if _start_of(sign.pid) != sign.started:
        return False
    return sign.pid != os.getpid() or sign.nonce in _held


@cache
def _this_host() -> str:
    """Processes of two containers, or before and after a restart, have nothing to do with each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{socket.gethostname()} {boot} {namespace}"


def _start_of(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks; None for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _holder(said: dict[str, Any]) -> Holder:
    number, of = said["part"]
    if not 0 <= number < of < 1 << 31:
        raise ValueError("no part")
    plan_sha256 = said.get("plan_sha256")
    return Holder(Part(int(number), int(of)), str(said["attempt"]), None if plan_sha256 is None else str(plan_sha256))


def _checked(said: dict[str, Any], name: str) -> Any:
    """A field of the type that `Sign` has. Raises KeyError or TypeError."""
    value = said[name]
    if type(value) is not (str if name in ("nonce", "host") else int):
        raise TypeError(name)
    return value
