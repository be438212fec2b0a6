"""What a trainer has one value of, where a dataset has one a sample: refused when two differ."""

from __future__ import annotations

import numpy as np

from rollgen.errors import UsageError
from rollgen.exporters.records import Block, Records
from rollgen.rollouts import TRUNCATING, truncates

_ELSEWHERE = "prime-rl and jsonl take each sample as it is"


class Agreement:
    """How the samples were drawn, read from narrow columns before anything is written.

    Raises UsageError for an empty prompt, for two temperatures, and for samples with masks beside others.
    """

    def __init__(self, records: Records, trainer: str) -> None:
        columns = records.columns("prompt_length", "temperature", *TRUNCATING)
        if (empty := columns["prompt_length"] == 0).any():
            prompt_id = records.prompt_id(int(empty.argmax()))
            raise UsageError(f"{prompt_id!r}: the prompt is empty: no logits predict the first token")
        temperatures = [str(value) for value in np.unique(columns["temperature"])]
        if len(temperatures) > 1:
            raise UsageError(
                f"{trainer} divides the logits of all samples by one temperature, these have "
                f"{', '.join(temperatures[:3])}; {_ELSEWHERE}"
            )
        truncated = truncates(*(columns[name] for name in TRUNCATING))
        if truncated.any() != truncated.all():
            raise UsageError(
                f"{trainer} takes masks of all samples or of none, and only some of these were truncated; {_ELSEWHERE}"
            )
        self.temperature = temperatures[0]
        """Of all samples, as it is written on a command line."""
        self.truncated = bool(truncated[0])
        """Whether tokens have supports: all do, or none does."""
        self.top_p = float(columns["top_p"].min())
        """The smallest; float32, widened."""
        self.top_k = int(columns["top_k"].max())
        """The largest."""
        self.widest = 0
        """Ids of the largest support that was seen."""

    def see(self, block: Block) -> None:
        """Supports are known when they are read."""
        self.widest = max(self.widest, int(block.samples.mask_lengths.max()))
