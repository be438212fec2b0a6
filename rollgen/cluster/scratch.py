"""A directory for the files of one process, on its node, of which nothing is to stay.

It is removed when it is closed, or else when the process ends. One that was killed leaves it to the next process on
that node: whoever lives holds a lock on its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "rollgen-replica-"


class Scratch:
    """Makes one, below the system's temporary directory (`TMPDIR`). Raises OSError."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _tidy(parent)
        self.path, lock = _make(parent)
        self.close = weakref.finalize(self, _remove, self.path, lock)
        """Removes it. Safe to call twice."""


def _make(parent: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that locks it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):  # another process has tidied it away before it was locked
            lock = _locked(path)
            if lock is not None:
                return path, lock


def _tidy(parent: Path) -> None:
    """Remove what dead processes of this user have left."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another process is faster
            lock = _locked(path)
            if lock is not None:
                _remove(path, lock)


def _locked(path: Path) -> int | None:
    """A descriptor that locks this directory; None where another process lives in it, or it is not ours."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if found.st_uid == os.geteuid() and os.path.samestat(found, path.stat()):
            kept, descriptor = descriptor, -1
            return kept
    except BlockingIOError:
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return None


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
