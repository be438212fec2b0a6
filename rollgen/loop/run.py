"""The loop: plan - done -> engine -> writer.

Every sample is its own request. A fixed number of workers share one stream of owed requests, so a straggler holds up
only its own worker, and nothing is in memory but what is in flight and what waits for its commit. A sample that fails
becomes a failure line and is owed again; the death of the engine or a signal ends the run after committing what is
finished.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollgen.config import EMBEDDED_MODEL, RunConfig
from rollgen.directory import Holds, check_start, inspect_directory
from rollgen.engines.base import Engine, RequestError, SampleRequest
from rollgen.errors import CaptureError, EngineError, RollgenError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog, Stage
from rollgen.format.invariants import find_problem
from rollgen.format.manifest import Manifest
from rollgen.format.recovery import PlannedKeys, recover
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.preflight import Preflight, check_engine, establish, plan_run
from rollgen.prompts.plan import Plan
from rollgen.rollouts import Completion

WRITER = "w0"
TICK_SECONDS = 0.5
SIGNAL_GRACE_SECONDS = 1.0
"""A terminal's Ctrl-C reaches the engine process too, which may die before our own signal is seen."""


class Interrupted(RollgenError):
    """SIGINT or SIGTERM arrived; what was finished is committed."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}; finished samples are committed")
        self.signal_number = signal_number


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
    """Where a run tells what it is doing. All calls come from the main thread."""

    def phase(self, name: str) -> None:
        """A phase begins: check, load, generate."""

    def checked(self, prompts: int) -> None:
        """So many prompts are planned, while checking."""

    def note(self, message: str) -> None:
        """Something the user should know, once."""

    def started(self, directory: Path, preflight: Preflight, manifest: Manifest) -> None:
        """The run is established; sampling begins."""

    def progress(self, stats: RunStats) -> None:
        """Called every TICK_SECONDS while sampling, and once at the end."""


EngineFactory = Callable[[Preflight], Engine]


def vllm_engine(preflight: Preflight) -> Engine:
    """vLLM in this process, as configured. Raises UsageError when vLLM is missing or refuses the configuration."""
    try:
        from rollgen.engines.vllm import VllmEngine
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'rollgen[vllm]' (GPU) or 'rollgen[cpu]'"
        ) from error
    tokenizer = preflight.model.tokenizer
    return VllmEngine(
        preflight.config.model_copy(update={"revision": preflight.model.revision}),  # the commit that was checked
        preflight.model.path_or_id,
        vocab_size=preflight.model.vocab_size,
        capture_wanted=preflight.capture_wanted,
        untruncated="some" if preflight.summary.untruncated else "none",
        replayable=preflight.replayable,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
    )


def generate(
    files: Sequence[Path],
    config: RunConfig,
    out: Path,
    *,
    reporter: Reporter,
    make_engine: EngineFactory = vllm_engine,
    resume: bool = False,
    clean: bool = False,
) -> RunStats:
    """Run to the end and return the totals. Raises a RollgenError; after a signal, `Interrupted`."""
    check_start(out, inspect_directory(out), resume=resume, clean=clean)  # before anything is made
    created = not out.exists()
    plan_path = out / f".tmp-{WRITER}-plan.parquet"
    with WriterSlot(out, WRITER) as slot:
        try:
            holds = inspect_directory(out)  # again: another run may have come and gone until the slot was ours
            check_start(out, holds, resume=resume, clean=clean)
            reporter.phase("check")
            continued = out if holds is Holds.RUN and resume else None
            preflight = plan_run(files, config, plan_path, continued=continued, progress=reporter.checked)
            return asyncio.run(_Run(slot, preflight, reporter).run(make_engine))
        except BaseException:  # inside the slot: what is removed here is not another starter's
            plan_path.unlink(missing_ok=True)
            if created and inspect_directory(out) is Holds.NOTHING:
                shutil.rmtree(out)  # the empty frame that this call made
            raise


def owed_requests(plan: Plan, done: npt.NDArray[np.bool_], outstanding: dict[int, int]) -> Iterator[SampleRequest]:
    """What is planned and not done, in plan order. Counts each prompt's requests in `outstanding` as it goes."""
    for prompt in plan.rows():
        if prompt.error is not None:
            continue
        start = int(plan.offsets[prompt.prompt_index])
        owed = np.flatnonzero(~done[start : start + prompt.n])
        if len(owed):
            outstanding[prompt.prompt_index] = len(owed)
        for sample_index in owed:
            yield SampleRequest(prompt, int(sample_index))


