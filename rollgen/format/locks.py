"""Locks by which processes know of each other: files that are locked (`flock`) for as long as their holder lives."""

from __future__ import annotations

import fcntl
import os
import random
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rollgen.errors import DatasetError
from rollgen.format.files import open_descriptor, open_regular

_LOCK_SECONDS = 1.0
"""`is_locked` of another process holds a lock for an instant: nobody gives up sooner."""
_held: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A lock lives as long as any copy of its descriptor: a forked engine would hold it after its parent's death."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def open_lock(path: Path, given_up: Callable[[], bool] | None = lambda: True) -> IO[bytes] | None:
    """The lock file, opened and locked; None when another one holds it and we have `given_up`. Raises OSError.

    With None we wait in the kernel, whose turns are fair, and which no thread can leave.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except FileNotFoundError:  # see below
            continue
        file = os.fdopen(descriptor, "ab", buffering=0)  # nothing is left to be written when it is closed
        if given_up is None:
            fcntl.flock(file, fcntl.LOCK_EX)
        elif not _lock_exclusively(file, given_up):
            file.close()
            return None
        if is_same_file(file, path):
            _held.add(file)
            return file
        file.close()  # a start that came to nothing took its empty directory away while we waited


def is_same_file(file: IO[bytes], path: Path) -> bool:
    """Whether the file that is open here still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock_exclusively(file: IO[bytes], given_up: Callable[[], bool]) -> bool:
    """Whether the lock could be had before that was given up. Those who wait for long ask less and less often."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began  # before the try: nobody gives up without one after that time
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        if waited >= _LOCK_SECONDS and given_up():
            return False
        time.sleep(random.uniform(0.5, 1) * min(max(0.02, waited / 20), 1))


def is_locked(path: Path) -> bool:
    """Whether somebody holds this lock. Raises DatasetError for what is no lock."""
    try:
        file = open_regular(path)
    except FileNotFoundError:  # gone since it was listed, or a link to nothing
        return False
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be opened, so that nobody can tell whether its writer is alive: {error.strerror}; make it "
            "readable"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
