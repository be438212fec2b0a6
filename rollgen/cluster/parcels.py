"""Where the shards of one task go when the dataset is in object storage: to the driver, who commits them.

A replica builds a shard in a directory of its own and sends it to the board as an argument of a call, which is the
board's from then on: an object of the replica's would die with it. It waits for the driver's word, so that a shard is
committed when its writer is told so, and no task has more than one on the way. The driver gives it a name and commits
it whole or not at all; whoever sends a sample a second time is told that he was overtaken. Nobody else commits
anything: when the driver is gone, so is the board, and nothing that is still sent arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rollgen.cluster.board import Verdict
from rollgen.cluster.receipts import Receipt
from rollgen.cluster.slot import Abandoned, Overtaken
from rollgen.errors import RollgenError
from rollgen.format.journal import JournalLine, durable_line


class ParcelSlot:
    """The place of one task, of which other processes may have sent a part. `writer.ShardPlace`.

    `receipt` reads that of a shard of which this is the line; `replica` is the name of who sends.
    """

    def __init__(
        self, board: Any, replica: str, task: str, directory: Path, receipt: Callable[[Path, JournalLine], Receipt]
    ) -> None:
        self._board = board
        self._replica = replica
        self._task = task
        self._temporary = directory / f"{task}.parquet"
        self._receipt = receipt
        self._overtaken: Overtaken | None = None

    def temporary(self) -> Path:
        """See `writer.ShardPlace`; so below."""
        return self._temporary

    def publish(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """Committed on return, under the name in the line. Raises Abandoned, Overtaken, and what the driver says."""
        if self._overtaken is not None:
            raise self._overtaken
        line = durable_line(temporary, temporary.name, rows=rows, tokens=tokens, mask_ids=mask_ids)
        verdict = self._send(self._receipt(temporary, line), temporary.read_bytes())
        if isinstance(verdict, Overtaken):
            self._overtaken = verdict
        if isinstance(verdict, RollgenError):
            raise verdict
        return verdict.line

    def append(self, line: JournalLine) -> None:
        """Nothing is left to do: see `publish`."""

    def _send(self, receipt: Receipt, content: bytes) -> Verdict:
        try:
            verdict: Verdict = ray.get(self._board.send.remote(self._replica, self._task, receipt, content))
        except RayError:
            raise Abandoned(f"task {self._task}: the driver is gone, or has given it to others") from None
        return verdict
