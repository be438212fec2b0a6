"""Log-softmax over the rows of a support, each a segment of [nnz] numbers, and its gradient in closed form.

    log pi_v = z_v - log sum_w exp(z_w)      entropy H = -sum_v pi_v log pi_v      z logits / temperature, v, w in a row
    d log pi_t / d z_v = [v = t] - pi_v      dH / d z_v = -pi_v (log pi_v + H)      d log sum exp / d z_v = pi_v

Every sum runs over one segment in a fixed order, so that results are equal bit by bit whatever the number of threads.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Which row each listed id belongs to, and which of them is its row's target."""

    offsets: Tensor
    """int64 [N + 1]"""
    row: Tensor
    """int64 [nnz]"""
    is_target: Tensor
    """bool [nnz]"""

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor, targets: Tensor) -> Segments:
        """From int32 [nnz], int64 [N + 1] and int64 [N]."""
        count = torch.arange(targets.numel(), device=ids.device)
        row = torch.repeat_interleave(count, offsets.diff(), output_size=ids.numel())
        return cls(offsets, row, ids == targets[row])

    def reduce(self, values: Tensor, kind: Literal["sum", "max"]) -> Tensor:
        """[nnz] -> [N]; 0 and -inf for a row that lists no id."""
        return torch.segment_reduce(values, kind, offsets=self.offsets, unsafe=True)

    def log_softmax(self, scaled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[nnz] -> log pi of every id [nnz], the row's largest [N], and the log of its sum relative to that [N].

        The last two add up to the log-sum-exp. They stay apart because the sum of a large and a small number costs
        digits; so a single finite id gives exactly 0.
        """
        largest = self.reduce(scaled, "max")
        shifted = scaled - largest[self.row]
        log_total = self.reduce(shifted.exp(), "sum").log()
        return shifted - log_total[self.row], largest, log_total

    def at_targets(self, logprobs: Tensor) -> Tensor:
        """[nnz] -> [N], -inf where the target is not listed."""
        return self.reduce(logprobs.masked_fill(~self.is_target, -torch.inf), "max")

    def has_target(self) -> Tensor:
        """bool [N]"""
        return self.reduce(self.is_target.float(), "sum") > 0

    def is_single(self) -> Tensor:
        """bool [N], whether a row lists one id alone: neither its log pi nor its entropy depends on anything."""
        return self.offsets.diff() == 1

    def entropy(self, logprobs: Tensor) -> Tensor:
        """[nnz] -> [N]"""
        return self.reduce(-_surprise(logprobs), "sum")

    def gradient(self, logprobs: Tensor, of_target: Tensor, of_total: Tensor, of_entropy: Tensor | None) -> Tensor:
        """[nnz], the gradient in the scaled logits.

        of_target    [N], of log pi of the target
        of_total     [N], of the log-sum-exp, that of `of_target` excepted
        of_entropy   [N] or None
        """
        row, single = self.row, self.is_single()
        kept = of_target.masked_fill(~self.has_target() | single, 0)
        share = of_total - kept
        if of_entropy is not None:
            of_entropy = of_entropy.masked_fill(single, 0)
            share = share - of_entropy * self.entropy(logprobs)
        gradient = share[row] * logprobs.exp() + kept[row].masked_fill(~self.is_target, 0)
        return gradient if of_entropy is None else gradient - of_entropy[row] * _surprise(logprobs)

    def slope(self, gradient: Tensor, logprobs: Tensor) -> Tensor:
        """[N], sum of gradient times log pi: minus the temperature times the gradient in the temperature.

        The scaled logits in place of log pi give the same, as a gradient sums to 0 over its row, but cancel more.
        """
        return self.reduce((gradient * logprobs).masked_fill(gradient == 0, 0), "sum")


def _surprise(logprobs: Tensor) -> Tensor:
    """pi log pi, 0 where pi is 0."""
    return (logprobs.exp() * logprobs).masked_fill(logprobs == -torch.inf, 0)
