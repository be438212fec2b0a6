"""How many logprobs are asked for, and when there are more of them."""

from __future__ import annotations

import asyncio

import pytest
from models.fake_engine import FakeEngine, fake_completion

from rollgen.engines.asking import ask, logprobs_wanted
from rollgen.engines.base import Capture, SampleRequest
from rollgen.errors import IncompleteSupport
from rollgen.rollouts import Completion, Sampling


@pytest.mark.parametrize(
    ("capture", "top_k", "support_logprobs", "expected"),
    [
        ("logprobs", 50, False, 82),  # 50 + 32
        ("logprobs", 200, False, 250),  # 200 + 200 / 4
        ("logprobs", 500, False, 512),  # the vocabulary
        ("logprobs", 0, False, 0),  # nothing truncates
        ("native", 50, False, 0),
        ("native", 50, True, 82),
        ("none", 0, True, 0),
    ],
)
def test_first(capture: Capture, top_k: int, support_logprobs: bool, expected: int) -> None:
    """Only where supports, or their logprobs, are read from them."""
    assert logprobs_wanted(capture, Sampling(top_k=top_k), 512, support_logprobs=support_logprobs) == expected


@pytest.mark.parametrize(
    ("enough", "asked"), [(82, [82]), (83, [82, 164]), (400, [82, 164, 328, 512]), (513, [82, 164, 328, 512])]
)
def test_again(make_request: object, enough: int, asked: list[int]) -> None:
    """Twice as many each time, up to the vocabulary of 512; if that is not enough, nothing is."""
    engine, seen = FakeEngine(), []

    async def make(num_logprobs: int) -> Completion:
        seen.append(num_logprobs)
        if num_logprobs < enough:
            raise IncompleteSupport("a tie")
        return fake_completion(request)

    request: SampleRequest = make_request()  # type: ignore[operator]
    if enough > 512:
        with pytest.raises(IncompleteSupport):
            asyncio.run(ask(engine, 82, 512, make))
    else:
        assert asyncio.run(ask(engine, 82, 512, make)).seed == request.seed
    assert seen == asked
    assert engine.resampled == len(asked) - 1
