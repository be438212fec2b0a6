"""Log-probabilities and entropies on the support, for batches as TRL lays them out.

TRL pads prompts on the left and completions on the right: row b is a prompt that ends at place L - C - 1, and the
tokens of rollout b from L - C on. The logits of one place before predict a token. Axes: B rollouts, L tokens of a row,
C the longest completion, M the last places of each row that the model gave states of, at least C + 1, N generated
tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from rollgen.loader.batch import Rollout
from rollgen.ops import Support, SupportLogprobs, support_logprobs, support_logprobs_from_hidden


class Scores(NamedTuple):
    """Of completions, on the right padded with zeros."""

    logprobs: Tensor
    """float32 [B, C], log pi_theta, normalised over the support."""
    entropies: Tensor
    """float32 [B, C], nats, of pi_theta over the support."""


def score_logits(logits: Tensor, completion_ids: Tensor, rollouts: Sequence[Rollout]) -> Scores:
    """From raw logits [B, M, V], contiguous; `completion_ids` are int64 [B, C]."""

    def score(support: Support, targets: Tensor, temperature: Tensor, rows: Tensor) -> SupportLogprobs:
        return support_logprobs(logits.flatten(0, 1), support, targets, temperature, rows=rows, entropy=True)

    return _score(score, logits.shape[1], completion_ids, rollouts)


def score_hidden(hidden: Tensor, head: nn.Linear, completion_ids: Tensor, rollouts: Sequence[Rollout]) -> Scores:
    """What `score_logits` gives for `head(hidden)`, which is never made; `hidden` is [B, M, H]."""
    states = hidden.flatten(0, 1).to(head.weight.dtype)

    def score(support: Support, targets: Tensor, temperature: Tensor, rows: Tensor) -> SupportLogprobs:
        return support_logprobs_from_hidden(
            states, head.weight, support, targets, temperature, bias=head.bias, rows=rows, entropy=True
        )

    return _score(score, hidden.shape[1], completion_ids, rollouts)


def _score(
    score: Callable[..., SupportLogprobs], width: int, completion_ids: Tensor, rollouts: Sequence[Rollout]
) -> Scores:
    """`score` is given supports, targets and temperatures of N tokens, and their rows among B * `width` states."""
    device, (_, longest) = completion_ids.device, completion_ids.shape
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    temperature = torch.tensor([rollout.temperature for rollout in rollouts]).repeat_interleave(lengths)
    support = Support.cat([rollout.support for rollout in rollouts])
    states = places(lengths, width, width - longest - 1)
    tokens = places(lengths, longest, 0).to(device)
    # Not those of the rollouts: of another's completion a token would be outside the support, and show as -inf.
    targets = completion_ids.flatten()[tokens]
    scores = score(support.to(device), targets, temperature.to(device), states.to(device))

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(completion_ids.numel()).index_copy(0, tokens, values).view(completion_ids.shape)

    return Scores(placed(scores.logprobs), placed(cast("Tensor", scores.entropy)))


def places(lengths: Tensor, width: int, first: int) -> Tensor:
    """int64 [N], where token t of row b stands in flattened rows of `width` that begin at `first`, t below lengths[b].

    That is b * width + first + t. `lengths` is int64 [B].
    """
    ends = lengths.cumsum(0)
    starts = torch.arange(len(lengths)) * width + first - (ends - lengths)
    return starts.repeat_interleave(lengths) + torch.arange(int(ends[-1]))
