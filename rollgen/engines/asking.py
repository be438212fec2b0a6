"""How a sample is asked for, whatever the engine: with how many logprobs, and again with more of them after a tie."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from rollgen.engines.base import Capture, Engine
from rollgen.engines.capture import first_num_logprobs
from rollgen.errors import IncompleteSupport
from rollgen.rollouts import Completion, Sampling

WINDOW_PER_SLOT: Final = 1.5
"""Requests in flight for each place in the engine's batch: the next prompt waits inside the engine, not outside."""


def logprobs_wanted(capture: Capture, sampling: Sampling, vocab_size: int, *, support_logprobs: bool) -> int:
    """How many logprobs to ask for at first besides the sampled token's; 0 when masks or nothing suffices."""
    wanted = capture == "logprobs" or (capture == "native" and support_logprobs)
    if not wanted or not sampling.truncates:
        return 0
    return min(first_num_logprobs(sampling.top_k), vocab_size)


async def ask(engine: Engine, first: int, vocab_size: int, make: Callable[[int], Awaitable[Completion]]) -> Completion:
    """`make(K)` with K = `first`, and again with twice as many as long as a support may reach past them.

    Counts in `engine.resampled`. Raises what `make` does; IncompleteSupport only if the whole vocabulary is not enough.
    """
    wanted = first
    while True:
        try:
            return await make(wanted)
        except IncompleteSupport:
            if wanted >= vocab_size:
                raise
            engine.resampled += 1
            wanted = min(2 * wanted, vocab_size)
