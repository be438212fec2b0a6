"""A directory of parts of shards that were fetched from object storage, for all processes of a machine.

    rollgen/parts/              below the directory that the user names; nothing outside is touched
        <two digits>/<name>     a part, regular; the name hashes a key that says whose content it is: it never changes
        <two digits>/.lock      held by who fetches into this bucket; others that want the same part wait for it
        <two digits>/.tmp       what it fetches; of a process that died, the next one takes it away
        .lock                   held while room is made; its content is an upper bound of the bytes that are taken

Parts that were used least recently leave when a new one would pass the limit. One that is open stays readable after
that, and takes its room until it is closed; parts in the making come on top of the limit too. A part that cannot be
opened is fetched again, and the directory made again when somebody has removed it. Holds no handle: it may be pickled,
and used after a fork.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from stat import S_ISREG
from typing import IO, Final, NamedTuple, TypeVar

from rollgen.arguments import check_numbers
from rollgen.errors import DatasetError, MissingFile, Unreadable, UsageError
from rollgen.remote.objects import is_url, local_path

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
_FOLDER: Final = "parts"
_LOCK: Final = ".lock"
_TEMPORARY: Final = ".tmp"
_BUCKET: Final = re.compile(r"[0-9a-f]{2}")
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_TRIES: Final = 3
"""How often a part is fetched while somebody removes the directory under it."""


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
        there is none, and DatasetError for damage: then the part is fetched again. `fetch` raises OSError where the
        local disk fails. Raises what both raise, and Unreadable when the directory cannot be written.
        """
        path = self._path(key)
        for _ in range(_TRIES):
            if (found := _find(path, opened)) is not None:
                return found
            with suppress(_Removed):
                return self._fetched(path, fetch, opened)
        raise Unreadable(f"{self.directory}: somebody removes what is fetched; name another disk_cache")

    def drop(self, key: str) -> bool:
        """Forget a part. Returns whether it was there."""
        return _removed(self._path(key))

    def _fetched(self, path: Path, fetch: Callable[[Path], None], opened: Callable[[Path], Opened]) -> Opened:
        """The part, of this process or of another one that has fetched it meanwhile."""
        with _usable(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _usable(path.parent):
            path.parent.mkdir(mode=0o700, exist_ok=True)
        with _locked(path.parent / _LOCK) as lock:
            assert lock is not None
            if (found := _find(path, opened)) is not None:
                return found
            try:
                return self._made(path, fetch, opened)
            except DatasetError:
                if _is_at(lock, path.parent / _LOCK):
                    raise
                raise _Removed from None  # and another process may have been at work in its place

    def _made(self, path: Path, fetch: Callable[[Path], None], opened: Callable[[Path], Opened]) -> Opened:
        """The part, made and put into its place by the holder of the lock."""
        temporary = path.with_name(_TEMPORARY)
        _removed(temporary)
        try:
            with _usable(self.directory):
                fetch(temporary)
                taken = _taken(temporary.stat())
                self._make_room(taken)
                result = opened(temporary)
                with suppress(FileNotFoundError):  # it is open all the same
                    os.replace(temporary, path)
        finally:
            _removed(temporary)
        return result

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
            _removed(entry.path)
            taken -= entry.bytes
        return taken

    def _entries(self) -> Iterator[_Entry]:
        """All parts, and nothing else that may be there. What dead processes left unfinished is removed."""
        with _usable(self.directory):
            for bucket in _below(self.directory, _BUCKET):
                if not bucket.is_dir(follow_symlinks=False):
                    continue
                with _locked(Path(bucket) / _LOCK, wait=False) as lock:
                    if lock is not None:
                        _removed(Path(bucket) / _TEMPORARY)
                for entry in _below(bucket, _NAME):
                    with suppress(FileNotFoundError):  # dropped meanwhile
                        if entry.is_file(follow_symlinks=False):
                            status = entry.stat()
                            yield _Entry(status.st_mtime_ns, _taken(status), Path(entry))


def cache_directory(folder: str) -> Path:
    """This folder of what may be kept for later, `$XDG_CACHE_HOME/rollgen/<folder>`, which need not exist.

    Raises UsageError where nobody knows our home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rollgen", folder).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"~/.cache/rollgen/{folder}: {error}; name another place in XDG_CACHE_HOME") from None


def open_cache(directory: str | os.PathLike[str] | None = None, max_bytes: int = MAX_BYTES) -> PartCache:
    """The cache below this directory, `$XDG_CACHE_HOME` unless it is given. Makes both.

    Raises UsageError when they cannot be made or written, or are none.
    """
    check_numbers(1, disk_cache_bytes=max_bytes)
    if directory is not None and (not os.fspath(directory) or is_url(directory)):
        raise UsageError(f"disk_cache must be a directory of this machine, not {os.fspath(directory)!r}")
    path = cache_directory(_FOLDER) if directory is None else local_path(directory) / "rollgen" / _FOLDER
    try:
        path = path.expanduser().absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / _LOCK).touch(0o600)
    except (OSError, RuntimeError) as error:  # the latter where nobody knows our home
        raise UsageError(f"{path}: cannot keep what is fetched there: {error}; name another disk_cache") from None
    return PartCache(path, index(max_bytes))


@contextmanager
def keeping(place: Path, fix: str) -> Iterator[None]:
    """Turn what the local disk refuses to what is fetched into one line with this `fix`. Raises Unreadable."""
    try:
        yield
    except OSError as error:
        raise Unreadable(f"{place}: cannot keep what is fetched here: {error.strerror}; {fix}") from None


class _Removed(Exception):
    """Somebody else has removed a file or directory of the cache."""


@contextmanager
def _usable(place: Path) -> Iterator[None]:
    """Raises _Removed, and Unreadable for whatever else keeps us from using a file in the cache."""
    with keeping(place, "make room, or mend that, or name another disk_cache"):
        try:
            yield
        except FileNotFoundError:
            raise _Removed from None


def _find(path: Path, opened: Callable[[Path], Opened]) -> Opened | None:
    """The part that is there; a damaged one is removed."""
    try:
        with _usable(path):
            if not S_ISREG(path.lstat().st_mode):
                raise Unreadable(f"{path}: is in the way, and no file; remove it, or name another disk_cache")
            os.utime(path)
            return opened(path)
    except (_Removed, MissingFile):
        return None
    except Unreadable:
        raise
    except DatasetError:
        _removed(path)
        return None


def _removed(path: Path) -> bool:
    """Remove a file, if it is there: whether it was."""
    try:
        with _usable(path):
            path.unlink()
    except _Removed:
        return False
    return True


def _below(directory: str | os.PathLike[str], pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """What is in a directory under such names. Raises OSError."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [entry for entry in entries if pattern.fullmatch(entry.name)]
    return []


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


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether this open file is the one of that name still."""
    try:
        with _usable(path):
            return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except _Removed:
        return False


def _taken(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK_BYTES
