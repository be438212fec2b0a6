"""Replaying a sampling mask, with `rollgen.ops` and densely: the cases that `ops.py` and `gpu.py` measure.

The dense recipe is that of vLLM's documentation: a boolean mask [N, V], logits / temperature, `masked_fill` with -inf,
`log_softmax`, `gather`. It gets its mask ready-made, so that neither the time nor the memory of making one counts
against it, and float32 logits, as a loss needs them.

Axes: N tokens, V vocabulary, H width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollgen.ops import Support, support_logprobs, support_logprobs_from_hidden
from tests.benchmarks.masks import COMPLETION_TOKENS, synthetic_completions

FORWARD = "forward"
BACKWARD = "forward + backward"
WITH_WEIGHT = "forward + backward, with weight"


class Tokens(NamedTuple):
    """N sampled tokens with the synthetic supports."""

    support: Support
    targets: Tensor
    """int64 [N]"""
    temperature: Tensor
    """float32 [N]"""
    upstream: Tensor
    """float32 [N], the gradient of a loss by each log-probability."""

    def to(self, device: torch.device) -> Tokens:
        """The same on another device."""
        support, *others = self
        return Tokens(support.to(device), *(part.to(device) for part in others))


class Case(NamedTuple):
    """One thing to measure; `run` returns its result: log-probabilities [N], or gradients."""

    way: str
    """rollgen or dense"""
    passes: str
    run: Callable[[], Tensor | tuple[Tensor, ...]]


@cache
def make_tokens(count: int, vocab_size: int) -> Tokens:
    """`count` tokens on the CPU, the same for the same arguments."""
    made = synthetic_completions(-(-count // COMPLETION_TOKENS), vocab_size)
    masks = [mask for row in made for mask in row.masks][:count]
    targets = [token for row in made for token in row.token_ids][:count]
    offsets = np.cumsum([0, *map(len, masks)])
    support = Support(
        torch.from_numpy(np.concatenate(masks).astype(np.int32)), torch.from_numpy(offsets), vocab_size, False
    )
    upstream = torch.randn(count, generator=torch.Generator().manual_seed(0))
    return Tokens(support, torch.tensor(targets), torch.full((count,), 0.8), upstream)


def dense_logprobs(logits: Tensor, mask: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """The documented recipe: logits [N, V], mask bool [N, V] -> [N]."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature.unsqueeze(1)
    logprobs = scaled.masked_fill(~mask, -torch.inf).log_softmax(1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)


def dense_from_hidden(hidden: Tensor, weight: Tensor, mask: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """The full product hidden [N, H] with weight [V, H], then the documented recipe."""
    return dense_logprobs(hidden @ weight.T, mask, targets, temperature)


def logits_cases(logits: Tensor, tokens: Tokens) -> Iterator[Case]:
    """From logits [N, V]; the mask of the dense recipe is made when its first case is asked for."""
    logits.requires_grad_()
    replay = partial(support_logprobs, logits, tokens.support, tokens.targets, tokens.temperature)
    yield Case("rollgen", FORWARD, partial(forward, replay))
    yield Case("rollgen", BACKWARD, partial(backward, replay, [logits], tokens.upstream))
    mask = tokens.support.to_bool(logits.shape[1])
    densely = partial(dense_logprobs, logits, mask, tokens.targets, tokens.temperature)
    yield Case("dense", FORWARD, partial(forward, densely))
    yield Case("dense", BACKWARD, partial(backward, densely, [logits], tokens.upstream))


def hidden_cases(hidden: Tensor, weight: Tensor, tokens: Tokens) -> Iterator[Case]:
    """From hidden [N, H] and weight [V, H]. The weight's gradient is as large as the weight, in either way."""
    hidden.requires_grad_()
    trained = weight.detach().requires_grad_()
    yield from _hidden_cases("rollgen", support_logprobs_from_hidden, hidden, weight, trained, tokens.support, tokens)
    mask = tokens.support.to_bool(weight.shape[0])
    yield from _hidden_cases("dense", dense_from_hidden, hidden, weight, trained, mask, tokens)


def _hidden_cases(
    way: str,
    compute: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    trained: Tensor,
    allowed: Support | Tensor,
    tokens: Tokens,
) -> Iterator[Case]:
    frozen, full = (partial(compute, hidden, w, allowed, tokens.targets, tokens.temperature) for w in (weight, trained))
    yield Case(way, FORWARD, partial(forward, frozen))
    yield Case(way, BACKWARD, partial(backward, frozen, [hidden], tokens.upstream))
    yield Case(way, WITH_WEIGHT, partial(backward, full, [hidden, trained], tokens.upstream))


def forward(compute: Callable[[], Tensor]) -> Tensor:
    """The values alone."""
    with torch.no_grad():
        return compute()


def backward(compute: Callable[[], Tensor], inputs: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """The gradients of `inputs`, not accumulated anywhere."""
    return torch.autograd.grad(compute(), inputs, upstream)
