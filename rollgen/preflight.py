"""Everything that can be known before a model loads: may this run start, with which prompts, continuing what.

Cheap checks come first. Nothing in an existing run is changed until all of them have passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from rollgen import __version__
from rollgen.config import EMBEDDED_MODEL, RunConfig, digest, field_key
from rollgen.directory import Holds, clean_directory, inspect_directory
from rollgen.engines.base import Capture
from rollgen.engines.replay import check_replayable, check_untruncated, identity_engine_args
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
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
from rollgen.prompts.sources import PromptInput

_REPLACED_KEYS = frozenset("model revision tokenizer chat_template dtype max_model_len capture engine_arg".split())
"""Identity fields of RunConfig that the identity records by content instead of by name."""


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
    known_prompts: int = 0
    """Prompts that its plan has already."""
    known_samples: int = 0
    """Samples that its plan has already."""

    @property
    def capture_wanted(self) -> Literal["auto", "native", "logprobs", "none"]:
        """What the engine is asked for. A continued run keeps the capture it began with."""
        if self.stored is not None and self.config.capture == "auto":
            return self.stored.capture
        return "none" if self.summary.truncated == 0 else self.config.capture


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
    replayable = check_replayable(config)
    model = load_model_info(config, resolve_model(config))
    planned_at = datetime.now(UTC).replace(microsecond=0) if continued is None else _created_at(continued)
    summary = write_plan(files, config, model, plan_path, now=planned_at, progress=progress)
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
    if stored.identity.get(PLANLESS) is not None:
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
    return replace(preflight, stored=stored, known_prompts=stored_plan.prompts, known_samples=stored_plan.samples)


def check_engine(preflight: Preflight, engine: SampledBy) -> None:
    """A continued run must be sampled in the dtype it began with. Raises ResumeRefused."""
    dtype = engine.dtype if preflight.stored is None else preflight.stored.model.dtype
    if dtype != engine.dtype:
        raise ResumeRefused(f"this run was sampled in {dtype}, here dtype is {engine.dtype}; pass --dtype {dtype}")


def establish(preflight: Preflight, engine: SampledBy, slot: WriterSlot) -> Manifest:
    """Make plan, tokenizer and manifest of this run the directory's, in this order: the manifest says it is there.

    Where other writers may be starting, the caller holds the start section. Raises ResumeRefused when the plan of
    writers that are alive would change.
    """
    directory, config, model = slot.directory, preflight.config, preflight.model
    if preflight.stored is None:
        clean_directory(directory)  # of a run that is replaced, or of what one left that never got to start
    elif preflight.summary.samples > preflight.known_samples and (others := slot.others()):
        raise ResumeRefused(
            f"{directory}: the plan cannot grow from {preflight.known_samples} to {preflight.summary.samples} samples "
            f"while writer {next(iter(others))!r} works on it; wait for it, or stop it"
        )
    plan_sha256 = _install_plan(preflight, directory)
    attempt = _attempt(config, engine, preflight.summary.sources)
    if preflight.stored is not None:
        return _add_attempt(directory, preflight.stored.model_copy(update={"plan_sha256": plan_sha256}), attempt)
    identity = identity_of(config, model, capture=engine.capture, dtype=engine.dtype)
    manifest = _new_manifest(config, model, engine, identity, preflight.planned_at, attempt)
    return _create(directory, model, manifest.model_copy(update={"plan_sha256": plan_sha256}))


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
        clean_directory(directory)
        now = datetime.now(UTC).replace(microsecond=0)
        return _create(directory, model, _new_manifest(config, model, engine, identity, now, attempt))
    stored = read_manifest(directory)
    if PLANLESS not in stored.identity:
        raise ResumeRefused(f"{directory}: has a plan; give the prompts that it was planned with")
    check_identity(stored, identity)
    return _add_attempt(directory, stored, attempt)


def record_tombstones(plan: Plan, known_prompts: int, failures: FailureLog) -> None:
    """A failure line for each skipped input row from number `known_prompts` on: those before have theirs already."""
    for prompt in plan.rows(known_prompts) if plan.tombstone[known_prompts:].any() else ():
        if prompt.error is not None:
            failures.record(prompt.prompt_id, prompt.prompt_index, 0, "input", prompt.error)


def _install_plan(preflight: Preflight, directory: Path) -> str:
    """Give the plan its final name. Returns its SHA-256, which the manifest is to hold."""
    sha256 = file_sha256(preflight.plan_path)
    os.replace(preflight.plan_path, directory / PLAN_FILE)
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
    )


def _attempt(config: RunConfig, engine: SampledBy, sources: Sequence[PromptSource]) -> Attempt:
    values = config.model_dump(mode="json")
    return Attempt(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        rollgen_version=__version__,
        n=config.n,
        limit=config.limit,
        prompts=list(sources),
        operational={name: value for name, value in values.items() if field_key(name).kind == "operational"},
        engine=engine.record,
    )
