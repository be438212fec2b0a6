"""An engine without a model: `rollgen.engines.base.Engine` on plain asyncio, deterministic, with faults on demand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from rollgen.engines.base import Capture, Extras, SampleRequest
from rollgen.errors import EngineError
from rollgen.format.manifest import EngineRecord
from rollgen.rollouts import Completion

VOCAB_SIZE = 512
Key = tuple[int, int]
"""prompt_index, sample_index"""
Before = Callable[[SampleRequest], Awaitable[None]]


async def at_once(request: SampleRequest) -> None:
    """Let other requests run, as any engine does."""
    await asyncio.sleep(0)


class FakeEngine:
    """Samples `fake_completion(request)`. `before` is awaited first: it may wait, or raise what an engine raises.

    `broken` are keys whose completion comes back with a sampled id outside its support.
    """

    def __init__(
        self,
        *,
        before: Before = at_once,
        broken: frozenset[Key] = frozenset(),
        window: int = 4,
        capture: Capture = "logprobs",
        dtype: str = "bfloat16",
        start_error: EngineError | None = None,
    ) -> None:
        self.record = EngineRecord(name="fake", version="1", device="cpu", versions={}, processors="top_k, top_p")
        self.capture = capture
        self.dtype = dtype
        self.extras = Extras()
        self.window = window
        self.resampled = 0
        self.tokens = 0
        self.notes: tuple[str, ...] = ()
        self.started = 0
        """How often `start` was called."""
        self.asked: list[Key] = []
        """Every request, in order of arrival."""
        self.most_in_flight = 0
        self.closed = 0
        """How often `close` was called."""
        self._before = before
        self._broken = broken
        self._start_error = start_error
        self._in_flight = 0

    async def start(self) -> None:
        """Nothing to load."""
        await asyncio.sleep(0)
        self.started += 1
        if self._start_error is not None:
            raise self._start_error

    async def sample(self, request: SampleRequest) -> Completion:
        """See `engines.base.Engine.sample`."""
        key = (request.prompt.prompt_index, request.sample_index)
        self.asked.append(key)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            await self._before(request)
        finally:
            self._in_flight -= 1
        completion = fake_completion(request)
        self.tokens += len(completion.token_ids)
        if key in self._broken:
            return replace(completion, token_ids=(completion.token_ids + 2) % VOCAB_SIZE)
        return completion

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def fake_completion(request: SampleRequest) -> Completion:
    """1 to 5 tokens out of the request's seed. Each support is a pair of ids of equal probability."""
    rng = np.random.default_rng(request.seed)
    prompt = request.prompt
    tokens = int(rng.integers(1, 6))
    first = rng.integers(0, VOCAB_SIZE - 1, tokens)
    truncates = prompt.sampling.truncates
    return Completion(
        prompt_id=prompt.prompt_id,
        sample_index=request.sample_index,
        prompt_index=prompt.prompt_index,
        prompt_token_ids=prompt.token_ids,
        token_ids=(first + rng.integers(0, 2, tokens)).astype(np.int32),
        logprobs=np.full(tokens, math.log(0.5), np.float32),
        mask_ids=np.stack([first, first + 1], axis=1).ravel().astype(np.int32)[: 2 * tokens * truncates],
        mask_offsets=np.arange(tokens + 1) * 2 * truncates,
        finish_reason="length" if tokens == 5 else "stop",
        sampling=prompt.sampling,
        seed=request.seed,
        generation=request.generation,
        text=f"{tokens} tokens",
        prompt=prompt.prompt,
        metadata=prompt.metadata,
    )
