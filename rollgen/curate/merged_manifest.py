"""The manifest of a merged dataset: for each run all that the run's own said, and of the whole what holds for all.

It has no plan and no attempts, and owes nothing (section 15 of `schema/SPEC.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import numpy as np

from rollgen.config import digest
from rollgen.curate.sources import Source, SourceRows
from rollgen.errors import DatasetError, UsageError
from rollgen.format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ModelRecord,
    RoutedExperts,
    Run,
    manifest_bytes,
    merged_identity,
)
from rollgen.inert import brief

_SHARED: Final = frozenset("format vocab_size tokenizer_vocab_size tokenizer_sha256 page_checksums runs".split())
"""Keys of a source's manifest that a run does not have: they are the merged dataset's too, or say nothing of it."""


def merged_manifest(sources: Sequence[Source], rows: SourceRows, columns: frozenset[str]) -> Manifest:
    """That of these `columns`, the optional ones. Raises DatasetError for a run that has got more samples since."""
    runs = _runs(sources, rows)
    identity = merged_identity(runs)
    first = sources[0].manifest
    return Manifest(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config_digest=digest(identity),
        identity=identity,
        capture=_capture(runs),
        support_logprobs="support_logprobs" in columns,
        vocab_size=first.vocab_size,
        tokenizer_vocab_size=first.tokenizer_vocab_size,
        model=_model([run.model for run in runs]),
        tokenizer_sha256=first.tokenizer_sha256,
        attempts=[],
        weight_versions="weight_versions" in columns,
        routed_experts=_experts(sources) if "routed_experts" in columns else None,
        runs=runs,
    )


def check_size(out: Path, manifest: Manifest) -> None:
    """Raise UsageError for a manifest that no reader would take: each attempt of each run is in it."""
    if (size := len(manifest_bytes(manifest))) > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"--out {out}: the manifest of {len(manifest.runs)} runs would have {size >> 20} MiB; readers take "
            f"{MAX_MANIFEST_BYTES >> 20} MiB: merge fewer of them"
        )


def _runs(sources: Sequence[Source], rows: SourceRows) -> list[Run]:
    samples = np.bincount(rows.run[rows.current], minlength=sum(len(source.runs) for source in sources))
    stored = np.bincount(rows.run, minlength=len(samples))
    runs: list[Run] = []
    for source, owed in zip(sources, rows.owed, strict=True):
        for place, name in enumerate(source.runs):
            number = len(runs)
            if source.manifest.runs:
                runs.append(_again(source, source.manifest.runs[place], name, int(samples[number])))
            else:
                figures = {"name": name, "samples": int(samples[number]), "owed": owed}
                figures |= {"superseded": int(stored[number] - samples[number])}
                runs.append(Run.model_validate(source.manifest.model_dump(exclude=set(_SHARED)) | figures))
    return runs


def _again(source: Source, run: Run, name: str, samples: int) -> Run:
    """A run that was merged before: it keeps its figures, by which what was lost since is still known.

    Raises DatasetError for more samples than were merged.
    """
    if samples > run.samples:
        raise DatasetError(
            f"{source.place}: holds {samples} samples of the run {brief(run.name)!r}, of which {run.samples} were "
            f"merged; see `rollgen verify {source.place}`"
        )
    return run.model_copy(update={"name": name})


def _capture(runs: Sequence[Run]) -> Literal["native", "logprobs", "none"]:
    """Of those that truncate; `logprobs` where some were read from logprobs and some natively."""
    ways = {run.capture for run in runs} - {"none"}
    if not ways:
        return "none"
    return ways.pop() if len(ways) == 1 else "logprobs"


def _model(models: Sequence[ModelRecord]) -> ModelRecord:
    """One record for all; that of the model itself where there is one, but for what its runs set differently."""
    different: dict[str, ModelRecord] = {}
    for model in models:
        different.setdefault(model.fingerprint, model)
    dtypes = {model.dtype for model in models}
    only = models[0] if len(different) == 1 else None
    return ModelRecord(
        name=" + ".join(model.name for model in different.values()),
        revision=only.revision if only else None,
        fingerprint=only.fingerprint if only else digest(list(different)),
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        context_length=max(model.context_length for model in models),
    )


def _experts(sources: Sequence[Source]) -> RoutedExperts:
    """Of sources that all store them, with the same layers and top_k: the largest number of experts bounds them all."""
    stored = [each for source in sources if (each := source.manifest.routed_experts) is not None]
    told = [each.experts for each in stored if each.experts is not None]
    return stored[0].model_copy(update={"experts": max(told) if len(told) == len(stored) else None})
