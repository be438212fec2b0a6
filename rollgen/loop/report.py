"""What a run tells while it goes on: its running totals, and where it tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rollgen.rollouts import Completion

if TYPE_CHECKING:  # a process that only samples needs none of what a preflight takes
    from rollgen.config import RunConfig
    from rollgen.format.manifest import Manifest
    from rollgen.loop.place import Place
    from rollgen.preflight import Preflight


Phase = Literal["check", "load", "probe", "generate"]
"""Checking prompts; loading the model, or finding out what running servers can do; sampling."""


def preparing(config: RunConfig) -> Phase:
    """What comes before sampling: servers have loaded their model."""
    return "probe" if config.server else "load"


@dataclass(slots=True)
class RunStats:
    """Running totals; a Reporter reads them, nobody else writes them."""

    planned: int = 0
    tombstones: int = 0
    stored_before: int = 0
    """Samples that earlier attempts had stored."""
    stored: int = 0
    """Samples stored by this attempt."""
    failed: int = 0
    tokens: int = 0
    mask_ids: int = 0
    masked_tokens: int = 0
    """Tokens that have a support: all but those of untruncated prompts."""
    length_finishes: int = 0
    resampled: int = 0
    restarts: int = 0
    """Of an engine that died or stalled."""
    seconds: float = 0.0
    """Of sampling, without loading the model."""

    @property
    def owed(self) -> int:
        """Samples planned but not stored, tombstones aside."""
        return self.planned - self.tombstones - self.stored_before - self.stored

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_support(self) -> float:
        return self.mask_ids / self.masked_tokens if self.masked_tokens else 0.0

    @property
    def exit_code(self) -> int:
        """0 when everything planned is stored, else 3."""
        return 3 if self.owed or self.tombstones else 0

    def count(self, completion: Completion) -> None:
        """Add one stored completion."""
        tokens = len(completion.token_ids)
        self.stored += 1
        self.tokens += tokens
        self.mask_ids += len(completion.mask_ids)
        self.masked_tokens += tokens if completion.sampling.truncates else 0
        self.length_finishes += completion.finish_reason == "length"


class Reporter(Protocol):
    """Where a run tells what it is doing.

    All calls come from the main thread, but for those of `note`, which may come from any: that a storage does not
    answer is told while the main thread waits for it.
    """

    def phase(self, name: Phase) -> None:
        """A phase begins."""

    def checked(self, prompts: int) -> None:
        """So many prompts are planned, while checking."""

    def note(self, message: str) -> None:
        """Something the user should know, once."""

    def started(self, place: Place, preflight: Preflight, manifest: Manifest, stats: RunStats) -> None:
        """The run is established; sampling begins. `stats` are those of this attempt, which has made nothing yet."""

    def grown(self, place: Place) -> None:
        """Samples have been stored, perhaps by others, and the writer has left: the card may be written."""

    def progress(self, stats: RunStats) -> None:
        """Called every TICK_SECONDS while there are engines, be they still loading, and once at the end."""
