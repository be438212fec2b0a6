"""Everything that can be known before a model loads: may this run start, with which prompts, continuing what.

Cheap checks come first. Nothing in an existing run is changed until all of them have passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rollgen import __version__
from rollgen.config import EMBEDDED_MODEL, RunConfig, digest, field_key, flag
from rollgen.directory import Holds, clean_directory, inspect_directory
from rollgen.engines.address import read_api_key, redacted
from rollgen.engines.base import Capture, Extras
from rollgen.engines.replay import check_replayable, check_untruncated, identity_engine_args
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog, skipped_prompts
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import (
    PLANLESS,
    Attempt,
    EngineRecord,
    Manifest,
    ModelRecord,
    PromptSource,
    check_identity,
    create_manifest,
    fsync_directory,
    read_manifest,
    replace_manifest,
)
from rollgen.format.schema import MANIFEST_FILE, PLAN_FILE, TOKENIZER_DIR
from rollgen.inert import Discretion
from rollgen.prompts.model import ModelInfo, load_model_info
from rollgen.prompts.plan import Plan, check_growth
from rollgen.prompts.planner import PlanSummary, write_plan
from rollgen.prompts.sources import PromptFiles, PromptInput

_REPLACED_KEYS = frozenset("model revision tokenizer chat_template dtype max_model_len capture engine_arg".split())
"""Identity fields of RunConfig that the identity records by content instead of by name."""


_ENGINE_SETTINGS = (
    "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel gpu_memory_utilization "
    "enforce_eager engine_arg replicas ray gpus_per_replica"
).split()
"""Fields of RunConfig that say nothing to a server."""


class SampledBy(Protocol):
    """What the manifest says of whatever samples: an `engines.base.Engine`, or the user's own loop."""

    @property
    def record(self) -> EngineRecord:
        """Name, version, device."""
        ...

    @property
    def capture(self) -> Capture:
        """How supports are read."""
        ...

    @property
    def dtype(self) -> str:
        """Of weights and activations, resolved: never `auto`."""
        ...

    @property
    def extras(self) -> Extras:
        """What else it returns with every sample: a new dataset stores all of it."""
        ...


@dataclass(frozen=True, slots=True)
class Preflight:
    """A run that may start."""

    config: RunConfig
    model: ModelInfo
    replayable: bool
    plan_path: Path
    """A temporary file in the output directory, or wherever a dry run asked for it."""
    summary: PlanSummary
    planned_at: datetime
    """When the run was planned first; UTC."""
    stored: Manifest | None = None
    """The manifest of the run that is continued."""
    known_samples: int = 0
    """Samples that its plan has already."""

    @property
    def capture_wanted(self) -> Literal["auto", "native", "logprobs", "none"]:
        """What the engine is asked for. A continued run keeps the capture it began with."""
        if self.stored is not None and self.config.capture == "auto":
            return self.stored.capture
        return "none" if self.summary.truncated == 0 else self.config.capture

    @property
    def stores_weight_versions(self) -> bool:
        """Whether the run that is continued does: an engine that has them hands them over then."""
        return self.stored is not None and self.stored.weight_versions


def discretion_of(config: RunConfig, out: Path, files: Iterable[PromptInput] = ()) -> Discretion:
    """What a run may tell in the files of its dataset: not where the dataset, its inputs and the model lie."""
    named = [config.model, config.tokenizer, config.chat_template]
    inputs = [*(path for path in named if path), *(file for file in files if not isinstance(file, Mapping))]
    return Discretion([out, out.parent, *(Path(path).expanduser().parent for path in inputs)])


def resolve_model(config: RunConfig) -> str:
    """The model to load: as configured, else the embedded demo model. Raises UsageError when there is neither."""
    if config.model is not None:
        return config.model
    if EMBEDDED_MODEL.is_dir():
        return str(EMBEDDED_MODEL)
    raise UsageError("no model: name one with --model (or ROLLGEN_MODEL), or make the embedded one with `make model`")


