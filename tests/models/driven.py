"""Engines of fake servers, driven by tests: started, asked for samples, closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from models import fake_server

from rollgen.engines.base import SampleRequest
from rollgen.engines.http import HttpEngine
from rollgen.format.invariants import find_problem
from rollgen.rollouts import Completion


def drive(engine: HttpEngine, scenario: Callable[[], Awaitable[Any]]) -> Any:
    """The result of `scenario()`, with the engine started, and closed after it."""

    async def run() -> Any:
        await engine.start()
        try:
            return await scenario()
        finally:
            engine.close()

    return asyncio.run(run())


def sample(engine: HttpEngine, request: SampleRequest) -> Completion:
    """One sample, of an engine that is started for it."""
    completion: Completion = drive(engine, lambda: engine.sample(request))
    return completion


def check(completion: Completion, request: SampleRequest) -> None:
    """It is what the server samples for this seed, in every field."""
    expected = fake_server.sample(request.sampling_params | {"logprobs": 0}, masks=True)
    assert completion.token_ids.tolist() == expected["token_ids"]
    assert completion.finish_reason == expected["finish_reason"]
    assert completion.logprobs.tolist() == [token["logprob"] for token in expected["logprobs"]["content"]]
    if request.prompt.sampling.truncates:
        assert np.split(completion.mask_ids, completion.mask_offsets[1:-1])[0].tolist() == expected["sampling_mask"][0]
        assert completion.mask_ids.tolist() == [token for mask in expected["sampling_mask"] for token in mask]
    assert find_problem(completion, fake_server.VOCAB_SIZE) is None
    assert completion.text == " ".join(map(str, expected["token_ids"]))
    assert completion.seed == request.seed
