"""The workers: a fixed number of them share one stream of owed requests, each asking for one sample at a time.

So a straggler holds up only its own worker, and nothing is in memory but what is in flight and what waits for its
commit. A sample that fails becomes a failure line and is owed again to the next attempt; too many of them stop the run.
An engine from which no token has come for a while counts as dead: requests that hang are no reason to hang with them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollgen.engines.base import Engine, RequestError, SampleRequest
from rollgen.errors import CaptureError, EngineError, TooManyFailures
from rollgen.format.failures import FailureLog, Stage
from rollgen.format.invariants import find_problem
from rollgen.format.writer import ShardWriter
from rollgen.inert import LINE, Discretion, brief
from rollgen.loop.owed import Owed
from rollgen.loop.report import Reporter, RunStats

TICK_SECONDS = 0.5
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


@dataclass(slots=True)
class Sampler:
    """Makes what is owed. `run` may be called again after the engine has been started again."""

    engine: Engine
    writer: ShardWriter
    failures: FailureLog
    discretion: Discretion
    """What of an engine's errors may be recorded."""
    owed: Owed
    stats: RunStats
    reporter: Reporter
    stall_timeout: float
    """Seconds."""
    max_failures: int
    _outstanding: Counter[int] = field(default_factory=Counter)
    """Requests not yet answered, by prompt; at zero its group may be written."""

    async def run(self) -> None:
        """Make everything owed. Raises EngineError, TooManyFailures, or what the writer raised."""
        self._outstanding.clear()
        requests = self.owed.requests()
        started = time.monotonic() - self.stats.seconds
        try:
            async with asyncio.TaskGroup() as group:
                ticker = group.create_task(self._tick(started))
                workers = [group.create_task(self._work(requests)) for _ in range(self._worker_count())]
                await asyncio.wait(workers)
                ticker.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._update(started)

    def _worker_count(self) -> int:
        return max(1, min(self.engine.window, self.stats.owed))

    async def _work(self, requests: Iterator[tuple[SampleRequest, int, int]]) -> None:
        for request, position, group_size in requests:
            prompt_index = request.prompt.prompt_index
            self._outstanding[prompt_index] += group_size
            self.owed.take(position)
            await self._make(request)
            self.owed.settle(position)
            self._outstanding[prompt_index] -= 1
            if not self._outstanding[prompt_index]:
                del self._outstanding[prompt_index]
                self.writer.close_group(prompt_index)

    async def _make(self, request: SampleRequest) -> None:
        try:
            completion = await self.engine.sample(request)
        except RequestError as error:
            self._failed(request, "engine", str(error))
        except CaptureError as error:
            self._failed(request, "capture", str(error))
        else:
            problem = find_problem(completion, self.writer.vocab_size)
            if problem is not None:
                self._failed(request, "invariant", problem)
                return
            self.writer.add(completion)
            self.stats.count(completion)

    def _failed(self, request: SampleRequest, stage: Stage, error: str) -> None:
        record_failure(self.failures, self.discretion, request, stage, error)
        self.stats.failed += 1
        if self.stats.failed > self.max_failures:
            raise TooManyFailures(
                f"{self.stats.failed} samples failed, more than --max-failures {self.max_failures} allows, the last "
                f"one ({request.prompt.prompt_id}, {request.sample_index}) for: {error}; see failures/, then continue "
                "with --resume"
            )

    async def _tick(self, started: float) -> None:
        watchdog = _Watchdog(self.stall_timeout)
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.writer.tick()
            self._update(started)
            self.reporter.progress(self.stats)
            if warning := watchdog.look(self.engine.tokens):
                self.reporter.note(warning)

    def _update(self, started: float) -> None:
        self.stats.seconds = time.monotonic() - started
        self.stats.resampled = self.engine.resampled


class _Watchdog:
    """Tells a slow engine from one that stands still: only a new token is a sign of life."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._tokens = -1
        self._since = 0.0
        self._warned = False

    def look(self, tokens: int) -> str | None:
        """Called every tick with the tokens generated so far. Warns at half the timeout; raises EngineError at it."""
        now = time.monotonic()
        if tokens != self._tokens:
            self._tokens, self._since, self._warned = tokens, now, False
            return None
        silent = now - self._since
        if silent >= self._timeout:
            raise EngineError(f"the engine has stalled: no token for {silent:.0f} s (--stall-timeout)")
        if silent >= self._timeout / 2 and not self._warned:
            self._warned = True
            return f"no token for {silent:.0f} s; the engine counts as stalled after {self._timeout:g} s"
        return None