def find_model(config: RunConfig) -> ModelInfo:
    """The model of a run: as configured, or what its servers serve. Raises UsageError, and EngineError of a server."""
    if not config.server:
        return load_model_info(config, resolve_model(config))
    _check_server_settings(config)
    with extra_needed("http"):
        from rollgen.engines.server import describe
    served = describe(config.server, read_api_key(config.api_key_env))
    if config.model is None and served.root.startswith("/") and not Path(served.root).is_dir():
        raise UsageError(
            f"--server: serves {served.root}, a directory that is not on this machine; say with --model where its "
            "config.json and tokenizer are to be had here: a directory or a Hugging Face id (weights are not read)"
        )
    return load_model_info(config, config.model or served.root, served)


@contextmanager
def extra_needed(extra: str) -> Iterator[None]:
    """Turn the lack of a package into a UsageError that names the extra of rollgen which has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install -e '.[{extra}]' in the clone of rollgen"
        ) from error


def _check_server_settings(config: RunConfig) -> None:
    """Raise UsageError for settings of an engine: a server has been started with its own."""
    fields = type(config).model_fields
    wrong = [flag(name) for name in _ENGINE_SETTINGS if getattr(config, name) != fields[name].default]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)}: for engines that rollgen starts, not for a --server, which was started with its own"
        )


def plan_run(
    files: Sequence[PromptInput],
    config: RunConfig,
    plan_path: Path,
    *,
    continued: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Preflight:
    """Check settings and every prompt, and write the plan to `plan_path`. Touches nothing else.

    `continued` is the directory of the run that this one continues. Raises UsageError, and ResumeRefused when it would
    not continue that run.
    """
    if continued is not None:
        _refuse_merged(read_manifest(continued), continued)
    replayable = check_replayable(config)
    with PromptFiles(files, config.limit) as lines:  # a name that is wrong is told before a model is fetched
        model = find_model(config)
        planned_at = datetime.now(UTC).replace(microsecond=0) if continued is None else _created_at(continued)
        summary = write_plan(lines, config, model, plan_path, now=planned_at, progress=progress)
    if summary.untruncated:
        check_untruncated(config)
    if summary.tombstones == summary.prompts:
        raise UsageError(f"no usable prompt: every row was skipped, the first for: {summary.problems[0]}")
    preflight = Preflight(config, model, replayable, plan_path, summary, planned_at)
    return preflight if continued is None else continue_run(preflight, continued)


def _created_at(directory: Path) -> datetime:
    try:
        return datetime.fromisoformat(read_manifest(directory).created_at)
    except ValueError:
        raise DatasetError(f"{directory / MANIFEST_FILE}: created_at is not an ISO 8601 time") from None


def identity_of(config: RunConfig, model: ModelInfo, *, capture: str, dtype: str) -> dict[str, Any]:
    """Every key that decides the data, by content: paths may move, a checkpoint may not change."""
    values = config.model_dump(mode="json")
    kept = {
        name: value
        for name, value in values.items()
        if field_key(name).kind == "identity" and name not in _REPLACED_KEYS
    }
    return kept | {
        "model_fingerprint": model.fingerprint,
        "tokenizer_sha256": model.tokenizer_sha256,
        "chat_template_sha256": model.chat_template_sha256,
        "max_model_len": model.context_length,
        "dtype": dtype,
        "capture": capture,
        "engine_arg": identity_engine_args(config.engine_arg),
    }


def continue_run(preflight: Preflight, directory: Path) -> Preflight:
    """The preflight of a command that continues the run in `directory`. Raises ResumeRefused when it would not."""
    stored = read_manifest(directory)
    if stored.is_planless:
        raise ResumeRefused(f"{directory}: has no plan: its prompts came one by one; open it without prompts")
    wanted = preflight.capture_wanted
    capture = stored.capture if wanted == "auto" and stored.capture != "none" else wanted
    dtype = stored.model.dtype if preflight.config.dtype == "auto" else preflight.model.dtype
    check_identity(stored, identity_of(preflight.config, preflight.model, capture=capture, dtype=dtype))
    plan = Plan(preflight.plan_path)
    if file_sha256(preflight.plan_path) == stored.plan_sha256:  # made again, even if the one on disk is lost or damaged
        stored_plan = plan
    else:
        stored_plan = Plan(directory / PLAN_FILE)
        check_growth(stored_plan, plan)
    return replace(preflight, stored=stored, known_samples=stored_plan.samples)


def _refuse_merged(stored: Manifest, directory: Path) -> None:
    """Raise ResumeRefused for a merged dataset: what it lacks, its runs owe."""
    if stored.runs:
        raise ResumeRefused(
            f"{directory}: was merged from {len(stored.runs)} runs, and owes nothing; continue these, and merge again"
        )


def check_engine(preflight: Preflight, engine: SampledBy) -> None:
    """A continued run is sampled in its dtype, with its capture, and with all that it stores. Raises ResumeRefused."""
    stored = preflight.stored
    if stored is None:
        return
    if stored.model.dtype != engine.dtype:
        raise ResumeRefused(
            f"this run was sampled in {stored.model.dtype}, here dtype is {engine.dtype}; pass --dtype "
            f"{stored.model.dtype}"
        )
    if stored.capture != engine.capture:  # of two that began together with --capture auto, the other was first
        raise ResumeRefused(
            f"the masks of this run are captured as {stored.capture!r}, and the engine here gives {engine.capture!r}; "
            f"pass --capture {stored.capture} to all of them, or give them engines that can do the same"
        )
    _check_extras(stored, engine)


def _check_extras(stored: Manifest, engine: SampledBy) -> None:
    """What an engine returns beyond what is stored is left out."""
    if missing := Extras.of(stored).missing(engine.extras):
        raise ResumeRefused(
            f"this dataset stores {missing}, which the engine here does not return; continue it with one that does"
        )


def establish(preflight: Preflight, engine: SampledBy, slot: WriterSlot) -> Manifest:
    """Make plan, tokenizer and manifest of this run the directory's, in this order: the manifest says it is there.

    Where other writers may be starting, the caller holds the start section. Raises ResumeRefused when the plan of
    writers that are alive would change.
    """
    directory, config, model = slot.directory, preflight.config, preflight.model
    if preflight.stored is None:
        _clean(slot)  # of a run that is replaced, or of what one left that never got to start
    elif preflight.summary.samples > preflight.known_samples:
        _refuse_growth_beside_others(preflight, slot)
    plan_sha256 = _install_plan(preflight, directory)
    attempt = _attempt(config, engine, preflight.summary.sources)
    if preflight.stored is not None:
        return _add_attempt(directory, preflight.stored.model_copy(update={"plan_sha256": plan_sha256}), attempt)
    identity = identity_of(config, model, capture=engine.capture, dtype=engine.dtype)
    manifest = _new_manifest(config, model, engine, identity, preflight.planned_at, attempt)
    return _create(directory, model, manifest.model_copy(update={"plan_sha256": plan_sha256}))


def _clean(slot: WriterSlot) -> None:
    clean_directory(slot.directory)
    if slot.remote is not None:
        slot.remote.clear()


def _refuse_growth_beside_others(preflight: Preflight, slot: WriterSlot) -> None:
    """Those who have this very plan too, or none yet, will look at it again before they make anything."""
    plan_sha256 = file_sha256(preflight.plan_path)
    for writer, other in slot.others().items():
        if other.plan_sha256 not in (plan_sha256, None):
            raise ResumeRefused(
                f"{slot.directory}: the plan cannot grow from {preflight.known_samples} to "
                f"{preflight.summary.samples} samples while writer {writer!r} works on it; wait for it, or stop it"
            )


def establish_plan(preflight: Preflight, directory: Path) -> None:
    """Make the plan the directory's, where nothing is owed: it may have grown by rows that were skipped."""
    assert preflight.stored is not None
    plan_sha256 = _install_plan(preflight, directory)
    if plan_sha256 != preflight.stored.plan_sha256:
        replace_manifest(directory, preflight.stored.model_copy(update={"plan_sha256": plan_sha256}))


