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
    from rollgen.rollouts import Prompt


class Owed:
    """The samples of one run and which of them are settled. `done` are flags of all positions; they are copied."""

    def __init__(self, plan: Plan, retries: Sequence[RetryList], done: npt.NDArray[np.bool_]) -> None:
        self.plan = plan
        self._retries = retries
        self._starts = np.cumsum([plan.samples, *(len(retry.prompt_index) for retry in retries)])
        self._settled = done.copy()
        self._suspect = np.zeros_like(done)
        self._in_flight: set[int] = set()

    @property
    def settled(self) -> int:
        """Samples that are stored, or have failed in this attempt."""
        return int(self._settled.sum())

    def requests(self) -> Iterator[tuple[SampleRequest, int, int]]:
        """Everything not settled: (request, its position, requests in its group if it is the first of them, else 0).

        In plan order, but for suspects, which come last: what was in flight when the engine died may have killed it,
        and must not keep the rest from being made.
        """
        yield from self._requests(self._settled | self._suspect)
        yield from self._requests(self._settled | ~self._suspect)

    def take(self, position: int) -> None:
        """The engine is asked for this sample."""
        self._in_flight.add(position)

    def settle(self, position: int) -> None:
        """The sample is stored, or has failed: it is not asked for again in this attempt."""
        self._in_flight.discard(position)
        self._settled[position] = True

    def suspect_in_flight(self) -> int:
        """The engine is gone: what it was asked for is owed again. Returns how many samples that are."""
        suspects = list(self._in_flight)
        self._suspect[suspects] = True
        self._in_flight.clear()
        return len(suspects)

    def _requests(self, skip: npt.NDArray[np.bool_]) -> Iterator[tuple[SampleRequest, int, int]]:
        if skip.all():
            return
        for prompt in self.plan.rows():
            if prompt.error is None:
                group = [*self._planned(prompt, skip), *self._retried(prompt, skip)]
                for place, (request, position) in enumerate(group):
                    yield request, position, 0 if place else len(group)

    def _planned(self, prompt: Prompt, skip: npt.NDArray[np.bool_]) -> Iterator[tuple[SampleRequest, int]]:
        start = int(self.plan.offsets[prompt.prompt_index])
        for sample_index in np.flatnonzero(~skip[start : start + prompt.n]):
            yield SampleRequest(prompt, int(sample_index)), start + int(sample_index)

    def _retried(self, prompt: Prompt, skip: npt.NDArray[np.bool_]) -> Iterator[tuple[SampleRequest, int]]:
        for start, retry in zip(self._starts, self._retries, strict=False):
            first, last = np.searchsorted(retry.prompt_index, [prompt.prompt_index, prompt.prompt_index + 1])
            for row in first + np.flatnonzero(~skip[start + first : start + last]):
                sampling = replace(prompt.sampling, max_tokens=int(retry.max_tokens[row]))
                again = replace(prompt, sampling=sampling)
                yield SampleRequest(again, int(retry.sample_index[row]), retry.generation), int(start + row)
