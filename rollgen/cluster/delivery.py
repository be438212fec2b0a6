"""How the shards of replicas come into the dataset, as the driver has it.

Lines      replicas commit them in the dataset directory; the driver adds their lines to its journal
Parcels    the dataset is in object storage: replicas send them here, and the driver, whose slot it is,
           commits one after the other
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import ray

from rollgen.cluster.board import Committed, Materials, News, Parcel, Refused, Verdict
from rollgen.cluster.receipts import Positions, Receipt, read_receipt
from rollgen.cluster.slot import Employer, Overtaken
from rollgen.errors import DatasetError, RollgenError
from rollgen.format.files import new_file
from rollgen.format.journal import JournalLine, list_shards, parse_shard_name
from rollgen.format.schema import MANIFEST_FILE, PLAN_FILE, retry_file
from rollgen.loop.stop import is_stopping

if TYPE_CHECKING:
    from pathlib import Path

    from rollgen.cluster.tasks import Task
    from rollgen.format.commit import WriterSlot
    from rollgen.loop.crew import Job

_PART_BYTES: Final = 32 << 20
"""Of a file that is handed over: it need not fit into memory, here or there."""
Enter = Callable[[Iterable[tuple[str, News]]], None]
"""`books.Books.enter`."""


class Delivery(Protocol):
    """See above."""

    materials: Materials
    """What replicas are to read, when they cannot read it where it is."""

    @property
    def employer(self) -> Employer | None:
        """Whom replicas ask before they commit, in this round."""

    async def receive(self, board: Any, enter: Enter) -> None:
        """Commit what replicas send, until the board is closed. What becomes of it is news.

        Raises RayError when the board is gone.
        """

    def journal(self, line: JournalLine) -> None:
        """Add the line of a shard of which news have come, durably. Raises DatasetError."""

    def untold(self, tasks: Iterable[Task], told: Collection[str]) -> Iterator[Receipt]:
        """After a round: what is stored of its tasks, and not among the shards of which was `told`.

        Nobody can store anything more of these tasks. Raises DatasetError for a shard that is damaged.
        """


def delivery_of(job: Job, positions: Positions) -> Delivery:
    """The one for where this job's dataset is. Blocks: the plan may be large."""
    return Lines(job, positions) if job.slot.remote is None else Parcels(job, positions)


class Lines:
    """A `Delivery`."""

    def __init__(self, job: Job, positions: Positions) -> None:
        self.materials: Materials = {}
        self._slot = job.slot
        self._digest = job.manifest.config_digest
        self._positions = positions

    @property
    def employer(self) -> Employer:
        """See `Delivery`; so below."""
        return Employer(self._slot.directory.resolve(), self._slot.writer, self._slot.attempt)

    async def receive(self, board: Any, enter: Enter) -> None:
        """Nothing is sent."""

    def journal(self, line: JournalLine) -> None:
        with _explained(self._slot, f"the journal line of {line.file}"):
            self._slot.append(line)

    def untold(self, tasks: Iterable[Task], told: Collection[str]) -> Iterator[Receipt]:
        names = {task.name for task in tasks}
        with self._slot.section(is_stopping):
            self._slot.renew()
            shards = [path for path in list_shards(self._slot.directory) if path.name not in told]
        for path in shards:
            parsed = parse_shard_name(path.name)
            if parsed is not None and parsed[0] in names:
                yield read_receipt(path, None, self._digest, self._positions)


class Parcels:
    """A `Delivery`."""

    employer = None
    """Replicas commit nothing."""

    def __init__(self, job: Job, positions: Positions) -> None:
        self._slot = job.slot
        self._wanted = np.zeros(positions.count, np.bool_)
        self._wanted[job.owed.places()[0]] = True
        retries = [retry_file(retry.generation) for retry in job.manifest.retries]
        self.materials: Materials = {
            name: [ray.put(part) for part in _parts(job.slot.directory / name)]
            for name in (MANIFEST_FILE, PLAN_FILE, *retries)
        }
        self._waiting: Receipt | None = None
        """A shard that has its name, and is not committed: the storage has failed."""

    async def receive(self, board: Any, enter: Enter) -> None:
        """See `Delivery`; so below."""
        while (parcel := await board.next_parcel.remote()) is not None:
            committed, verdict = await asyncio.to_thread(self._settle, parcel, board)
            enter((parcel.replica, Committed(receipt)) for receipt in committed)
            if isinstance(verdict, RollgenError) and not isinstance(verdict, Overtaken):
                enter([(parcel.replica, Refused(verdict))])
            await board.answer.remote(parcel, verdict)

    def journal(self, line: JournalLine) -> None:
        """It has been committed with its line."""

    def untold(self, tasks: Iterable[Task], told: Collection[str]) -> Iterator[Receipt]:
        """Nothing is stored without its news."""
        return iter(())

    def _settle(self, parcel: Parcel, board: Any) -> tuple[list[Receipt], Verdict]:
        """What is committed now, and what the sender is to be told. Raises RayError when the board is gone."""
        committed: list[Receipt] = []
        try:
            if self._waiting is not None:
                committed.append(self._append(self._waiting))
            if not self._wanted[parcel.receipt.positions].all():
                raise Overtaken(f"task {parcel.task} is made by another process too")
            self._waiting = self._published(parcel.receipt, ray.get(board.content.remote(parcel)))
            committed.append(self._append(self._waiting))
        except RollgenError as error:
            return committed, error
        return committed, committed[-1]

    def _published(self, receipt: Receipt, content: bytes) -> Receipt:
        """With the name that the shard has here, from now on: it is in the workspace, and not committed yet."""
        sent, temporary = receipt.line, self._slot.temporary()
        if hashlib.sha256(content).hexdigest() != sent.sha256:
            raise DatasetError(f"{temporary}: arrived damaged; finished samples are stored, continue with --resume")
        with _explained(self._slot, "a shard"):
            try:
                with new_file(temporary) as file:
                    file.write(content)
                line = self._slot.publish(temporary, rows=sent.rows, tokens=sent.tokens, mask_ids=sent.mask_ids)
            finally:
                temporary.unlink(missing_ok=True)
        self._wanted[receipt.positions] = False
        return replace(receipt, line=line)

    def _append(self, receipt: Receipt) -> Receipt:
        with _explained(self._slot, f"the journal line of {receipt.line.file}"):
            self._slot.append(receipt.line)
        self._waiting = None
        return receipt


@contextmanager
def _explained(slot: WriterSlot, what: str) -> Iterator[None]:
    """Turn an OSError into one line: what could not be written. Raises DatasetError; a resume makes up for it."""
    try:
        yield
    except OSError as error:
        raise DatasetError(
            f"{error.filename or slot.directory}: {what} cannot be written: {error.strerror or error}; make room "
            "there, then continue with --resume"
        ) from error


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            yield part
