"""The crew of engines in this process, or of servers: each has workers of its own, all share one stream and one writer.

The death of an engine is not the end: what is finished is committed, the engine is started again and what it had in
flight is owed again, `--max-restarts` times at most, and no more when it dies again and again without making anything.
Meanwhile the others go on, and they finish the work when one is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from rollgen.engines.base import Engine
from rollgen.errors import EngineError, UnfitEngine
from rollgen.format.writer import ShardWriter
from rollgen.loop import sampling
from rollgen.loop.crew import Job
from rollgen.loop.report import Phase, preparing
from rollgen.loop.sampling import Sampler, record_failure
from rollgen.loop.stop import SIGNAL_GRACE_SECONDS
from rollgen.loop.work import Work

BARREN_DEATHS = 3
"""An engine that dies so often in a row without making a sample will not make any."""


class Engines:
    """`crew.Crew` of one or more engines of the same model."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        first = engines[0]
        self.record, self.capture, self.dtype, self.extras = first.record, first.capture, first.dtype, first.extras
        self.notes = tuple(dict.fromkeys(note for engine in engines for note in engine.notes))
        self._engines = tuple(engines)
        self._working = len(engines)

    async def start(self) -> None:
        """See `crew.Crew`; so below."""
        await _all(engine.start() for engine in self._engines)

    async def make(self, job: Job) -> None:
        with ShardWriter(job.slot, job.manifest, commit_interval=job.preflight.config.commit_interval) as writer:
            work = Work(job.owed, writer.close_group)
            samplers = [self._sampler(engine, work, writer, job) for engine in self._engines]
            job.reporter.phase("generate")
            ticking = asyncio.create_task(self._tick(writer, job))
            working = asyncio.create_task(_all(self._keep(sampler, job) for sampler in samplers))
            try:
                await asyncio.wait({ticking, working}, return_when=asyncio.FIRST_COMPLETED)
                for task in (ticking, working):
                    if task.done():
                        task.result()
            finally:
                ticking.cancel()
                working.cancel()
                await asyncio.wait({ticking, working})

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _sampler(self, engine: Engine, work: Work, writer: ShardWriter, job: Job) -> Sampler:
        return Sampler(
            engine=engine,
            work=work,
            writer=writer,
            stats=job.stats,
            record_failure=partial(record_failure, job.failures, job.discretion),
            note=job.reporter.note,
            stall_timeout=job.preflight.config.stall_timeout,
            max_failures=job.max_failures,
            workers=max(1, min(engine.window, -(-len(job.owed) // len(self._engines)))),
        )

    async def _keep(self, sampler: Sampler, job: Job) -> None:
        """Sample until nothing is owed, starting the engine again when it dies. Raises EngineError in the end."""
        deaths = _Deaths(job.preflight.config.max_restarts)
        while True:
            before = sampler.stored
            try:
                if deaths.count and await self._restart(sampler, job):
                    return
                await sampler.run()
                return
            except UnfitEngine:
                raise
            except EngineError as error:
                await asyncio.sleep(SIGNAL_GRACE_SECONDS)  # a signal that killed the engine cancels this
                try:
                    deaths.add(error, barren=sampler.stored == before)
                except EngineError as last:
                    self._give_up(last, sampler, job)
                    return
                sampler.engine.close()
                sampler.writer.flush()  # a restart takes minutes: nothing finished waits for it
                job.stats.restarts += 1
                job.reporter.note(
                    f"{error}; starting it again ({deaths.count} of {deaths.limit}), {sampler.given_back} samples are "
                    "owed again"
                )

    async def _restart(self, sampler: Sampler, job: Job) -> bool:
        """Start an engine again, unless the others finish the work meanwhile: then true."""
        self._phase(preparing(job.preflight.config), job)
        starting = asyncio.ensure_future(sampler.engine.start())
        over = asyncio.ensure_future(sampler.work.over())
        try:
            await asyncio.wait({starting, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
        if starting.cancelled():
            return True
        starting.result()
        self._phase("generate", job)
        return False

    def _phase(self, name: Phase, job: Job) -> None:
        if self._working == 1:  # else the others are at work, whatever this one does
            job.reporter.phase(name)

    def _give_up(self, error: EngineError, sampler: Sampler, job: Job) -> None:
        """Go on without an engine. Raises its error if it was the last one."""
        self._working -= 1
        if not self._working:
            raise EngineError(f"{error}; finished samples are stored, continue with --resume") from error
        sampler.engine.close()
        job.reporter.note(f"{error}; {self._working} of {len(self._engines)} engines go on without it")

    async def _tick(self, writer: ShardWriter, job: Job) -> None:
        """Commit what is due, and tell how far the run is. Raises what the writer raised."""
        started = time.monotonic() - job.stats.seconds
        try:
            while True:
                await asyncio.sleep(sampling.TICK_SECONDS)
                writer.tick()
                self._count(job, started)
                job.reporter.progress(job.stats)
        finally:
            self._count(job, started)

    def _count(self, job: Job, started: float) -> None:
        job.stats.seconds = time.monotonic() - started
        job.stats.resampled = sum(engine.resampled for engine in self._engines)


class _Deaths:
    """How often an engine has died, and whether it is worth starting again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._barren = 0

    def add(self, error: EngineError, *, barren: bool) -> None:
        """Count a death; `barren`: no sample was stored since the one before. Raises EngineError if it was the last."""
        self._barren = self._barren + 1 if barren else 0
        if self.count == self.limit or self._barren == BARREN_DEATHS:
            times = f" after {self.count} restarts" if self.count else ""
            raise EngineError(f"{error}{times}") from error
        self.count += 1


async def _all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them together until all have ended, or one raises, which cancels the others. Raises the first error alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