def establish_planless(config: RunConfig, model: ModelInfo, engine: SampledBy, slot: WriterSlot) -> Manifest:
    """Begin or continue a dataset whose prompts come one by one, so that nothing is owed. In the start section.

    Raises ResumeRefused when the directory holds a dataset of other settings, or one with a plan.
    """
    directory = slot.directory
    identity = identity_of(config, model, capture=engine.capture, dtype=engine.dtype) | {PLANLESS: True}
    attempt = _attempt(config, engine, ())
    if inspect_directory(directory) is not Holds.RUN:
        _clean(slot)
        now = datetime.now(UTC).replace(microsecond=0)
        return _create(directory, model, _new_manifest(config, model, engine, identity, now, attempt))
    stored = read_manifest(directory)
    _refuse_merged(stored, directory)
    if not stored.is_planless:
        raise ResumeRefused(f"{directory}: has a plan; give the prompts that it was planned with")
    check_identity(stored, identity)
    _check_extras(stored, engine)
    return _add_attempt(directory, stored, attempt)


def record_tombstones(plan: Plan, slot: WriterSlot) -> None:
    """A failure line for each skipped input row of the slot's part that has none. In the start section.

    An earlier start may have ended before it had written all of its own.
    """
    skipped = np.flatnonzero(plan.tombstone)
    ours = skipped[skipped % slot.part.of == slot.part.number]
    lacking = set(ours.tolist()) - (skipped_prompts(slot.directory) if ours.size else set())
    if not lacking:
        return
    failures = FailureLog(slot.directory, slot.writer)
    for prompt in plan.rows(min(lacking)):
        if prompt.error is not None and prompt.prompt_index in lacking:
            failures.record(prompt.prompt_id, prompt.prompt_index, 0, "input", prompt.error)


