"""A directory of parts of shards that were fetched from object storage, for all processes of a machine.

    <two digits>/<key>    a part; the key says whose content it is, so that it never changes
    <two digits>/.lock    held by the process that fetches into this bucket; others that want the same part wait for it
    <two digits>/.tmp     what it fetches; of a process that died, the next one takes it away
    .lock                 held while room is made; its content is an upper bound of the bytes that are taken

Parts that were used least recently leave when a new one would pass the limit. One that is open stays readable after
that, and takes its room until it is closed; parts in the making come on top of the limit too. A part that cannot be
opened is fetched again. Holds no handle: it may be pickled, and used after a fork.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar

from rollgen.errors import DatasetError, MissingFile, Unreadable, UsageError

Opened = TypeVar("Opened")

MAX_BYTES: Final = 32 << 30
"""Limit unless another is given: some 2.5 billion tokens, and below what homes on a cluster usually may hold.

An epoch needs only what the processes of a machine are reading at the moment; the rest saves the next one from fetching
again.
"""
_SPARE: Final = 8
"""When the limit is reached, the eighth part of it is given up at once: looking through the directory takes time."""
_BLOCK_BYTES: Final = 512
"""`st_blocks` counts these: what a file with holes takes."""
_LOCK: Final = ".lock"
_TEMPORARY: Final = ".tmp"


class _Entry(NamedTuple):
    """A part that is there."""

    used: int
    """When it was last, in ns."""
    bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class PartCache:
    """Parts in a directory, of `max_bytes` together. See `open_cache`."""

    directory: Path
    max_bytes: int

    def open(self, key: str, fetch: Callable[[Path], None], opened: Callable[[Path], Opened]) -> Opened:
        """The part of this key as `opened(path)` has it, after `fetch(path)` has made it if need be.

        `opened` must keep the file open or be done with it: the path means nothing later. It raises MissingFile when
        there is none, and DatasetError for damage: then the part is fetched again. Raises what both raise, and
        Unreadable when the directory cannot be written.
        """
        path = self._path(key)
        if (found := _find(path, opened)) is not None:
            return found
        with _bucket(path.parent) as temporary:
            if (found := _find(path, opened)) is not None:  # another process has fetched it meanwhile
                return found
            fetch(temporary)
            self._make_room(_taken(temporary.stat()))
            result = opened(temporary)
            os.replace(temporary, path)
        return result

    def drop(self, key: str) -> bool:
        """Forget a part. Returns whether it was there."""
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.directory / name[:2] / name

    def _make_room(self, wanted: int) -> None:
        """Count `wanted` bytes in, and let parts go until they fit."""
        with _locked(self.directory / _LOCK) as lock:
            assert lock is not None
            counted = lock.read()
            taken = int(counted) + wanted if counted.isdigit() else self.max_bytes + 1
            if taken > self.max_bytes:
                taken = self._evict(max(0, self.max_bytes - self.max_bytes // _SPARE - wanted)) + wanted
            lock.seek(0)
            lock.truncate()
            lock.write(b"%d" % taken)

    def _evict(self, limit: int) -> int:
        """Let those go that were used least recently, down to `limit` bytes. Returns how many are left."""
        entries = sorted(self._entries())
        taken = sum(entry.bytes for entry in entries)
        for entry in entries:
            if taken <= limit:
                break
            entry.path.unlink(missing_ok=True)
            taken -= entry.bytes
        return taken

    def _entries(self) -> Iterator[_Entry]:
        """All parts. What dead processes left unfinished is removed."""
        for bucket in self.directory.glob("??"):
            with _locked(bucket / _LOCK, wait=False) as lock:
                if lock is not None:
                    (bucket / _TEMPORARY).unlink(missing_ok=True)
            for entry in os.scandir(bucket):
                if not entry.name.startswith("."):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue  # dropped meanwhile
                    yield _Entry(status.st_mtime_ns, _taken(status), Path(entry.path))


def cache_directory(folder: str) -> Path:
    """This folder of what may be kept for later, `$XDG_CACHE_HOME/rollgen/<folder>`, which need not exist.

    Raises UsageError where nobody knows our home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rollgen", folder).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"~/.cache/rollgen/{folder}: {error}; name another place in XDG_CACHE_HOME") from None


def open_cache(directory: str | os.PathLike[str] | None = None, max_bytes: int = MAX_BYTES) -> PartCache:
    """The cache in this directory, `$XDG_CACHE_HOME/rollgen/parts` unless it is given. Makes the directory.

    Raises UsageError when it cannot be made or written.
    """
    if directory is None:
        directory = cache_directory("parts")
    try:
        path = Path(directory).expanduser().absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / _LOCK).touch(0o600)
    except (OSError, RuntimeError) as error:  # the latter where nobody knows our home
        raise UsageError(f"{directory}: cannot keep what is fetched there: {error}; name another disk_cache") from None
    return PartCache(path, max_bytes)


def _find(path: Path, opened: Callable[[Path], Opened]) -> Opened | None:
    """The part that is there; a damaged one is removed."""
    try:
        with _usable(path):
            os.utime(path)
        return opened(path)
    except MissingFile:
        return None
    except Unreadable:
        raise
    except DatasetError:
        path.unlink(missing_ok=True)
        return None


@contextmanager
def _bucket(bucket: Path) -> Iterator[Path]:
    """Where to fetch a part of this bucket. One at a time, whoever waits for it."""
    with _usable(bucket):
        bucket.mkdir(mode=0o700, exist_ok=True)
    temporary = bucket / _TEMPORARY
    with _locked(bucket / _LOCK):
        temporary.unlink(missing_ok=True)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[IO[bytes] | None]:
    """The lock file, open and locked; None when it is taken and we do not `wait`."""
    with _usable(path):
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        try:
            yield file
        finally:
            file.flush()
            fcntl.flock(file, fcntl.LOCK_UN)  # closing leaves it to a child that was forked meanwhile


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Raises MissingFile, and Unreadable for whatever else keeps us from using a file in the cache."""
    try:
        yield
    except FileNotFoundError:
        raise MissingFile(f"{path}: missing") from None
    except OSError as error:
        raise Unreadable(
            f"{path}: cannot keep what is fetched: {error.strerror}; make room, or name another disk_cache"
        ) from None


def _taken(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK_BYTES
