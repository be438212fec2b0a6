"""What is verified of merged datasets only: that each run has its samples, and which of them a model can recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rollgen.config import canonical_json
from rollgen.errors import UsageError
from rollgen.format.manifest import Manifest, ModelRecord, Run
from rollgen.inert import brief
from rollgen.prompts.fingerprint import directory_fingerprint
from rollgen.prompts.model import resolve_commit
from rollgen.prompts.planned import Mismatch, check_planless

_NAMED = 8
"""Runs that an error names."""


class StoredRuns:
    """The rows of a dataset without a plan: each checked, and how many there are of each run."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._stored = Counter[str]()

    def check(self, table: pa.Table) -> Iterator[Mismatch]:
        """What is wrong with these rows, which are counted."""
        if self._manifest.runs and "run" in table.column_names:
            counts = pc.value_counts(table["run"])
            self._stored.update(
                dict(zip(*(counts.field(name).to_pylist() for name in ("values", "counts")), strict=True))
            )
        yield from check_planless(table, self._manifest.run_names)

    def lost(self) -> int:
        """Samples that were merged and are not here: nobody owes them, and only the manifest knows of them."""
        return sum(max(0, run.samples - self._stored[run.name]) for run in self._manifest.runs)

    def problems(self) -> Iterator[str]:
        """Runs of which there are more than were merged."""
        for number, run in enumerate(self._manifest.runs):
            if (stored := self._stored[run.name]) > run.samples:
                yield f"runs.{number}.samples is {run.samples}, but {stored} are stored"


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
    first = ", ".join(f"{brief(run.name)} ({brief(run.model.name)}, {run.model.dtype})" for run in runs[:_NAMED])
    return first + (f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else "")
