"""What a trainer has one value of, where a dataset has one a sample: seen block by block, refused when two differ."""

from __future__ import annotations

import numpy as np

from rollgen.errors import UsageError
from rollgen.exporters.records import Block, Records

_ELSEWHERE = "prime-rl and jsonl take each sample as it is"


class Agreement:
    """How samples were drawn, as far as they were seen."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._temperatures: set[float] = set()
        self._truncated: set[bool] = set()
        self.top_p = 1.0
        """The smallest; float32, widened. So are the others."""
        self.top_k = 0
        """The largest."""
        self.widest = 0
        """Ids of the largest support."""

    @property
    def temperature(self) -> str:
        """Of all samples, as it is written on a command line."""
        return str(np.float32(next(iter(self._temperatures))))

    @property
    def truncated(self) -> bool:
        """Whether tokens have supports: all do, or none does."""
        return next(iter(self._truncated))

    def see(self, block: Block) -> None:
        """Raises UsageError for an empty prompt, for two temperatures, and for samples with masks beside others."""
        columns = block.samples.scalars
        prompt_lengths = np.diff(block.samples.prompt_ids.offsets)
        if (prompt_lengths == 0).any():
            prompt_id = columns["prompt_id"][int(prompt_lengths.argmin())]
            raise UsageError(f"{prompt_id!r}: the prompt is empty: no logits predict the first token")
        self._temperatures.update(np.unique(columns["temperature"]).tolist())
        self._truncated.update(np.unique(block.samples.mask_lengths > 0).tolist())
        self.top_p = min(self.top_p, float(columns["top_p"].min()))
        self.top_k = max(self.top_k, int(columns["top_k"].max()))
        self.widest = max(self.widest, int(block.samples.mask_lengths.max()))
        if len(self._temperatures) > 1:
            told = ", ".join(str(np.float32(value)) for value in sorted(self._temperatures)[:3])
            raise UsageError(
                f"{self._trainer} divides the logits of all samples by one temperature, these have {told}; {_ELSEWHERE}"
            )
        if len(self._truncated) > 1:
            raise UsageError(
                f"{self._trainer} takes masks of all samples or of none, and only some of these were truncated; "
                f"{_ELSEWHERE}"
            )


def equal_groups(records: Records, trainer: str) -> int:
    """Samples of each prompt. Raises UsageError when prompts differ: the trainer tells groups apart by their place."""
    sizes = np.unique(records.group_sizes).tolist()
    if len(sizes) > 1:
        raise UsageError(
            f"{trainer} takes equally many samples of each prompt, here some have {sizes[0]} and some {sizes[-1]}; "
            "`rollgen generate --resume` makes what is missing"
        )
    return int(sizes[0])


def check_steps(records: Records, trainer: str, prompts_per_step: int) -> None:
    """Raise UsageError, with a number that is possible, when the last step would have fewer prompts."""
    prompts = len(records.group_sizes)
    if prompts % prompts_per_step:
        possible = max(count for count in range(1, prompts_per_step + 1) if prompts % count == 0)
        raise UsageError(
            f"--option prompts_per_step: {trainer} takes equally many prompts in each step, and {prompts} are not a "
            f"multiple of {prompts_per_step}; {possible} would do"
        )
