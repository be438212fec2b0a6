"""Who is alive, said by objects: the locks of writers that share no file system.

    journal/<writer>.lock         held by a writer while it lives
    journal/start-section.lock    held by whoever starts, leaves, or changes plan and manifest

An object cannot be locked, so a lock is an object that is there. It is created exclusively, and its holder writes it
again every REFRESH_SECONDS with another beat. Nobody compares clocks: a lock that has not changed while somebody
watched it for DEAD_SECONDS is that of a dead holder, and on the holder's own machine its process is looked at. The lock
is then written over.

A holder that was only silent (suspended, cut off) finds that it has lost the lock, at its next beat or commit. That a
dead lock is taken by one of two watchers only is not promised: what keeps two writers apart for certain is the
exclusive creation of each commit's journal object (`workspace.py`).
"""

from __future__ import annotations

import json
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

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, UsageError
from rollgen.format.commit import Holder, Part
from rollgen.format.jsonlines import parse_object
from rollgen.format.schema import JOURNAL_DIR
from rollgen.remote.objects import ObjectStore

REFRESH_SECONDS = 15.0
DEAD_SECONDS = 60.0
"""Of silence. A model takes about as long to load."""
POLL_SECONDS = 2.0
SECTION_LOCK: Final = f"{JOURNAL_DIR}/start-section.lock"
_MAX_LOCK_BYTES: Final = 1 << 12
_FIELDS: Final = ("nonce", "host", "pid", "started", "beat")
"""Of a lock, beside those of `Holder`."""
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
    """No beat for DEAD_SECONDS: dead, or cut off."""
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
        try:
            content = self._store.read(name, _MAX_LOCK_BYTES)
        except MissingFile:
            self._seen.pop(name, None)
            return State.GONE, Sign()
        now, sign = time.monotonic(), Sign.parse(content)
        known = self._seen.get(name)
        if known is None or known[0] != content:
            self._seen[name] = (content, now)
        if sign.host == _this_host():
            return (State.ALIVE if _start_of(sign.pid) == sign.started else State.DEAD), sign
        if known is None:
            return State.UNKNOWN, sign
        if known[0] != content:
            return State.ALIVE, sign
        return (State.SILENT if now - known[1] >= DEAD_SECONDS else State.UNKNOWN), sign

    def settle(self, name: str, note: Callable[[str], None]) -> tuple[State, Sign]:
        """Look until it is known: for DEAD_SECONDS at most."""
        state, sign = self.look(name)
        if state is State.UNKNOWN:
            note(f"{self._store.url}/{name}: waiting up to {DEAD_SECONDS:.0f} s to see whether its holder is alive")
        while state is State.UNKNOWN:
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
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, note: Callable[[str], None], *, wait: bool = False) -> State:
        """Take the lock; returns what was found: SILENT means that its old holder may wake up. It is held on return.

        Raises ResumeRefused when its holder is alive and it is not to `wait`.
        """
        told = False
        while True:
            if self._store.create(self._name, self._sign.to_json()):
                state = State.GONE
                break
            state, _ = self._watch.settle(self._name, note)
            if state in (State.DEAD, State.SILENT):
                self._store.replace(self._name, self._sign.to_json())
                break
            if state is State.ALIVE and not wait:
                raise ResumeRefused(
                    f"{self._store.url}/{self._name}: another rollgen is writing this dataset; wait for it, or stop it"
                )
            if not told and state is State.ALIVE:
                note(f"{self._store.url}/{self._name}: waiting for another writer that starts")
                told = True
            time.sleep(POLL_SECONDS / 4)
        self._ended.clear()
        self._thread = threading.Thread(target=self._refresh, name="rollgen-lease", daemon=True)
        self._thread.start()
        return state

    def release(self) -> None:
        """Remove the lock, if it is this one's still. One that cannot be removed falls silent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(DatasetError, UsageError):
            if self._is_ours():
                self._store.delete(self._name)

    def say(self, holder: Holder) -> None:
        """Let others know."""
        with self._lock:
            self._sign = replace(self._sign, holder=holder, beat=self._sign.beat + 1)
            self._store.replace(self._name, self._sign.to_json())

    def check(self) -> None:
        """Raise ResumeRefused when somebody else has taken the lock, DatasetError when the storage does not answer."""
        if not self._is_ours():
            raise lost(self._store, self._name)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            with suppress(DatasetError), self._lock:  # the storage does not answer: others may see that as silence
                if not self._is_ours():
                    return
                self._sign = replace(self._sign, beat=self._sign.beat + 1)
                self._store.replace(self._name, self._sign.to_json())

    def _is_ours(self) -> bool:
        try:
            sign = Sign.parse(self._store.read(self._name, _MAX_LOCK_BYTES))
        except MissingFile:
            return False
        return sign.nonce == self._sign.nonce


def lost(store: ObjectStore, name: str) -> ResumeRefused:
    """What a writer is told that was taken for dead."""
    return ResumeRefused(
        f"{store.url}/{name}: this process was silent for too long (suspended, or cut off from the storage), and "
        "another has gone on in its place; nothing that it makes from now on counts: continue with --resume when that "
        "one is done"
    )


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
