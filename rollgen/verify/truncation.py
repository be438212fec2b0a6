"""Is a support what top-k, top-p and min-p leave of a model's logits? By how much not: its *gap*, in logits.

A support is judged by itself because no log-probability can do it: whatever ids it has, log pi normalised over them is
consistent with them. With x = z / T, S the support and K the top_k most likely ids:

    top set    max of x outside S           <=  min of x in S
    top_k      the top_k-th largest x       <=  min of x in S
    min_p      max of x + log(min_p)        <=  min of x in S
    top_p      log-odds of S in K           >=  log-odds of top_p       unless S has top_k ids: nothing was cut then
               log-odds of S' in K          <   log-odds of top_p       S': S without its least likely id and its ties

The gap is the largest excess of these, times T. A difference of logits and log-odds of sums of exp(x) both move by as
much as two logits do, so one tolerance fits all of them, at any temperature and top_p. What an engine does in another
order than top-k, top-p keeps all of this but the last line, which then has the vocabulary in place of K. min-p may have
taken more after top-p: then the first line of top_p does not hold. Ids that the engine rounded to one number are in no
order: the first three lines are off by up to one step of its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from rollgen.format.manifest import Manifest
from rollgen.loader import Rollout
from rollgen.ops import Support
from rollgen.ops.dense import block_elements, spans

MASS_SLACK: Final = 1e-4
"""Of top_p: kernels sum the probabilities of a vocabulary in float32, and some find the cut by approximate pivots."""
TIE_STEPS: Final = 4
"""Ids tie when they are this many steps of the dtype apart, or less: what an engine rounded to one number may be one
step apart for another, and further by the errors beside the last rounding. K of the last rule has what ties with the
top_k-th."""


class Truncation(NamedTuple):
    """What cut the distribution of each of N tokens, or rollouts."""

    top_k: Tensor
    """int64 [N], 0: off."""
    top_p: Tensor
    """float32 [N], 1: off."""
    min_p: Tensor
    """float32 [N], 0: off."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Self:
        """Of each of these, on the CPU."""
        return cls(
            torch.tensor([rollout.top_k for rollout in rollouts]),
            torch.tensor([rollout.top_p for rollout in rollouts], dtype=torch.float32),
            torch.tensor([rollout.min_p for rollout in rollouts], dtype=torch.float32),
        )

    def at(self, index: Tensor | slice) -> Truncation:
        """Those of an index, on its device if it is a tensor."""
        device = index.device if isinstance(index, Tensor) else self.top_k.device
        return Truncation(*(values.to(device)[index] for values in self))


class Sampler(NamedTuple):
    """How the engine of a dataset truncates."""

    top_k_first: bool
    """Whether top-p is known to see what top-k left."""
    step: float
    """Of the numbers that the engine's logits are, relative to their size."""

    @classmethod
    def of(cls, manifest: Manifest, dtype: torch.dtype) -> Self:
        """Of a dataset that was sampled in `dtype`."""
        orders = [attempt.engine.processors.split(", ") for attempt in manifest.attempts]
        first = all({"top_k", "top_p"} <= {*order} and order.index("top_k") < order.index("top_p") for order in orders)
        return cls(first, torch.finfo(dtype).eps)

    def gaps(
        self, logits: Tensor, support: Support, truncation: Truncation, temperature: Tensor, rows: Tensor
    ) -> Tensor:
        """float32 [N], logits: how far each support is from what its truncation leaves; 0 or less if it is that.

        logits        float [M, V], raw: of those at `rows` [N]; ids from `support.vocab_size` on are no candidates
        support       N rows, none of them full
        truncation    of N tokens
        temperature   float [N]
        """
        found = [logits.new_empty(0, dtype=torch.float32)]
        for part in spans(len(support), block_elements(logits.device) // support.vocab_size):
            scale = temperature[part].unsqueeze(1)
            scaled = logits[rows[part], : support.vocab_size].float() / scale
            gap = self._block(scaled, support[part].to_padded_ids().long(), truncation.at(part))
            found.append(gap * temperature[part])
        return torch.cat(found)

    def _block(self, scaled: Tensor, ids: Tensor, truncation: Truncation) -> Tensor:
        """[n, V], int64 [n, K] padded with -1, n tokens -> [n], in units of `scaled`."""
        absent = ids < 0
        ids = torch.where(absent, ids[:, :1], ids)
        inside, outside = scaled.gather(1, ids), scaled.scatter(1, ids, -torch.inf)
        least, threshold = inside.amin(1), _kth_largest(scaled, truncation.top_k)
        lowest = torch.stack([outside.amax(1), threshold, scaled.amax(1) + truncation.min_p.log()]).amax(0)
        out_of_order = lowest - least - self.step * least.abs()

        inside = inside.masked_fill(absent, -torch.inf)
        cut = _mass_from(outside, threshold)
        too_little = _log_odds(truncation.top_p - MASS_SLACK) - (inside.logsumexp(1) - cut)
        is_whole = (truncation.top_k > 0) & ((~absent).sum(1) >= truncation.top_k)
        too_little = too_little.masked_fill(is_whole | (truncation.min_p > 0), -torch.inf)

        last = inside <= (least + self._tie(least)).unsqueeze(1)
        kept, tied = (inside.masked_fill(part, -torch.inf).logsumexp(1) for part in (last, ~last))
        bound = threshold - self._tie(threshold) if self.top_k_first else torch.full_like(threshold, -torch.inf)
        cut = _mass_from(outside, bound)
        too_much = kept - torch.logaddexp(tied, cut) - _log_odds(truncation.top_p + MASS_SLACK)
        return torch.stack([out_of_order, too_little, too_much]).amax(0)

    def _tie(self, scaled: Tensor) -> Tensor:
        """How far from these ids may be that tie with them; 0 where there are none."""
        return TIE_STEPS * self.step * scaled.abs().masked_fill(scaled == -torch.inf, 0)


def _mass_from(scaled: Tensor, least: Tensor) -> Tensor:
    """[n, V] -> [n], log of the sum of exp of all that is not below `least` [n]."""
    return scaled.masked_fill(scaled < least.unsqueeze(1), -torch.inf).logsumexp(1)


def _kth_largest(scaled: Tensor, top_k: Tensor) -> Tensor:
    """[n, V], int64 [n] -> [n]; -inf where top_k is off, or cuts nothing."""
    found = torch.full_like(scaled[:, 0], -torch.inf)
    for k in set(top_k.tolist()):
        if 0 < k < scaled.shape[1]:
            chosen = top_k == k
            found[chosen] = scaled[chosen].topk(k, sorted=False).values.amin(1)
    return found


def _log_odds(mass: Tensor) -> Tensor:
    """Of a probability; infinite from 0 or 1 on."""
    mass = mass.double().clamp(0, 1)
    return (mass.log() - torch.log1p(-mass)).float()
