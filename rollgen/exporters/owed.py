"""What a dataset has yet to make: whether the groups of its prompts are whole. No tokens are read.

Its plan and its retry lists tell. A merged dataset has none: there the manifest says what its runs owed when they were
merged, but not of which prompts, and how many of their samples there were.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from rollgen.errors import MissingFile, UsageError
from rollgen.format.retries import read_retries
from rollgen.format.schema import PLAN_FILE
from rollgen.inert import brief
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import Planned
from rollgen.remote.objects import ObjectStore
from rollgen.remote.stored import remote_plan

if TYPE_CHECKING:
    from rollgen.loader.index import Index
    from rollgen.loader.places import Place

RESUME: Final = "`rollgen generate --resume` makes the others"
_MERGE: Final = "merge its runs again when they are whole"
_NAMED: Final = 3
"""Runs that one line names."""


@dataclass(frozen=True, slots=True)
class OwedSamples:
    """Counted in one dataset."""

    samples: int | None
    """That are wanted and not stored, each counted once: planned ones that were never made, and those of which a retry
    has yet to make the row that counts. None where nothing tells."""
    broken: str = ""
    """Which groups are not whole, or might not be; empty where all are, as far as anything tells."""
    fix: str = RESUME
    """What makes the others."""
    notes: tuple[str, ...] = ()
    """All of it, a line each."""

    def check_groups(self) -> None:
        """Raise UsageError when a prompt has some of its samples only, or might."""
        if self.broken:
            raise UsageError(
                f"{self.broken}, and advantages would be over parts of groups; {self.fix}; --allow-incomplete takes "
                "what is there"
            )


def owed_of(index: Index, place: Place) -> OwedSamples:
    """Of the one dataset of an index, which is at this place.

    Raises DatasetError for a plan that is damaged, and beside one for a list of retries that is damaged or missing.
    """
    manifest = index.datasets[0].manifest
    if manifest.runs:
        return _of_runs(index)
    if manifest.is_planless:
        return OwedSamples(None)
    with remote_plan(place, manifest) if isinstance(place, ObjectStore) else nullcontext(place) as directory:
        try:
            plan = Plan(directory / PLAN_FILE)
        except MissingFile:  # a copy need not have it
            return OwedSamples(None)
        return _of_plan(index, Planned(plan, read_retries(directory, manifest)))


def _of_plan(index: Index, planned: Planned) -> OwedSamples:
    plan, keys = planned.plan, index.keys
    stored = keys.take(planned.is_planned(keys))
    latest = np.full(plan.samples, -1, np.int32)  # generation of each planned sample, -1 for none
    latest[plan.offsets[stored.prompt_index] + stored.sample_index] = stored.generation
    wanted = np.zeros(plan.samples, np.int32)
    for retry, numbers in zip(planned.retries, planned.numbers, strict=True):
        wanted[numbers] = retry.generation
    owed = (latest < wanted) & ~np.repeat(plan.tombstone, plan.n)
    of_prompt = np.add.reduceat(owed, plan.offsets[:-1], dtype=np.int64)
    there = np.add.reduceat(latest >= 0, plan.offsets[:-1], dtype=np.int64)
    broken, samples = np.flatnonzero((of_prompt > 0) & (there > 0)), int(owed.sum())
    if not samples:
        return OwedSamples(0)
    notes = (f"owed: samples of the plan that are yet to be made, or made again: {samples:,}; {RESUME}",)
    if not broken.size:
        return OwedSamples(samples, notes=notes)
    example = plan.prompt_ids(broken[:1])[0].as_py()
    return OwedSamples(
        samples,
        f"{example!r}: some of its samples are yet to be made, or made again (prompts of which that is so: "
        f"{broken.size:,})",
        notes=notes,
    )


def _of_runs(index: Index) -> OwedSamples:
    runs = index.datasets[0].manifest.runs
    notes = [f"run {brief(run.name)} was merged with {run.owed:,} samples owed" for run in runs if run.owed]
    known = [run.owed for run in runs if run.owed is not None]
    lost = sum(run.samples for run in runs) - len(index)
    if lost > 0:
        notes.append(f"samples that were merged and are not stored any more: {lost:,}")
    if not notes:
        return OwedSamples(0 if len(known) == len(runs) else None)
    broken = "; ".join(notes[:_NAMED]) + "; ..." * (len(notes) > _NAMED)
    return OwedSamples(sum(known) + max(0, lost), broken, _MERGE, tuple(notes))
