"""Which rows of a dataset a model can recompute: all, or of a merged one those of the runs that it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollgen.config import canonical_json
from rollgen.errors import UsageError
from rollgen.format.manifest import Manifest, ModelRecord, Run
from rollgen.inert import brief
from rollgen.prompts.fingerprint import directory_fingerprint
from rollgen.prompts.model import resolve_commit

_NAMED = 8
"""Runs that an error names."""


class Sampled(NamedTuple):
    """Rows that were sampled in one way."""

    manifest: Manifest
    """What it says of them: model, settings, engines."""
    runs: tuple[str, ...]
    """Of a merged dataset; empty for any other."""


def sampled_by(manifest: Manifest, model: str, *, flag: str) -> Sampled:
    """The rows to compare with `model`, a local directory or a Hugging Face id.

    Raises UsageError for a model that cannot be had, and of a merged dataset for one that sampled none of its runs, or
    several in different ways. (For any other dataset another checkpoint is allowed, and told.)
    """
    if not manifest.runs:
        return Sampled(manifest, ())
    runs = [run for run in manifest.runs if fingerprint_of(model, run.model, flag=flag) == run.model.fingerprint]
    if not runs:
        raise UsageError(
            f"{flag}: {model} sampled none of the runs of this dataset; it was merged from {_named(manifest.runs)}"
        )
    if len({canonical_json([run.model.dtype, run.identity.get("sampling_arg")]) for run in runs}) > 1:
        raise UsageError(
            f"{flag}: {model} sampled {_named(runs)}, but with different dtypes or sampling arguments; recompute the "
            "datasets that were merged, one by one"
        )
    attempts = [attempt for run in runs for attempt in run.attempts]
    return Sampled(manifest.of_run(runs[0]).model_copy(update={"attempts": attempts}), tuple(run.name for run in runs))


def fingerprint_of(model: str, record: ModelRecord, *, flag: str) -> str:
    """Of a model; by the name in the record it is meant at the revision there."""
    commit = resolve_commit(model, record.revision if model == record.name else None, flag=flag)
    return commit or directory_fingerprint(Path(model))


def _named(runs: Sequence[Run]) -> str:
    first = ", ".join(f"{run.name} ({brief(run.model.name)}, {run.model.dtype})" for run in runs[:_NAMED])
    return first + (f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else "")