def _install_plan(preflight: Preflight, directory: Path) -> str:
    """Give the plan its final name. Returns its SHA-256, which the manifest is to hold.

    One that is the same stays: a file that has changed is sent to object storage.
    """
    sha256, path = file_sha256(preflight.plan_path), directory / PLAN_FILE
    if path.exists() and file_sha256(path) == sha256:
        preflight.plan_path.unlink()
    else:
        os.replace(preflight.plan_path, path)
        fsync_directory(directory)
    return sha256


def _add_attempt(directory: Path, stored: Manifest, attempt: Attempt) -> Manifest:
    manifest = stored.model_copy(update={"attempts": [*stored.attempts, attempt]})
    replace_manifest(directory, manifest)
    return manifest


def _create(directory: Path, model: ModelInfo, manifest: Manifest) -> Manifest:
    model.save_tokenizer(directory / TOKENIZER_DIR)
    if not create_manifest(directory, manifest):
        raise ResumeRefused(f"{directory}: another rollgen started here at the same time; use --resume")
    return manifest


def _new_manifest(
    config: RunConfig,
    model: ModelInfo,
    engine: SampledBy,
    identity: dict[str, Any],
    created_at: datetime,
    attempt: Attempt,
) -> Manifest:
    return Manifest(
        created_at=created_at.isoformat(),
        config_digest=digest(identity),
        identity=identity,
        capture=engine.capture,
        support_logprobs=config.support_logprobs,
        vocab_size=model.vocab_size,
        tokenizer_vocab_size=model.tokenizer_vocab_size,
        model=ModelRecord(
            name=model.name,
            revision=model.revision,
            fingerprint=model.fingerprint,
            dtype=engine.dtype,
            context_length=model.context_length,
        ),
        tokenizer_sha256=model.tokenizer_sha256,
        attempts=[attempt],
        weight_versions=engine.extras.weight_versions,
        routed_experts=engine.extras.routed_experts,
    )


def public_settings(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON values that may be shown and recorded: URLs of servers without logins."""
    return config.model_dump(mode="json") | {"server": [redacted(url) for url in config.server]}


def _attempt(config: RunConfig, engine: SampledBy, sources: Sequence[PromptSource]) -> Attempt:
    values = public_settings(config)
    return Attempt(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        rollgen_version=__version__,
        n=config.n,
        limit=config.limit,
        prompts=list(sources),
        operational={name: value for name, value in values.items() if field_key(name).kind == "operational"},
        engine=engine.record,
    )
