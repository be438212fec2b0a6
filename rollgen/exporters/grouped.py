"""`GroupedExporter`: of trainers that find the samples of a prompt by their place, and make advantages of the rewards.

All steps of theirs have equally many prompts, all prompts equally many samples, and all samples were drawn alike.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from rollgen.errors import UsageError
from rollgen.exporters.agreement import Agreement
from rollgen.exporters.exporter import Count, ExpertsExporter
from rollgen.exporters.records import Records


class Steps(NamedTuple):
    """What the trainer has to be told."""

    number: int
    prompts: int
    """Of each step."""
    samples: int
    """Of each prompt."""
    drawn: Agreement


class GroupedExporter(ExpertsExporter):
    """What these have in common."""

    name: ClassVar[str]
    """Of the trainer, in messages."""
    needs_reward: ClassVar[bool] = True
    takes_advantages: ClassVar[bool] = False

    prompts_per_step: Count = Field(64, description="Prompts of a step; all of them, when they are fewer.")

    def steps(self, records: Records) -> Steps:
        """Raises UsageError, before tokens are read, where groups, steps or samples are not alike: see `Agreement`."""
        samples, prompts = self._equal_groups(records), len(records.group_sizes)
        of_step = min(self.prompts_per_step, prompts)
        if prompts % of_step:
            possible = max(count for count in range(1, of_step + 1) if prompts % count == 0)
            raise UsageError(
                f"--option prompts_per_step: {self.name} takes equally many prompts in each step, and {prompts} are "
                f"not a multiple of {of_step}; {possible} would do"
            )
        return Steps(prompts // of_step, of_step, samples, Agreement(records, self.name))

    def _equal_groups(self, records: Records) -> int:
        """Samples of each prompt. Raises UsageError when prompts differ."""
        sizes = np.unique(records.group_sizes).tolist()
        if len(sizes) > 1:
            fix = f", and {records.owed.fix}" if records.owed.samples else ""
            raise UsageError(
                f"{self.name} takes equally many samples of each prompt, here some have {sizes[0]} and some "
                f"{sizes[-1]}; prime-rl and jsonl take them as they are{fix}"
            )
        return int(sizes[0])
