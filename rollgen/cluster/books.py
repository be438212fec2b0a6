"""What the driver makes of the news: journal lines, failure lines, totals, and whether it is worth going on.

News may come twice, late or never: a shard counts once, by its name, and what is told of nowhere is found by its file.

A replica that lives is heard of every few seconds, whatever its engine does. How long one has been silent is counted in
looks at the news: time in which the driver itself stood still is nobody's silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rollgen.cluster.board import (
    SIGN_SECONDS,
    Alive,
    Committed,
    Died,
    Failed,
    Loaded,
    News,
    Refused,
    Resampled,
    Rested,
    Started,
    Warned,
)
from rollgen.cluster.receipts import Positions, Receipt
from rollgen.engines.base import SampleRequest
from rollgen.errors import EngineError, RollgenError
from rollgen.format.failures import Stage
from rollgen.format.journal import JournalLine
from rollgen.loop.crew import Job
from rollgen.loop.engines import BARREN_DEATHS
from rollgen.loop.sampling import record_failure, too_many_failures

_SILENT: Final = "its process ended without a word: was it killed, or out of memory?"
LATELY_SECONDS: Final = 5 * SIGN_SECONDS
"""Within which a replica that lives is heard of, also where its process has little time to say so."""
_LOOK_SECONDS: Final = SIGN_SECONDS
"""That count between two looks at the news, at most."""
CONTINUE: Final = "finished samples are stored, continue with --resume"


@dataclass(slots=True)
class _Replica:
    """What is known of one replica."""

    place: str = "?"
    lives: bool = False
    rested: bool = False
    barren: int = 0
    """Deaths since it stored something."""
    heard: float = 0.0
    """When it was heard of last, by the clock of the books; so below."""
    loads_since: float | None = None
    """When it began to load its engine; None when it does not, or when that has been told."""


class Books:
    """The books of one job. `positions` are those of its run; `journal` adds the line of a shard, durably."""

    def __init__(
        self,
        job: Job,
        positions: Positions,
        *,
        replicas: int,
        journal: Callable[[JournalLine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._clock = clock
        self._looked = clock()
        self._now = self._heard = 0.0
        self._stall_timeout = job.preflight.config.stall_timeout
        self._positions = positions
        self._journal = journal
        self._restarts_left = job.preflight.config.max_restarts * replicas
        self._replicas: dict[str, _Replica] = {}
        self.received: set[str] = set()
        """Names of the shards that count."""
        self._failed: set[int] = set()
        self._sampling_since: float | None = None
        self.last_death = ""
        """Of a replica, in words."""
        self.problem: RollgenError | None = None
        """Why the job cannot go on."""

    @property
    def at_rest(self) -> bool:
        """Whether every replica that lives, as far as was heard lately, has committed what it had."""
        living = [replica for replica in self._replicas.values() if replica.lives and not replica.rested]
        return all(self._now - replica.heard >= LATELY_SECONDS for replica in living)

    @property
    def silence(self) -> float:
        """Seconds in which no replica at all was heard of, in this round."""
        return self._now - self._heard

    @property
    def silent(self) -> list[str]:
        """Names of those that live, as far as is known, and have not been heard of for the stall timeout."""
        patience = max(self._stall_timeout, LATELY_SECONDS)
        return [name for name, each in self._replicas.items() if each.lives and self._now - each.heard >= patience]

    def begin_round(self) -> None:
        """The replicas of the last round are gone."""
        self._replicas.clear()
        self._heard = self._now

    def let_go(self, name: str) -> None:
        """A replica was ended because there was nothing left for it to do."""
        self._replicas[name].lives = False

    def lost(self, name: str) -> None:
        """A replica was silent for too long: it counts as dead."""
        replica = self._replicas[name]
        self._died(replica, f"no sign of life for {self._now - replica.heard:.0f} s (--stall-timeout)")

    def enter(self, news: Iterable[tuple[str, News]]) -> None:
        """Take note of what replicas have posted, and tell how far the job is.

        Raises DatasetError when a journal or failure line cannot be written.
        """
        now = self._clock()
        self._now += min(now - self._looked, _LOOK_SECONDS)
        self._looked = now
        for name, each in news:
            replica = self._replicas.setdefault(name, _Replica())
            replica.heard = self._heard = self._now
            self._enter(replica, each)
        self._tell_of_loading()
        if self._sampling_since is not None:
            self._job.stats.seconds = time.monotonic() - self._sampling_since
        self._job.reporter.progress(self._job.stats)

    def receive(self, receipt: Receipt) -> None:
        """Count a shard. Its line is durable on return. Raises DatasetError when it cannot be written."""
        if receipt.line.file in self.received:
            return
        self._journal(receipt.line)
        self.received.add(receipt.line.file)
        stats = self._job.stats
        stats.stored += receipt.line.rows
        stats.tokens += receipt.line.tokens
        stats.mask_ids += receipt.line.mask_ids
        stats.masked_tokens += receipt.masked_tokens
        stats.length_finishes += receipt.length_finishes
        for position in receipt.positions.tolist():
            self._job.owed.settle(position)
            if position in self._failed:  # by a replica that died, and was made by the next one
                self._failed.remove(position)
                stats.failed -= 1

    def _enter(self, replica: _Replica, news: News) -> None:
        match news:
            case Started():
                if replica.lives:
                    self._died(replica, _SILENT)
                replica.lives, replica.rested, replica.place = True, False, news.place
                replica.loads_since = self._now
            case Alive():
                pass
            case Loaded():
                replica.loads_since = None
                self._loaded()
            case Committed():
                replica.barren = 0
                self.receive(news.receipt)
            case Failed():
                self._sample_failed(news.request, news.stage, news.error)
            case Resampled():
                self._job.stats.resampled += news.count
            case Warned():
                self._job.reporter.note(f"{replica.place}: {news.message}")
            case Died():
                self._died(replica, news.message)
            case Refused():
                self._give_up(news.error)
            case Rested():
                replica.rested = True

    def _loaded(self) -> None:
        if self._sampling_since is None:
            self._sampling_since = time.monotonic()
            self._job.reporter.phase("generate")

    def _tell_of_loading(self) -> None:
        """Large models take long, from slow disks for example: who waits in vain has to see that himself."""
        for replica in self._replicas.values():
            if replica.loads_since is not None and self._now - replica.loads_since >= self._stall_timeout:
                replica.loads_since = None
                self._job.reporter.note(
                    f"the replica on {replica.place} has been loading its engine for {self._stall_timeout:g} s, and is "
                    "waited for; what the engine says meanwhile is in Ray's logs"
                )

    def _sample_failed(self, request: SampleRequest, stage: Stage, error: str) -> None:
        job = self._job
        position = self._positions.of_request(request)
        if position in self._failed:
            return
        record_failure(job.failures, job.discretion, request, stage, error)
        self._failed.add(position)
        job.owed.settle(position)
        job.stats.failed += 1
        if job.stats.failed > job.max_failures:
            self._give_up(too_many_failures(job.stats.failed, job.max_failures, request, error))

    def _died(self, replica: _Replica, why: str) -> None:
        replica.lives, replica.loads_since = False, None
        replica.barren += 1
        message = self.last_death = f"the replica on {replica.place} has died: {why}"
        if replica.barren == BARREN_DEATHS:
            times = f"{BARREN_DEATHS} times without storing a sample"
            self._give_up(EngineError(f"{message}; that is {times}; {CONTINUE}"))
        elif self._restarts_left == 0:
            self._give_up(EngineError(f"{message} after {self._job.stats.restarts} restarts; {CONTINUE}"))
        else:
            self._restarts_left -= 1
            self._job.stats.restarts += 1
            self._job.reporter.note(f"{message}; Ray starts it again ({self._restarts_left} more restarts are allowed)")

    def _give_up(self, problem: RollgenError) -> None:
        self.problem = self.problem or problem