class _Stop:
    """Turns the first SIGINT or SIGTERM into a flag; a second one ends the process at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.signal_number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: int) -> None:
        if self.signal_number:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self.signal_number = number
        self._event.set()

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, or cancel it when a signal arrives. Raises Interrupted then."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), EngineError):
                await asyncio.wait({stopped}, timeout=SIGNAL_GRACE_SECONDS)
            if self.signal_number:
                task.cancel()
                await asyncio.wait({task})
                raise Interrupted(self.signal_number)
            task.result()
        finally:
            stopped.cancel()


@dataclass(slots=True)
class _Run:
    """One attempt, from a passed preflight to its end."""

    slot: WriterSlot
    preflight: Preflight
    reporter: Reporter
    stats: RunStats = field(default_factory=RunStats)

    async def run(self, make_engine: EngineFactory) -> RunStats:
        """Recover, load, sample. Returns the totals."""
        self._note_summary()
        plan = Plan(self.preflight.plan_path)
        done = self._recover(plan)
        if self.stats.owed == 0:
            return self._nothing_owed(plan)
        stop = _Stop()
        engine = make_engine(self.preflight)
        check_engine(self.preflight, engine)
        self.reporter.phase("load")
        try:
            await stop.guard(engine.start())
            manifest = establish(self.preflight, engine, self.slot)
            plan.path = self.slot.directory / PLAN_FILE  # where it was moved to
            self._record_tombstones(plan)
            self.reporter.phase("generate")
            self.reporter.started(self.slot.directory, self.preflight, manifest)
            interval = self.preflight.config.commit_interval
            with ShardWriter(self.slot, manifest, commit_interval=interval) as writer:
                sampling = _Sampling(engine, writer, self._failures(), self.stats, self.reporter)
                await stop.guard(sampling.run(plan, done))
        finally:
            engine.close()
        self.reporter.progress(self.stats)
        return self.stats

    def _note_summary(self) -> None:
        summary = self.preflight.summary
        if self.preflight.config.model is None:
            self.reporter.note(f"no --model: using the embedded demo model, {EMBEDDED_MODEL}")
        for count, text in (
            (summary.tombstones, "input rows are bad and skipped, recorded in failures/"),
            (summary.clamped, "prompts leave less of the context than max_tokens asks for: clamped"),
            (summary.double_bos, "prompts begin with two BOS tokens: was a chat template applied before?"),
        ):
            if count:
                self.reporter.note(f"{count} {text}")

    def _recover(self, plan: Plan) -> npt.NDArray[np.bool_]:
        done = np.zeros(int(plan.offsets[-1]), np.bool_)
        if self.preflight.stored is not None:
            recovery = recover(
                self.slot, self.preflight.stored.config_digest, PlannedKeys(plan.offsets, plan.prompt_ids)
            )
            done = recovery.done
            for finding in recovery.findings:
                self.reporter.note(finding)
        self.stats.planned = plan.samples
        self.stats.tombstones = int(plan.n[plan.tombstone].sum())
        self.stats.stored_before = int(done.sum())
        return done

    def _nothing_owed(self, plan: Plan) -> RunStats:
        plan.path = self.preflight.plan_path.replace(self.slot.directory / PLAN_FILE)
        self._record_tombstones(plan)
        self.reporter.note("nothing is owed: every planned sample is stored")
        return self.stats

    def _failures(self) -> FailureLog:
        return FailureLog(self.slot.directory, self.slot.writer)

    def _record_tombstones(self, plan: Plan) -> None:
        """Skipped input rows, once: a continued run has recorded its own already."""
        known = self.preflight.known_prompts
        failures = self._failures()
        for prompt in plan.rows(known) if plan.tombstone[known:].any() else ():
            if prompt.error is not None:
                failures.record(prompt.prompt_id, prompt.prompt_index, 0, "input", prompt.error)


@dataclass(slots=True)
class _Sampling:
    """The workers and what they share."""

    engine: Engine
    writer: ShardWriter
    failures: FailureLog
    stats: RunStats
    reporter: Reporter
    outstanding: dict[int, int] = field(default_factory=dict)
    """Requests not yet answered, by prompt; at zero its group may be written."""

    async def run(self, plan: Plan, done: npt.NDArray[np.bool_]) -> None:
        """Make everything owed. Raises EngineError, or what the writer raised."""
        requests = owed_requests(plan, done, self.outstanding)
        started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                ticker = group.create_task(self._tick(started))
                workers = [
                    group.create_task(self._work(requests)) for _ in range(min(self.engine.window, self.stats.owed))
                ]
                await asyncio.wait(workers)
                ticker.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._update(started)

    async def _work(self, requests: Iterator[SampleRequest]) -> None:
        for request in requests:
            await self._make(request)
            self.outstanding[request.prompt.prompt_index] -= 1
            if self.outstanding[request.prompt.prompt_index] == 0:
                del self.outstanding[request.prompt.prompt_index]
                self.writer.close_group(request.prompt.prompt_index)

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
        prompt = request.prompt
        self.failures.record(prompt.prompt_id, prompt.prompt_index, request.sample_index, stage, error)
        self.stats.failed += 1

    async def _tick(self, started: float) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.writer.tick()
            self._update(started)
            self.reporter.progress(self.stats)

    def _update(self, started: float) -> None:
        self.stats.seconds = time.monotonic() - started
        self.stats.resampled = self.engine.resampled
