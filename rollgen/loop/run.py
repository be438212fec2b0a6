"""One attempt: preflight, recovery, engine, sampling, the end. Everything finished is committed, however it ends.

Every sample is its own request. The death of the engine is not the end: what is finished is committed, the engine is
started again and what it had in flight is owed again, `--max-restarts` times at most, and no more when it dies again
and again without making anything. A signal ends the run after committing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollgen.config import EMBEDDED_MODEL, RunConfig
from rollgen.directory import Holds, check_start, inspect_directory, remove_frame
from rollgen.engines.base import Engine
from rollgen.engines.requirements import check_vllm, native_cost
from rollgen.errors import DatasetError, EngineError, UnfitEngine, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.recovery import PlannedKeys, recover
from rollgen.format.retries import RetryList, read_retries
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.inert import Discretion
from rollgen.loop.log import RunLog
from rollgen.loop.owed import Owed
from rollgen.loop.report import Reporter, RunStats
from rollgen.loop.retry import check_condition, describe, plan_retry, select, split_config
from rollgen.loop.sampling import MIN_FAILURES, Sampler
from rollgen.loop.stop import Stop
from rollgen.preflight import (
    Preflight,
    check_engine,
    discretion_of,
    establish,
    establish_plan,
    plan_run,
    record_tombstones,
)
from rollgen.prompts.plan import Plan
from rollgen.prompts.sources import PromptInput

WRITER = "w0"
BARREN_DEATHS = 3
"""An engine that dies so often in a row without making a sample will not make any."""

EngineFactory = Callable[[Preflight], Engine]


def vllm_engine(preflight: Preflight) -> Engine:
    """vLLM in this process, as configured. Raises UsageError when vLLM is missing or refuses the configuration."""
    check_vllm()
    try:
        from rollgen.engines.vllm import VllmEngine
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'rollgen[vllm]' (GPU) or 'rollgen[cpu]'"
        ) from error
    return VllmEngine(
        preflight.config.model_copy(update={"revision": preflight.model.revision}),  # the commit that was checked
        preflight.model.path_or_id,
        vocab_size=preflight.model.vocab_size,
        capture_wanted=preflight.capture_wanted,
        untruncated="some" if preflight.summary.untruncated else "none",
        replayable=preflight.replayable,
        decode=preflight.model.decode,
    )


class Start(NamedTuple):
    """What a command wants with the run that its directory may hold: the part that a dry run does too."""

    resume: bool = False
    clean: bool = False
    retry: str | None = None
    """See `retry.py`."""

    def check(self, out: Path) -> Holds:
        """Raises UsageError when this may not start in `out`; returns what that holds."""
        if self.retry is not None:
            check_condition(self.retry)
        holds = inspect_directory(out)
        check_start(out, holds, resume=self.resume, clean=self.clean)
        return holds

    def plan(
        self,
        files: Sequence[PromptInput],
        config: RunConfig,
        out: Path,
        plan_path: Path,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[Preflight, int]:
        """All checks, with the plan at `plan_path`, and the max_tokens of a new retry, or 0. Changes nothing in `out`.

        Raises UsageError, or ResumeRefused when this would not continue the run there.
        """
        holds, longer = self.check(out), 0
        if self.retry is not None:
            config, longer = split_config(config, out, holds, resume=self.resume)
        continued = out if holds is Holds.RUN and self.resume else None
        return plan_run(files, config, plan_path, continued=continued, progress=progress), longer


def generate(
    files: Sequence[PromptInput],
    config: RunConfig,
    out: Path,
    *,
    reporter: Reporter,
    make_engine: EngineFactory = vllm_engine,
    resume: bool = False,
    clean: bool = False,
    retry: str | None = None,
) -> RunStats:
    """Run to the end and return the totals. Raises a RollgenError; after a signal, `Interrupted`.

    With `retry` (see `retry.py`), `config.max_tokens` is that of the retry.
    """
    start = Start(resume, clean, retry)
    start.check(out)  # before anything is made
    created = not out.exists()
    plan_path = out / f".tmp-{WRITER}-plan.parquet"
    with WriterSlot(out, WRITER, afresh=clean) as slot:
        try:
            discretion = discretion_of(config, out, files)
            with RunLog(reporter, WRITER, discretion) as log:
                log.phase("check")  # the directory too: another run may have come and gone until the slot was ours
                preflight, longer = start.plan(files, config, out, plan_path, progress=log.checked)
                return asyncio.run(_Run(slot, preflight, log, discretion, longer).run(make_engine))
        except BaseException as error:  # inside the slot: what is removed here is not another starter's
            plan_path.unlink(missing_ok=True)
            if created:
                remove_frame(slot)
            if isinstance(error, OSError):
                raise _unwritable(out, error) from error
            raise


def _unwritable(out: Path, error: OSError) -> DatasetError:
    """What is written outside of shards and journals, which have words of their own."""
    place = error.filename or out  # none when a file could be opened but not filled
    return DatasetError(
        f"{place}: cannot be read or written: {error.strerror or error}; make room or see to its permissions, then "
        "continue with --resume"
    )


@dataclass(slots=True)
class _Run:
    """One attempt, from a passed preflight to its end."""

    slot: WriterSlot
    preflight: Preflight
    reporter: Reporter
    discretion: Discretion
    longer: int = 0
    """max_tokens of a new retry; 0 when none is wanted."""
    stats: RunStats = field(default_factory=RunStats)
    new_retry: list[RetryList] = field(default_factory=list)
    """At most one."""

    async def run(self, make_engine: EngineFactory) -> RunStats:
        """Recover, load, sample. Returns the totals."""
        self._note_summary()
        plan = Plan(self.preflight.plan_path)
        owed = self._recover(plan)
        if self.stats.owed == 0:
            return self._nothing_owed(plan)
        stop = Stop()
        engine = make_engine(self.preflight)
        check_engine(self.preflight, engine)
        self._note_engine(engine)
        self.reporter.phase("load")
        try:
            await stop.guard(engine.start())
            for retry in self.new_retry:
                self.preflight = plan_retry(self.preflight, self.slot.directory, retry, self.longer)
            manifest = establish(self.preflight, engine, self.slot)
            plan.path = self.slot.directory / PLAN_FILE  # where it was moved to
            self._record_tombstones(plan)
            self.reporter.started(self.slot.directory, self.preflight, manifest)
            interval = self.preflight.config.commit_interval
            with ShardWriter(self.slot, manifest, commit_interval=interval) as writer:
                await self._sample(self._sampler(engine, writer, owed), stop)
        finally:
            engine.close()
        self.reporter.progress(self.stats)
        return self.stats

    async def _sample(self, sampler: Sampler, stop: Stop) -> None:
        """Sample until nothing is owed, starting the engine again when it dies. Raises EngineError in the end."""
        deaths = _Deaths(self.preflight.config.max_restarts)
        while True:
            before = self.stats.stored
            try:
                if deaths.count:
                    self.reporter.phase("load")
                    await stop.guard(sampler.engine.start())
                self.reporter.phase("generate")
                await stop.guard(sampler.run())
                return
            except UnfitEngine:
                raise
            except EngineError as error:
                deaths.add(error, barren=self.stats.stored == before)
                sampler.engine.close()
                sampler.writer.flush()  # a restart takes minutes: nothing finished waits for it
                suspects = sampler.owed.suspect_in_flight()
                self.stats.restarts = deaths.count
                self.reporter.note(
                    f"{error}; starting it again ({deaths.count} of {deaths.limit}), {suspects} samples are owed again"
                )

    def _sampler(self, engine: Engine, writer: ShardWriter, owed: Owed) -> Sampler:
        config = self.preflight.config
        max_failures = config.max_failures
        if max_failures is None:
            max_failures = max(MIN_FAILURES, self.stats.owed // 100)
        return Sampler(
            engine=engine,
            writer=writer,
            failures=self._failures(),
            discretion=self.discretion,
            owed=owed,
            stats=self.stats,
            reporter=self.reporter,
            stall_timeout=config.stall_timeout,
            max_failures=max_failures,
        )

    def _note_summary(self) -> None:
        summary = self.preflight.summary
        if self.preflight.config.model is None:
            self.reporter.note(f"no --model: using the embedded demo model, {EMBEDDED_MODEL}")
        for count, text in (
            (summary.tombstones, "input rows are bad and skipped, recorded in failures/"),
            (summary.clamped, "prompts leave less of the context than max_tokens asks for: clamped"),
            (summary.double_bos, "prompts begin with two BOS tokens: was a chat template applied twice?"),
            (
                summary.templated,
                "raw prompts begin with a special token: they look like rendered chats, and got no second BOS; "
                "give messages to have them rendered here",
            ),
        ):
            if count:
                self.reporter.note(f"{count} {text}")

    def _note_engine(self, engine: Engine) -> None:
        summary = self.preflight.summary
        cost = native_cost(summary.smallest_top_k, summary.largest_top_k) if engine.capture == "native" else None
        for note in (*engine.notes, cost):
            if note:
                self.reporter.note(note)

    def _recover(self, plan: Plan) -> Owed:
        """What earlier attempts have left to do, and what a new retry adds to it."""
        stored, retries, done = self.preflight.stored, [], np.zeros(plan.samples, np.bool_)
        if stored is not None:
            retries = [*read_retries(self.slot.directory, stored)]
            planned = PlannedKeys(plan.offsets, plan.prompt_ids, retries)
            recovery = recover(self.slot, stored.config_digest, planned)
            done = np.concatenate([recovery.done, *recovery.retried])
            for finding in recovery.findings:
                self.reporter.note(finding)
        if self.longer:
            self.new_retry = self._select(self.longer)
            retries += self.new_retry
            done = np.concatenate([done, *(np.zeros(len(retry), np.bool_) for retry in self.new_retry)])
        self.stats.planned = len(done)
        self.stats.tombstones = int(plan.n[plan.tombstone].sum())
        self.stats.stored_before = int(done.sum())
        return Owed(plan, retries, done)

    def _select(self, max_tokens: int) -> list[RetryList]:
        selection = select(self.slot.directory, self.preflight, max_tokens)
        self.reporter.note(describe(selection, max_tokens))
        return [selection.retries] if len(selection.retries) else []

    def _nothing_owed(self, plan: Plan) -> RunStats:
        establish_plan(self.preflight, self.slot.directory)
        plan.path = self.slot.directory / PLAN_FILE
        self._record_tombstones(plan)
        self.reporter.note("nothing is owed: every planned sample is stored")
        return self.stats

    def _failures(self) -> FailureLog:
        return FailureLog(self.slot.directory, self.slot.writer)

    def _record_tombstones(self, plan: Plan) -> None:
        record_tombstones(plan, self.preflight.known_prompts, self._failures())


class _Deaths:
    """How often the engine has died, and whether it is worth starting again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._barren = 0

    def add(self, error: EngineError, *, barren: bool) -> None:
        """Count a death; `barren`: no sample was stored since the one before. Raises EngineError if it was the last."""
        self._barren = self._barren + 1 if barren else 0
        if self.count == self.limit or self._barren == BARREN_DEATHS:
            times = f" after {self.count} restarts" if self.count else ""
            raise EngineError(f"{error}{times}; finished samples are stored, continue with --resume") from error
        self.count += 1
