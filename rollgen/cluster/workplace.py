"""Where a replica works: what it reads of the run, and where the shards of its tasks go.

SharedDirectory    the dataset directory, which all nodes share: shards are committed there (`slot.py`)
OwnDirectory       the dataset is in object storage, which only the driver speaks to: the files that a replica reads
                   come through Ray into a directory of its own, and its shards go to the driver (`parcels.py`)
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray

from rollgen.cluster.board import Committed, Materials, News
from rollgen.cluster.parcels import ParcelSlot
from rollgen.cluster.receipts import Positions, Receipt, read_receipt
from rollgen.cluster.scratch import Scratch
from rollgen.cluster.slot import Employer, TaskSlot
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import is_current
from rollgen.format.files import new_file
from rollgen.format.manifest import read_manifest
from rollgen.format.retries import read_retries
from rollgen.format.schema import PLAN_FILE
from rollgen.prompts.plan import Plan

if TYPE_CHECKING:
    from rollgen.cluster.tasks import Task
    from rollgen.format.journal import JournalLine
    from rollgen.format.writer import ShardPlace
    from rollgen.rollouts import Int64Array


class RunFiles:
    """What a replica reads of a run. Raises DatasetError."""

    def __init__(self, directory: Path) -> None:
        self.manifest = read_manifest(directory)
        self.plan = Plan(directory / PLAN_FILE)
        self.retries = read_retries(directory, self.manifest)
        self.positions = Positions(self.plan.offsets, self.retries)

    def receipt(self, path: Path, line: JournalLine | None) -> Receipt:
        """See `receipts.read_receipt`."""
        return read_receipt(path, line, self.manifest.config_digest, self.positions)


class Workplace(Protocol):
    """See above. Its methods block: they are for threads."""

    files: RunFiles

    def take_up(self, task: Task) -> tuple[ShardPlace, Int64Array]:
        """A place for a task's shards, and int64 [S] positions of it that are stored, whoever made them.

        Raises DatasetError.
        """

    def close(self) -> None:
        """Remove what nobody needs any more. Safe to call twice."""


def open_workplace(employer: Employer | None, board: Any, replica: str, post: Callable[[News], None]) -> Workplace:
    """The one of a replica with this name; without an employer that it could ask, the driver commits.

    Raises UsageError, DatasetError, and RayError when the driver is gone.
    """
    return OwnDirectory(board, replica) if employer is None else SharedDirectory(employer, post)


class SharedDirectory:
    """A `Workplace`. Raises UsageError where the driver's lock cannot be seen. What is committed is posted."""

    def __init__(self, employer: Employer, post: Callable[[News], None]) -> None:
        _check_locks(employer)
        self.files = RunFiles(employer.directory)
        self._employer = employer
        self._post = post

    def take_up(self, task: Task) -> tuple[ShardPlace, Int64Array]:
        """See `Workplace`; so below."""
        slot = TaskSlot(self._employer, task.name, self._committed)
        stored = [self.files.receipt(path, None) for path in slot.stored]
        for receipt in stored:
            self._post(Committed(receipt))
        return slot, _joined([receipt.positions for receipt in stored])

    def close(self) -> None:
        """Nothing here is of this replica alone."""

    def _committed(self, path: Path, line: JournalLine) -> None:
        self._post(Committed(self.files.receipt(path, line)))


class OwnDirectory:
    """A `Workplace`. Raises RayError when there is nobody to ask any more, and DatasetError for a full disk."""

    def __init__(self, board: Any, replica: str) -> None:
        self._board = board
        self._replica = replica
        materials: Materials = ray.get(board.materials.remote())
        self._scratch = _filled(materials)
        self.files = RunFiles(self._scratch.path)

    def take_up(self, task: Task) -> tuple[ShardPlace, Int64Array]:
        """See `Workplace`; so below."""
        stored: list[Int64Array] = ray.get(self._board.stored.remote(task.name))
        slot = ParcelSlot(self._board, self._replica, task.name, self._scratch.path, self.files.receipt)
        return slot, _joined(stored)

    def close(self) -> None:
        self._scratch.close()


def _filled(materials: Materials) -> Scratch:
    """A directory with these files."""
    try:
        scratch = Scratch()
        for name, parts in materials.items():
            with new_file(scratch.path / name) as file:
                for part in parts:
                    file.write(_content(part))
    except OSError as error:
        raise DatasetError(
            f"{error.filename or 'the temporary directory'}: cannot be written: {error.strerror or error}; make room "
            "there, or name another place in TMPDIR"
        ) from error
    return scratch


def _content(part: Any) -> bytes:
    content: bytes = ray.get(part)
    return content


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _check_locks(employer: Employer) -> None:
    """Raise UsageError where the driver, who is there, seems to be gone: it would also seem so at each commit."""
    if not is_current(*employer):
        raise UsageError(
            f"{employer.directory}: on {socket.gethostname()} the lock of the run's writer is not seen: this is "
            "another directory there, or file locks (flock) of its file system do not reach other nodes; mount it with "
            "locks that do (Lustre: flock; NFS 4: without local_lock), or write to object storage (--out s3://...)"
        )
