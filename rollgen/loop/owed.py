"""What a run still has to make: planned samples and retries, minus what is stored, in plan order.

Every sample of a run has a position: sample k of prompt i is number `plan.offsets[i] + k`, and the rows of the retry
lists follow, list by list. Bookkeeping is one byte a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollgen.engines.base import SampleRequest

if TYPE_CHECKING:
    from rollgen.format.retries import RetryList
    from rollgen.prompts.plan import Plan
    from rollgen.rollouts import Int64Array, Prompt


class Owed:
    """The samples of one run and which of them are settled. `done` are flags of all positions; they are copied."""

    def __init__(self, plan: Plan, retries: Sequence[RetryList], done: npt.NDArray[np.bool_]) -> None:
        self.plan = plan
        self.retries = retries
        self._starts = np.cumsum([plan.samples, *(len(retry.prompt_index) for retry in retries)])
        self._settled = done.copy()

    def settle(self, position: int) -> None:
        """The sample is stored, or has failed: it is not asked for again in this attempt."""
        self._settled[position] = True

    def __len__(self) -> int:
        """Samples that are not settled."""
        return int(np.count_nonzero(~self._settled))

    def places(self) -> tuple[Int64Array, Int64Array]:
        """What can be asked for, in plan order: int64 [S] positions, and int64 [S] the prompts that they are of."""
        positions = np.flatnonzero(~self._settled)
        planned = positions[positions < self.plan.samples]
        prompts = [np.searchsorted(self.plan.offsets, planned, "right") - 1]
        for start, retry in zip(self._starts, self.retries, strict=False):
            prompts.append(retry.prompt_index[~self._settled[start : start + len(retry)]])
        prompt_index = np.concatenate(prompts)
        kept = np.argsort(prompt_index, kind="stable")
        kept = kept[~self.plan.tombstone[prompt_index[kept]]]
        return positions[kept], prompt_index[kept]

    def requests(self) -> Iterator[tuple[SampleRequest, int, int]]:
        """What was not settled when this began, in plan order; reads no more of the plan than holds it.

        Each as (request, its position, requests in its group if it is the first of them, else 0).
        """
        skip = self._settled.copy()
        _, prompts = self.places()
        if not len(prompts):
            return
        for prompt in self.plan.rows(int(prompts[0])):
            if prompt.prompt_index > prompts[-1]:
                return
            if prompt.error is None:
                group = [*self._planned(prompt, skip), *self._retried(prompt, skip)]
                for place, (request, position) in enumerate(group):
                    yield request, position, 0 if place else len(group)

    def _planned(self, prompt: Prompt, skip: npt.NDArray[np.bool_]) -> Iterator[tuple[SampleRequest, int]]:
        start = int(self.plan.offsets[prompt.prompt_index])
        for sample_index in np.flatnonzero(~skip[start : start + prompt.n]):
            yield SampleRequest(prompt, int(sample_index)), start + int(sample_index)

    def _retried(self, prompt: Prompt, skip: npt.NDArray[np.bool_]) -> Iterator[tuple[SampleRequest, int]]:
        for start, retry in zip(self._starts, self.retries, strict=False):
            first, last = np.searchsorted(retry.prompt_index, [prompt.prompt_index, prompt.prompt_index + 1])
            for row in first + np.flatnonzero(~skip[start + first : start + last]):
                sampling = replace(prompt.sampling, max_tokens=int(retry.max_tokens[row]))
                again = replace(prompt, sampling=sampling)
                yield SampleRequest(again, int(retry.sample_index[row]), retry.generation), int(start + row)
