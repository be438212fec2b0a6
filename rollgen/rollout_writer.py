"""`RolloutWriter`: a dataset for teams that have a generation loop of their own.

The loop asks an engine, the writer does the rest: it checks every output, keeps each sample once, and commits by the
same protocol as `rollgen generate`, whose datasets it also continues. Which samples there are is said in one of two
ways:

    prompts=...   planned: the plan, the seeds and what is owed are those of `rollgen generate`
    no prompts    planless: `request()` makes one request after another; nothing is owed

Several processes may write one dataset, each under a `writer` name and with a `part` of the prompts of its own. An
engine's sampling masks are read natively unless `capture="logprobs"`; `capture="auto"` of a new dataset means native.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from rollgen.arguments import check_texts
from rollgen.config import RunConfig, as_config
from rollgen.directory import Holds, check_start, inspect_directory, remove_frame
from rollgen.engines.base import Capture, Extras, SampleRequest
from rollgen.engines.installed import installed_engine
from rollgen.engines.outputs import SampledOutput, completion_of, read_outputs
from rollgen.engines.replay import check_replayable, check_untruncated
from rollgen.errors import CaptureError, ResumeRefused, UsageError
from rollgen.format.commit import Part, WriterSlot, check_writer_name, start_section
from rollgen.format.done import PlannedKeys
from rollgen.format.failures import FailureLog, Stage
from rollgen.format.invariants import find_problem
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import EngineRecord, Manifest, RoutedExperts, read_manifest
from rollgen.format.recovery import recover, recover_shards
from rollgen.format.retries import read_retries
from rollgen.format.schema import MAX_EXPERTS, PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.inert import LINE, brief
from rollgen.ledger import Ledger, OpenLedger, PlannedLedger
from rollgen.loop.sampling import record_failure
from rollgen.preflight import (
    Preflight,
    check_engine,
    continue_run,
    discretion_of,
    establish,
    establish_planless,
    plan_run,
    record_tombstones,
    resolve_model,
)
from rollgen.prompts.model import ModelInfo, load_model_info
from rollgen.prompts.parameters import Parameters, run_parameters
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import Planned
from rollgen.prompts.single import check_sample, single_prompt
from rollgen.prompts.sources import PromptInput
from rollgen.remote.objects import is_url
from rollgen.rollouts import Completion

Prompts: TypeAlias = PromptInput | Iterable[PromptInput]
"""A path, a pattern or `-`, a row as a mapping, or several of these."""

_LOG = logging.getLogger("rollgen")


def prompt_inputs(prompts: Prompts) -> list[PromptInput]:
    """One or several inputs as a list. Raises UsageError for anything else."""
    if isinstance(prompts, str | Path | Mapping):
        return [prompts]
    inputs = list(prompts) if isinstance(prompts, Iterable) else [prompts]
    if wrong := [one for one in inputs if not isinstance(one, str | Path | Mapping)]:
        raise UsageError(f"prompts: {wrong[0]!r} is neither a path nor a row; give paths or mappings")
    return inputs


class RolloutWriter:
    """Writes what a generation loop samples as a dataset. Use as a context manager; any thread may call its methods.

    `config` is a RunConfig, or its fields are given as `settings`: model and sampling say what the dataset is.
    `prompts` is as in `rollgen.generate`. `part` is (i, N): this writer makes the prompts whose number is i modulo N.
    `engine` is the name of an installed package, or an EngineRecord that says more. `weight_versions` and
    `routed_experts`, (layers, experts a token takes in each, experts of a layer), say that outputs have these and that
    they are stored. A directory that holds a dataset is continued, with what that stores: a sample is stored once,
    whatever was interrupted.

    Leaving the block commits everything, also when it is left by an exception; the last writer to leave then refreshes
    the dataset card. Raises UsageError for settings and prompts that are wrong, ResumeRefused when the directory holds
    another dataset, one that stores other things or a live writer that this one does not go with, and DatasetError for
    damage.
    """

    def __init__(
        self,
        directory: str | Path,
        config: RunConfig | None = None,
        *,
        prompts: Prompts | None = None,
        writer: str = "w0",
        part: tuple[int, int] = (0, 1),
        engine: str | EngineRecord = "vllm",
        weight_versions: bool = False,
        routed_experts: tuple[int, int, int] | None = None,
        **settings: Any,
    ) -> None:
        if is_url(directory):
            raise UsageError(f"{directory}: RolloutWriter writes into directories; copy the finished dataset there")
        self.directory = Path(directory)
        self._config = as_config(config, settings)
        check_texts(writer=writer)
        check_writer_name(writer)
        if not isinstance(engine, EngineRecord):
            check_texts(engine=engine)
        record = engine if isinstance(engine, EngineRecord) else installed_engine(engine)
        sampler = _Sampler(record, Extras(weight_versions, _checked_experts(routed_experts)))
        self._slot = WriterSlot(self.directory, writer, _checked_part(part))
        self._lock = threading.Lock()
        check_start(self.directory, inspect_directory(self.directory), resume=True, clean=False)
        created = not self.directory.exists()
        with ExitStack() as resources:
            resources.enter_context(self._slot)
            with ExitStack() as on_error:
                if created:
                    on_error.callback(remove_frame, self._slot)
                self._opened = _open(self._slot, self._config, sampler, prompts)
                on_error.pop_all()
            self._writer = resources.enter_context(
                ShardWriter(self._slot, self.manifest, commit_interval=self._config.commit_interval)
            )
            self._failures = FailureLog(self.directory, writer)
            self._discretion = discretion_of(self._config, self.directory)
            self._resources = resources.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def manifest(self) -> Manifest:
        """What the dataset is: `manifest.capture` says how supports are read."""
        return self._opened.manifest

    def owed(self) -> Iterator[SampleRequest]:
        """The samples of this writer's part that are not stored yet, in plan order. Asked again, what is left then."""
        if not isinstance(self._opened.ledger, PlannedLedger):
            raise UsageError("owed: nothing is owed without a plan; give prompts, or make requests with request()")
        return _Locked(self._opened.ledger.owed(), self._lock)

    def owns(self, prompt_id: str) -> bool:
        """Whether a prompt is of this writer's part, in a dataset without a plan."""
        return self._open_ledger("owns").owns(prompt_id)

    def is_stored(self, prompt_id: str, sample_index: int = 0) -> bool:
        """Whether a sample is stored or waits for its commit, in a dataset without a plan."""
        with self._lock:
            return self._open_ledger("is_stored").is_stored(prompt_id, sample_index)

    def request(
        self,
        prompt_id: str,
        prompt_token_ids: Sequence[int],
        sample_index: int = 0,
        *,
        seed: int | None = None,
        prompt: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> SampleRequest:
        """One sample to make, in a dataset without a plan. Raises UsageError for what a prompt file could not hold.

        `sampling` overrides the dataset's settings; max_tokens is clamped to the context. `seed` is what the engine
        gets, by default the hash that a plan would give. The rows' prompt_index is 63 bits of a hash of the id, the
        same in every process.
        """
        ledger = self._open_ledger("request")
        sample_index = check_sample(sample_index, seed)
        opened = self._opened
        made = single_prompt(
            opened.run,
            opened.model,
            prompt_id=prompt_id,
            token_ids=prompt_token_ids,
            prompt=prompt,
            metadata=metadata,
            sampling=sampling,
        )
        if not made.sampling.truncates:
            check_untruncated(self._config)
        elif self.manifest.capture == "none":
            raise UsageError(f"prompt {prompt_id!r} truncates, but this dataset began without top_k, top_p and min_p")
        request = SampleRequest(made, sample_index, given_seed=seed)
        with self._lock:
            ledger.check(request)
        return request

    def add(self, request: SampleRequest, output: object) -> None:
        """Store an engine's output for a request: any shape that `engines/shapes.py` lists.

        Durable after the next commit, which is by time or size; see `flush`. Without a plan, an output may have several
        sequences: the one of index j becomes sample_index + j, with the seed that vLLM gave it, seed + j. (A planned
        sample has the seed of the plan, which a retry relies on: ask for one at a time.)

        Raises IncompleteSupport when the engine must be asked again with more logprobs, CaptureError when a completion
        is not exact or not finished (both become lines of failures/), UnfitEngine when the engine does not return what
        the capture needs, and UsageError for a sample that is not to be stored. Of that output nothing is stored then.
        Raises DatasetError when a commit fails, on a full disk for instance: then everything is kept, this output too,
        and committed later.
        """
        with self._lock:
            self._check_open()
            self._opened.ledger.check(request)
            try:
                completions = self._completions(request, output)
            except CaptureError as error:
                self._record(request, "capture", str(error))
                raise
            for one, completion in completions:
                if problem := find_problem(completion, self.manifest.vocab_size):
                    self._record(one, "invariant", problem)
                    raise CaptureError(f"({completion.prompt_id}, {completion.sample_index}): {problem}")
            decode = self._opened.model.decode
            for one, completion in completions:
                self._writer.add(replace(completion, text=decode(completion.token_ids)))
                if self._opened.ledger.settle(one):
                    self._writer.close_group(completion.prompt_index)
            self._writer.tick()

    def fail(self, request: SampleRequest, error: BaseException | str) -> None:
        """Record that the engine failed this request. It stays owed, and may still be added."""
        with self._lock:
            self._check_open()
            self._record(request, "engine", " ".join(str(error).split()) or type(error).__name__)

    def flush(self) -> None:
        """Commit everything added so far; durable on return."""
        with self._lock:
            self._check_open()
            self._writer.flush()

    def close(self) -> None:
        """Commit everything and leave. May be called again."""
        with self._lock:
            if self._slot.held:
                from rollgen.inspect.card import refresh_card  # polars: not before somebody needs it

                self._resources.close()
                refresh_card(self.directory)

    def _record(self, request: SampleRequest, stage: Stage, error: str) -> None:
        record_failure(self._failures, self._discretion, request, stage, error)

    def _completions(self, request: SampleRequest, output: object) -> list[tuple[SampleRequest, Completion]]:
        """Each sequence with its request. Raises CaptureError and UsageError."""
        sampled = read_outputs(
            output,
            truncates=request.prompt.sampling.truncates,
            vocab_size=self.manifest.vocab_size,
            capture=self.manifest.capture,
            sampling=request.prompt.sampling,
        )
        if len(sampled) == 1:
            return [(request, self._completion(request, sampled[0]))]
        self._open_ledger(f"add: an output of {len(sampled)} sequences")
        several = [
            replace(request, sample_index=request.sample_index + each.index, given_seed=request.seed + each.index)
            for each in sampled
        ]
        for one in several:
            check_sample(one.sample_index, one.seed)
            self._opened.ledger.check(one)
        return [(one, self._completion(one, each)) for one, each in zip(several, sampled, strict=True)]

    def _completion(self, request: SampleRequest, sampled: SampledOutput) -> Completion:
        opened = self._opened
        return completion_of(
            request,
            sampled,
            replayable=opened.replayable,
            support_logprobs=self.manifest.support_logprobs,
            text=None,  # not before the ids are known to be the vocabulary's
            extras=Extras.of(self.manifest),
        )

    def _open_ledger(self, method: str) -> OpenLedger:
        if not isinstance(self._opened.ledger, OpenLedger):
            raise UsageError(f"{method}: this dataset has a plan; take requests from owed(), one sample each")
        return self._opened.ledger

    def _check_open(self) -> None:
        if not self._slot.held:
            raise UsageError(f"{self.directory}: this writer is closed; open another one")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A dataset that may be written to."""

    manifest: Manifest
    model: ModelInfo
    run: Parameters
    """The dataset's own sampling."""
    replayable: bool
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class _Loop:
    """`preflight.SampledBy` for a loop that is not ours."""

    record: EngineRecord
    capture: Capture
    dtype: str
    extras: Extras


class _Sampler(NamedTuple):
    """What a loop says of its engine."""

    record: EngineRecord
    extras: Extras


class _Locked(Iterator[SampleRequest]):
    """An iterator that several threads may share."""

    def __init__(self, requests: Iterator[SampleRequest], lock: threading.Lock) -> None:
        self._requests = requests
        self._lock = lock

    def __next__(self) -> SampleRequest:
        with self._lock:
            return next(self._requests)


def _checked_part(part: tuple[int, int]) -> Part:
    try:
        number, of = map(index, part)
    except (TypeError, ValueError):
        raise UsageError(f"part: {part!r} is not a pair of whole numbers; give (i, N) with i from 0 to N - 1") from None
    if not 0 <= number < of:
        raise UsageError(f"part: ({number}, {of}) is none of {of} parts; give (i, N) with i from 0 to N - 1")
    return Part(number, of)


def _checked_experts(routed_experts: tuple[int, int, int] | None) -> RoutedExperts | None:
    if routed_experts is None:
        return None
    try:
        layers, top_k, experts = map(index, routed_experts)
        return RoutedExperts(layers=layers, top_k=top_k, experts=experts)
    except (TypeError, ValueError):
        raise UsageError(
            f"routed_experts: {routed_experts!r} is not (layers, experts a token takes, experts of a layer, which are "
            f"{MAX_EXPERTS} at most)"
        ) from None


def _open(slot: WriterSlot, config: RunConfig, sampler: _Sampler, prompts: Prompts | None) -> _Opened:
    """Begin the dataset or continue it. Raises as `RolloutWriter` says."""
    opened = _open_planless(slot, config, sampler) if prompts is None else _open_planned(slot, config, sampler, prompts)
    if unwanted := sampler.extras.missing(Extras.of(opened.manifest)):
        raise ResumeRefused(f"{slot.directory}: stores no {unwanted}: it began without; write to another directory")
    return opened


def _open_planned(slot: WriterSlot, config: RunConfig, sampler: _Sampler, prompts: Prompts) -> _Opened:
    """The first writer plans while all others wait; those plan for themselves, to compare, at the same time."""
    directory, plan_path = slot.directory, slot.directory / f".tmp-{slot.writer}-plan.parquet"
    inputs = prompt_inputs(prompts)
    with ExitStack() as on_exit:
        on_exit.callback(plan_path.unlink, missing_ok=True)  # established, it has its final name
        with start_section(directory):
            if _begins(directory):
                preflight = plan_run(inputs, config, plan_path)
                slot.declare(file_sha256(plan_path))
                return _planned(slot, preflight, establish(preflight, _loop(preflight, sampler), slot))
        preflight = plan_run(inputs, config, plan_path, continued=directory)
        with start_section(directory):
            preflight = continue_run(preflight, directory)  # again: it may have changed meanwhile
            loop = _loop(preflight, sampler)
            check_engine(preflight, loop)
            slot.declare(file_sha256(plan_path))
            return _planned(slot, preflight, establish(preflight, loop, slot))


def _begins(directory: Path) -> bool:
    """Whether there is no dataset yet. Raises UsageError where none can be."""
    holds = inspect_directory(directory)
    check_start(directory, holds, resume=True, clean=False)
    return holds is not Holds.RUN


def _loop(preflight: Preflight, sampler: _Sampler) -> _Loop:
    """Capture and dtype: as continued, else as configured, else native masks and the checkpoint's dtype."""
    wanted, stored = preflight.capture_wanted, preflight.stored
    of_stored = stored is not None and preflight.config.dtype == "auto"
    dtype = stored.model.dtype if stored is not None and of_stored else preflight.model.dtype
    return _Loop(sampler.record, "native" if wanted == "auto" else wanted, dtype, sampler.extras)


def _planned(slot: WriterSlot, preflight: Preflight, manifest: Manifest) -> _Opened:
    plan = Plan(slot.directory / PLAN_FILE)
    retries = read_retries(slot.directory, manifest)
    planned = PlannedKeys(plan.offsets, plan.prompt_ids, Planned(plan, retries).problem, retries)
    recovery = recover(slot, manifest.config_digest, planned)
    _log(recovery.findings)
    record_tombstones(plan, slot)
    return _Opened(
        manifest,
        preflight.model,
        run_parameters(preflight.config, preflight.model.vocab_size),
        preflight.replayable,
        PlannedLedger(plan, retries, recovery, slot.part),
    )


def _open_planless(slot: WriterSlot, config: RunConfig, sampler: _Sampler) -> _Opened:
    replayable = check_replayable(config)
    model = load_model_info(config, resolve_model(config))
    run = run_parameters(config, model.vocab_size)
    ledger = OpenLedger(slot.part)
    with start_section(slot.directory):
        stored = None if _begins(slot.directory) else read_manifest(slot.directory)
        manifest = establish_planless(config, model, _planless_loop(config, model, run, sampler, stored), slot)
        _log(recover_shards(slot, manifest.config_digest, ledger))
    return _Opened(manifest, model, run, replayable, ledger)


def _planless_loop(
    config: RunConfig, model: ModelInfo, run: Parameters, sampler: _Sampler, stored: Manifest | None
) -> _Loop:
    capture: Capture = "none"
    if config.capture != "auto":
        capture = config.capture
    elif stored is not None:
        capture = stored.capture
    elif run.sampling.truncates:
        capture = "native"
    dtype = model.dtype if stored is None or config.dtype != "auto" else stored.model.dtype
    return _Loop(sampler.record, capture, dtype, sampler.extras)


def _log(findings: tuple[str, ...]) -> None:
    for finding in findings:
        _LOG.warning("%s", brief(finding, LINE))
