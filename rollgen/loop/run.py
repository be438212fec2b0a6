"""One attempt: preflight, recovery, a crew that makes what is owed, the end.

Everything finished is committed, however it ends; a signal ends the run after committing. Several attempts may be at
one dataset at a time, each at its part of the prompts: whoever is there first makes the plan and the manifest, the
others take them over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollgen.config import EMBEDDED_MODEL, RunConfig
from rollgen.directory import Holds, check_start, inspect_directory, remove_frame
from rollgen.engines.requirements import native_cost
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WHOLE, Part, WriterSlot, writer_name
from rollgen.format.done import PlannedKeys
from rollgen.format.failures import FailureLog
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import Manifest
from rollgen.format.recovery import has_strangers, recover
from rollgen.format.retries import OUTCOME_COLUMNS, RetryList, read_retries
from rollgen.format.schema import PLAN_FILE
from rollgen.inert import Discretion
from rollgen.loop.crew import Crew, Job
from rollgen.loop.log import RunLog
from rollgen.loop.owed import Owed
from rollgen.loop.parts import in_part, part_of, sibling_names
from rollgen.loop.place import Place, open_place
from rollgen.loop.report import Reporter, RunStats, preparing
from rollgen.loop.retry import check_condition, describe, plan_retry, select, split_config
from rollgen.loop.sampling import MIN_FAILURES
from rollgen.loop.stop import Interrupted, Stop, is_stopping
from rollgen.preflight import (
    Preflight,
    check_engine,
    continue_run,
    discretion_of,
    establish,
    establish_plan,
    plan_run,
    record_tombstones,
)
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import Planned
from rollgen.prompts.sources import PromptInput

CrewFactory = Callable[[Preflight], Crew]


class Start(NamedTuple):
    """What a command wants with the run that its directory may hold: the part that a dry run does too."""

    resume: bool = False
    clean: bool = False
    retry: str | None = None
    """See `retry.py`."""

    def check(self, out: Path, part: Part) -> Holds:
        """Raises UsageError when this may not start in `out`; returns what that holds."""
        if part != WHOLE and (self.clean or self.retry is not None):
            raise UsageError(
                f"{'--clean' if self.clean else '--retry'}: is for the whole run, --shard for a part of it; start that "
                "with one process and no --shard, then continue with --resume and --shard"
            )
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
        holds, longer = self.check(out, part_of(config.shard)), 0
        if self.retry is not None:
            config, longer = split_config(config, out, holds, resume=self.resume)
        continued = out if holds is Holds.RUN and self.resume else None
        return plan_run(files, config, plan_path, continued=continued, progress=progress), longer


def generate(
    files: Sequence[PromptInput],
    config: RunConfig,
    out: str | Path,
    *,
    reporter: Reporter,
    make_crew: CrewFactory,
    resume: bool = False,
    clean: bool = False,
    retry: str | None = None,
) -> RunStats:
    """Run to the end and return the totals. `out` is a directory or a URL. Raises a RollgenError; after a signal,
    `Interrupted`.

    With `retry` (see `retry.py`), `config.max_tokens` is that of the retry.
    """
    start, part = Start(resume, clean, retry), part_of(config.shard)
    if config.ray is not None and part != WHOLE:
        raise UsageError("--ray and --shard exclude each other: Ray divides the work itself")
    writer = writer_name(part)
    if config.shard is not None:  # what `slurm` means is recorded, and told
        config = config.model_copy(update={"shard": None if part == WHOLE else str(part)})
    notes = _Notes(reporter)
    with _explained(out), open_place(out, writer, part, clean=clean, note=notes) as place:
        start.check(place.directory, part)  # before anything is made
        created = not place.directory.exists()
        with WriterSlot(place.directory, writer, part, afresh=clean, remote=place.remote) as slot:
            try:
                stats = _attempt(start, files, config, _Target(place, slot, notes), make_crew)
            except BaseException:  # inside the slot: what is removed here is not another starter's
                if created:
                    remove_frame(slot)
                raise
        if stats.stored or part != WHOLE:  # another part may have left the card to this one, which was still there
            reporter.grown(place)
    return stats


@dataclass(slots=True)
class _Notes:
    """What the place of a run has to tell: it is there before the log, and after it."""

    reporter: Reporter

    def __call__(self, message: str) -> None:
        self.reporter.note(message)

    @contextmanager
    def kept(self, log: RunLog) -> Iterator[RunLog]:
        """All of it goes through the log meanwhile."""
        reporter, self.reporter = self.reporter, log
        with log:
            try:
                yield log
            finally:
                self.reporter = reporter


class _Target(NamedTuple):
    """Where an attempt writes, as whom, and what is told."""

    place: Place
    slot: WriterSlot
    notes: _Notes


def _attempt(
    start: Start,
    files: Sequence[PromptInput],
    config: RunConfig,
    target: _Target,
    make_crew: CrewFactory,
) -> RunStats:
    """What is done in the slot."""
    (place, slot, notes), directory = target, target.place.directory
    discretion = discretion_of(config, directory, files)
    plan_path = directory / f".tmp-{slot.writer}-plan.parquet"
    with ExitStack() as on_exit:
        on_exit.callback(plan_path.unlink, missing_ok=True)  # established, it has its final name
        log = on_exit.enter_context(notes.kept(RunLog(notes.reporter, slot.writer, discretion)))
        log.phase("check")  # the directory too: another run may have come and gone until the slot was ours
        preflight, longer = start.plan(files, config, directory, plan_path, progress=log.checked)
        return _Run(place, slot, preflight, log, discretion, longer).run(make_crew)


@contextmanager
def _explained(out: str | Path) -> Iterator[None]:
    """Raises DatasetError for an OSError: of files beside shards and journals, which have words of their own."""
    try:
        yield
    except BrokenPipeError:  # whoever reads what the reporter writes went away
        raise
    except OSError as error:
        place = error.filename or out  # none when a file could be opened but not filled
        raise DatasetError(
            f"{place}: cannot be read or written: {error.strerror or error}; make room or see to its permissions, then "
            "continue with --resume"
        ) from error


@dataclass(slots=True)
class _Run:
    """One attempt, from a passed preflight to its end."""

    place: Place
    slot: WriterSlot
    preflight: Preflight
    reporter: Reporter
    discretion: Discretion
    longer: int = 0
    """max_tokens of a new retry; 0 when none is wanted."""
    stats: RunStats = field(default_factory=RunStats)
    new_retry: list[RetryList] = field(default_factory=list)
    """At most one."""

    def run(self, make_crew: CrewFactory) -> RunStats:
        """Recover, load, sample. Returns the totals. Raises Interrupted, which says how many samples were stored.

        Recovery is none of the event loop's business, which would keep Ctrl-C from ending it at once.
        """
        self._note_summary()
        plan = Plan(self.preflight.plan_path)
        with self.slot.section():
            self.slot.declare(file_sha256(plan.path))
        owed = self._recover(plan)
        if self.stats.owed == 0:
            return self._nothing_owed(plan)
        try:
            asyncio.run(self._sample(make_crew, plan, owed))
        except Interrupted as stop:
            raise Interrupted(stop.signal_number, self.stats.stored, stop.problem) from stop.problem
        self.reporter.progress(self.stats)
        return self.stats

    async def _sample(self, make_crew: CrewFactory, plan: Plan, owed: Owed) -> None:
        with Stop(() if self.slot.remote is None else (self.slot.remote.give_up,)) as stop:
            self.reporter.phase(preparing(self.preflight.config))
            crew = await stop.guard(asyncio.to_thread(make_crew, self.preflight))
            try:
                await self._make(crew, plan, owed, stop)
            finally:
                crew.close()

    async def _make(self, crew: Crew, plan: Plan, owed: Owed, stop: Stop) -> None:
        check_engine(self.preflight, crew)
        self._note_crew(crew)
        await stop.guard(crew.start())
        manifest = await stop.in_thread(partial(self._establish, crew, plan))
        self.reporter.started(self.place, self.preflight, manifest, self.stats)
        await stop.guard(crew.make(self._job(manifest, owed)))

    def _establish(self, crew: Crew, plan: Plan) -> Manifest:
        """Plan and manifest of this run, or of another part of it that was here first.

        In a thread, so that the loop sees signals: others may be in the start section for long.
        """
        directory = self.slot.directory
        with self.slot.section(is_stopping):
            if self.slot.part != WHOLE and inspect_directory(directory) is Holds.RUN:
                self.preflight = continue_run(self.preflight, directory)  # again: it may have changed meanwhile
                check_engine(self.preflight, crew)
            for retry in self.new_retry:
                self.preflight = plan_retry(self.preflight, directory, retry, self.longer)
            manifest = establish(self.preflight, crew, self.slot)
            plan.path = directory / PLAN_FILE  # where it was moved to
            record_tombstones(plan, self.slot)
        return manifest

    def _job(self, manifest: Manifest, owed: Owed) -> Job:
        max_failures = self.preflight.config.max_failures
        if max_failures is None:
            max_failures = max(MIN_FAILURES, self.stats.owed // 100)
        return Job(
            slot=self.slot,
            preflight=self.preflight,
            manifest=manifest,
            owed=owed,
            failures=FailureLog(self.slot.directory, self.slot.writer),
            discretion=self.discretion,
            stats=self.stats,
            reporter=self.reporter,
            max_failures=max_failures,
        )

    def _note_summary(self) -> None:
        summary = self.preflight.summary
        if self.preflight.config.model is None and not self.preflight.config.server:
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

    def _note_crew(self, crew: Crew) -> None:
        summary = self.preflight.summary
        cost = native_cost(summary.smallest_top_k, summary.largest_top_k) if crew.capture == "native" else None
        for note in (*crew.notes, cost):
            if note:
                self.reporter.note(note)

    def _recover(self, plan: Plan) -> Owed:
        """What earlier attempts have left to do, and what a new retry adds to it."""
        stored, retries, done = self.preflight.stored, [], np.zeros(plan.samples, np.bool_)
        if stored is not None:
            retries = [*read_retries(self.slot.directory, stored)]
            planned = PlannedKeys(plan.offsets, plan.prompt_ids, Planned(plan, retries).problem, retries)
            apart = sibling_names(self.slot.part)
            with self.slot.section() if has_strangers(self.slot, apart) else nullcontext():
                recovery = recover(self.slot, stored.config_digest, planned, apart=apart)
            done = np.concatenate([recovery.done, *recovery.retried])
            for finding in recovery.findings:
                self.reporter.note(finding)
        if self.longer:
            self.new_retry = self._select(self.longer)
            retries += self.new_retry
            done = np.concatenate([done, *(np.zeros(len(retry), np.bool_) for retry in self.new_retry)])
        ours = in_part(self.slot.part, plan, retries)
        self.stats.planned = int(ours.sum())
        self.stats.tombstones = int((ours[: plan.samples] & np.repeat(plan.tombstone, plan.n)).sum())
        self.stats.stored_before = int((done & ours).sum())
        return Owed(plan, retries, done | ~ours)

    def _select(self, max_tokens: int) -> list[RetryList]:
        with self.slot.present(OUTCOME_COLUMNS):
            selection = select(self.slot.directory, self.preflight, max_tokens)
        self.reporter.note(describe(selection, max_tokens))
        return [selection.retries] if len(selection.retries) else []

    def _nothing_owed(self, plan: Plan) -> RunStats:
        directory = self.slot.directory
        with self.slot.section():
            if inspect_directory(directory) is Holds.RUN:  # else this part has no prompts, and is the first to look
                if self.slot.part != WHOLE:
                    self.preflight = continue_run(self.preflight, directory)
                establish_plan(self.preflight, directory)
                plan.path = directory / PLAN_FILE
                record_tombstones(plan, self.slot)
            else:
                plan.path.unlink()
        whose = "" if self.slot.part == WHOLE else f" of part {self.slot.part}"
        self.reporter.note(f"nothing is owed: every planned sample{whose} is stored")
        return self.stats
