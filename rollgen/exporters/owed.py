"""What a dataset has yet to make, as its plan and its retry lists say: whether groups are whole. No tokens are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollgen.errors import MissingFile, UsageError
from rollgen.format.keys import Keys
from rollgen.format.manifest import PLANLESS
from rollgen.prompts.planned import Planned

if TYPE_CHECKING:
    from rollgen.loader.index import Index


@dataclass(frozen=True, slots=True)
class Owed:
    """Counted in one dataset."""

    samples: int
    """That are planned, or to be made again, and not stored."""
    broken_groups: int
    """Prompts of which some samples are stored, and others owed."""
    example: str
    """The id of the first of these prompts; empty where there is none."""

    def check_groups(self) -> None:
        """Raise UsageError when a prompt has some of its samples only."""
        if self.broken_groups:
            raise UsageError(
                f"{self.example!r}: not all of its samples are stored (prompts of which that is so: "
                f"{self.broken_groups}), and advantages would be over parts of groups; `rollgen generate --resume` "
                "makes the others, --allow-incomplete takes what is there"
            )


def owed_of(index: Index) -> Owed | None:
    """Of the one dataset of an index; None where no plan tells: it has none, or travels without.

    Raises DatasetError for a plan or a list of retries that is damaged.
    """
    dataset = index.datasets[0]
    if PLANLESS in dataset.manifest.identity:
        return None
    try:
        planned = Planned.of_dataset(dataset.directory)
    except MissingFile:
        return None
    plan, keys = planned.plan, Keys(index.prompt_index, index.sample_index, index.generation)
    stored = keys.take(planned.is_planned(keys))
    latest = np.full(plan.samples, -1, np.int32)  # generation of each planned sample, -1 for none
    latest[plan.offsets[stored.prompt_index] + stored.sample_index] = stored.generation
    wanted = np.zeros(plan.samples, np.int32)
    for retry, numbers in zip(planned.retries, planned.numbers, strict=True):
        wanted[numbers] = retry.generation
    owed = (latest < wanted) & ~np.repeat(plan.tombstone, plan.n)
    of_prompt = np.add.reduceat(owed, plan.offsets[:-1], dtype=np.int64)
    there = np.add.reduceat(latest >= 0, plan.offsets[:-1], dtype=np.int64)
    broken = np.flatnonzero((of_prompt > 0) & (there > 0))
    example = plan.prompt_ids(broken[:1])[0].as_py() if broken.size else ""
    return Owed(int(owed.sum()), broken.size, example)
