"""`--retry finish_reason=length --max-tokens N`: samples that were cut are made again, longer, as a new generation.

The rest of the run stays what it is: its own max_tokens, its plan, its rows. So a retry is asked for with the command
that made the run, `--resume`, the condition and a larger `--max-tokens`; asked for twice, it finds nothing more to do.
As everywhere, `--max-tokens` is not for prompts that set a max_tokens of their own: those were cut on purpose. A plan
says how many tokens a prompt may have and not who said so: one that sets the run's own number counts as the run's.
What a retry has begun belongs to what is planned: any later `--resume` finishes it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from rollgen.config import RunConfig
from rollgen.directory import Holds
from rollgen.errors import UsageError
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import Manifest, Retry, fsync_directory, read_manifest, replace_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.retries import Outcomes, RetryList, Selection, read_outcomes, read_retries, select_retries
from rollgen.format.schema import retry_file
from rollgen.preflight import Preflight

CONDITION = "finish_reason=length"
"""The one condition there is: with the same seed, only a later cut can change how a sample ends."""


def check_condition(condition: str) -> None:
    """Raises UsageError for a condition that a retry cannot serve."""
    if condition != CONDITION:
        raise UsageError(
            f"--retry {condition}: only {CONDITION} can be made again: each sample keeps its seed, so that a larger "
            "--max-tokens is what changes its end"
        )


def split_config(config: RunConfig, out: Path, holds: Holds, *, resume: bool) -> tuple[RunConfig, int]:
    """The configuration of the run that is continued, and the max_tokens of its retry. Raises UsageError."""
    if holds is not Holds.RUN or not resume:
        raise UsageError(f"--retry: continues the run in {out}: it needs one, and --resume")
    planned = read_manifest(out).identity.get("max_tokens")
    return config.model_copy(update={"max_tokens": planned}), config.max_tokens


def select(directory: Path, preflight: Preflight, max_tokens: int) -> Selection:
    """Which stored samples were cut and may become longer. Raises DatasetError."""
    dataset = open_dataset(directory)
    context_length = preflight.model.context_length
    return select_retries(
        _of_the_run(read_outcomes(dataset.shards), preflight.config.max_tokens, context_length),
        read_retries(directory, dataset.manifest),
        max_tokens=max_tokens,
        context_length=context_length,
    )


def _of_the_run(outcomes: Outcomes, max_tokens: int, context_length: int) -> Outcomes:
    """The rows without those of prompts that set another max_tokens: the others have the run's, or fill up."""
    usual = np.minimum(max_tokens, context_length - outcomes.prompt_length)
    kept = (outcomes.generation > 0) | (outcomes.max_tokens == usual)
    return Outcomes(*(column[kept] for column in outcomes))


def describe(selection: Selection, max_tokens: int) -> str:
    """What a retry will do, in words."""
    rest = f", {selection.context_full} more fill the context and stay" if selection.context_full else ""
    rest += f", {selection.pending} are still owed to an earlier retry" if selection.pending else ""
    if not len(selection.retries):
        return f"--retry: no stored sample was cut at less than {max_tokens} tokens{rest}"
    return f"--retry: {len(selection.retries)} samples that were cut are made again with {max_tokens} tokens{rest}"


def plan_retry(preflight: Preflight, directory: Path, retries: RetryList, max_tokens: int) -> Preflight:
    """Make the list part of what is planned: first the file, then the manifest that names it."""
    assert preflight.stored is not None
    path = directory / retry_file(retries.generation)
    temporary = directory / f".tmp-{path.name}"
    retries.write(temporary)
    os.replace(temporary, path)
    fsync_directory(directory)
    name, value = CONDITION.split("=")
    manifest: Manifest = preflight.stored.with_retry(
        Retry(
            generation=retries.generation,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            where={name: value},
            max_tokens=max_tokens,
            samples=len(retries),
            sha256=file_sha256(path),
        )
    )
    replace_manifest(directory, manifest)
    return replace(preflight, stored=manifest)
