"""The workers of one engine: a fixed number of them take owed requests, each asking for one sample at a time.

So a straggler holds up only its own worker, and nothing is in memory but what is in flight and what waits for its
commit. A sample that fails becomes a failure line and is owed again to the next attempt; too many of them stop the run.
An engine that has requests and gives no token for a while counts as dead: requests that hang are no reason to hang with
them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollgen.engines.base import Engine, Extras, RequestError, SampleRequest
from rollgen.errors import CaptureError, EngineError, TooManyFailures
from rollgen.format.failures import FailureLog, Stage
from rollgen.format.invariants import find_problem
from rollgen.format.writer import ShardWriter
from rollgen.inert import LINE, Discretion, brief
from rollgen.loop.report import RunStats
from rollgen.loop.work import Work

TICK_SECONDS = 0.5
_LATE_TICK = 4 * TICK_SECONDS
MIN_FAILURES = 20
"""Of the default bound: so many samples may fail in the smallest run."""


def record_failure(
    failures: FailureLog, discretion: Discretion, request: SampleRequest, stage: Stage, error: str
) -> None:
    """A failure line for a request: one line of text that may travel. Raises DatasetError when it cannot be written."""
    prompt = request.prompt
    failures.record(
        prompt.prompt_id,
        prompt.prompt_index,
        request.sample_index,
        stage,
        brief(discretion(error), LINE),
        generation=request.generation,
    )


def too_many_failures(failed: int, allowed: int, request: SampleRequest, error: str) -> TooManyFailures:
    """What ends a run in which so many samples have failed, `request` last and for `error`."""
    return TooManyFailures(
        f"{failed} samples failed, more than --max-failures {allowed} allows, the last one "
        f"({request.prompt.prompt_id}, {request.sample_index}) for: {error}; see failures/, then continue with --resume"
    )


@dataclass(slots=True)
class Sampler:
    """Makes what is owed with one engine. `run` may be called again after the engine has been started again."""

    engine: Engine
    work: Work
    writer: ShardWriter
    stats: RunStats
    record_failure: Callable[[SampleRequest, Stage, str], None]
    note: Callable[[str], None]
    stall_timeout: float
    """Seconds."""
    max_failures: int
    workers: int
    """Requests in flight at most."""
    stored: int = 0
    """By this engine."""
    given_back: int = field(default=0, init=False)
    """Requests that the last run left unmade."""
    _in_flight: int = field(default=0, init=False)
    """Requests that the engine is at."""

    async def run(self) -> None:
        """Make samples until nothing is owed. Raises EngineError, TooManyFailures, or what the writer raised."""
        self.given_back = 0
        self.engine.extras = Extras.of(self.writer.manifest)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                workers = [group.create_task(self._work()) for _ in range(self.workers)]
                await asyncio.wait(workers)
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _work(self) -> None:
        while (taken := await self.work.take()) is not None:
            try:
                await self._make(taken.request)
            except BaseException:
                self.given_back += 1
                self.work.give_back(taken)
                raise
            self.work.settle(taken)

    async def _make(self, request: SampleRequest) -> None:
        self._in_flight += 1
        try:
            completion = await self.engine.sample(request)
        except RequestError as error:
            self._failed(request, "engine", str(error))
        except CaptureError as error:
            self._failed(request, "capture", str(error))
        else:
            problem = find_problem(completion, self.writer.manifest.vocab_size)
            if problem is not None:
                self._failed(request, "invariant", problem)
                return
            self.writer.add(completion)
            self.stats.count(completion)
            self.stored += 1
        finally:
            self._in_flight -= 1

    def _failed(self, request: SampleRequest, stage: Stage, error: str) -> None:
        self.record_failure(request, stage, error)
        self.stats.failed += 1
        if self.stats.failed > self.max_failures:
            raise too_many_failures(self.stats.failed, self.max_failures, request, error)

    async def _watch(self) -> None:
        watchdog = _Watchdog(self.stall_timeout)
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if warning := watchdog.look(self.engine.tokens, is_idle=self._in_flight == 0):
                self.note(warning)


class _Watchdog:
    """Tells a slow engine from one that stands still: only a new token is a sign of life of one that has requests.

    Time in which nobody looked, since this program was stopped or busy, is no silence of the engine.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._looked = 0.0
        self._tokens = -1
        self._silent = 0.0
        self._warned = False

    def look(self, tokens: int, *, is_idle: bool) -> str | None:
        """Called every tick with the tokens generated so far. Warns at half the timeout; raises EngineError at it."""
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        if is_idle or tokens != self._tokens:
            self._tokens, self._silent, self._warned = tokens, 0.0, False
            return None
        self._silent += min(elapsed, _LATE_TICK)
        if self._silent >= self._timeout:
            raise EngineError(f"the engine has stalled: no token for {self._silent:.0f} s (--stall-timeout)")
        if self._silent >= self._timeout / 2 and not self._warned:
            self._warned = True
            return f"no token for {self._silent:.0f} s; the engine counts as stalled after {self._timeout:g} s"
        return None
