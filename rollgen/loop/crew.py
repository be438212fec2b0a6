"""Who makes the samples of an attempt: engines in this process, or on a cluster. And what they are given to make.

A crew is started, makes a job, and is closed. `engines.py` here is the one of engines in this process;
`rollgen.cluster` has another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollgen.engines.base import Capture, Extras
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.manifest import EngineRecord, Manifest
from rollgen.inert import Discretion
from rollgen.loop.owed import Owed
from rollgen.loop.report import Reporter, RunStats
from rollgen.preflight import Preflight


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be made, and where it goes."""

    slot: WriterSlot
    preflight: Preflight
    manifest: Manifest
    owed: Owed
    failures: FailureLog
    discretion: Discretion
    """What of an engine's errors may be recorded."""
    stats: RunStats
    """To be kept: `progress` of the reporter is told of them."""
    reporter: Reporter
    max_failures: int
    """Samples that may fail; one more, and the run stops."""


class Crew(Protocol):
    """Whoever makes samples. `record`, `capture`, `dtype` and `extras` are known before it is started."""

    record: EngineRecord
    capture: Capture
    dtype: str
    extras: Extras
    notes: tuple[str, ...]
    """What the user should know before anything is made."""

    async def start(self) -> None:
        """Load models, or find out that servers answer. Raises EngineError."""

    async def make(self, job: Job) -> None:
        """Make everything owed. What is finished is committed however this ends: cancelled too.

        Raises EngineError when it cannot go on, UnfitEngine, TooManyFailures, and what the writer raised.
        """

    def close(self) -> None:
        """Stop what was started. Safe to call twice."""
