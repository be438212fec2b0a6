"""Log-softmax over whole rows of the vocabulary, a block at a time, and its gradient: for rows that list no ids.

Blocks are [rows, ids] of logits / temperature in the dtype that is accumulated in, made by the caller and thrown away:
memory is one block whatever N and V. The log-sum-exp is kept online: https://arxiv.org/abs/1805.02867, algorithm 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

WIDTH: Final = (1 << 15) - 64
"""Ids in a block, at most. From 2^15 numbers on torch sums a row that is alone on all threads, each its own part of it,
and the last bits of the result depend on how many there are."""


def block_elements(device: torch.device) -> int:
    """How many numbers a block may hold: what stays in a CPU's cache, or what fills a GPU."""
    return 1 << (18 if device.type == "cpu" else 24)


def spans(total: int, step: int) -> Iterator[slice]:
    """0 to `total` in slices of at most `step`, at least 1."""
    step = max(1, step)
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


class OnlineSoftmax:
    """Log-sum-exp, target and entropy of D rows, fed block by block; each row sees its ids in one fixed order."""

    def __init__(self, targets: Tensor, dtype: torch.dtype, *, entropy: bool) -> None:
        self.targets = targets
        # Not -inf: what the first block is compared with has to leave finite differences.
        self.largest = torch.full(targets.shape, torch.finfo(dtype).min, dtype=dtype, device=targets.device)
        self._total = torch.zeros_like(self.largest)
        self._target = torch.full_like(self.largest, -torch.inf)
        self._mean = torch.zeros_like(self.largest) if entropy else None

    def add(self, rows: slice, first_id: int, scaled: Tensor) -> None:
        """Take in the ids from `first_id` on of some rows. Overwrites `scaled` [rows, ids]."""
        inside, column = _columns(self.targets[rows], first_id, scaled)
        self._target[rows] = torch.where(inside, scaled.gather(1, column).squeeze(1), self._target[rows])
        largest = torch.maximum(self.largest[rows], scaled.amax(1))
        drop = self.largest[rows] - largest
        shifted = scaled.sub_(largest.unsqueeze(1))
        keep = drop.exp()
        if self._mean is not None:
            # Sum of exp(x) x, x relative to the largest so far: moving that by `drop` moves every x. A drop that keeps
            # nothing may have overflowed.
            exp = shifted.exp()
            old = ((self._mean[rows] + drop * self._total[rows]) * keep).masked_fill_(keep == 0, 0)
            self._mean[rows] = old + exp.mul_(shifted).masked_fill_(shifted == -torch.inf, 0).sum(1)
        self._total[rows] = self._total[rows] * keep + shifted.exp_().sum(1)
        self.largest[rows] = largest

    @property
    def log_total(self) -> Tensor:
        """[D], log of the sum relative to `largest`: the two add up to the log-sum-exp."""
        return self._total.log()

    def merge(self, dense: Tensor, full: Tensor, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies [N] with those of rows that list no ids filled in, and statistics [2, N].

        dense    int64 [D], the rows of N that were fed
        full     bool [N], those that list no ids

        The statistics are `largest` and `log_total`, of interest where there is a dense row. Without `entropy` the
        entropies are passed on.
        """
        count = full.numel()
        statistics = spread(torch.stack([self.largest, self.log_total]), dense, count)
        values = (self._target - self.largest) - self.log_total
        logprobs = torch.where(full, spread(values, dense, count), logprobs)
        if self._mean is not None:
            entropies = torch.where(full, spread(self.log_total - self._mean / self._total, dense, count), entropies)
        return logprobs, entropies, statistics


class DenseGradient:
    """Gradient in the blocks that `OnlineSoftmax` was fed, from the statistics it kept.

    It is of_total * pi + of_target * ([v = target] - pi) - of_entropy * pi * (log pi + entropy) at id v.
    """

    def __init__(
        self,
        dense: Tensor,
        targets: Tensor,
        statistics: Tensor,
        *,
        of_target: Tensor,
        of_total: Tensor,
        of_entropy: Tensor | None,
        entropy: Tensor,
    ) -> None:
        """`dense` [D] picks from `statistics` [2, N] and from all others, [N]."""
        self._targets = targets[dense]
        self._largest, self._log_total = statistics[:, dense]
        self._of_target = of_target[dense]
        self._share = (of_total - of_target)[dense]
        self._of_entropy = None if of_entropy is None else of_entropy[dense]
        if of_entropy is not None:
            self._share -= (of_entropy * entropy)[dense]
        self.slope = torch.zeros_like(self._share)
        """[D], sum so far of gradient times log pi: as `Segments.slope`."""

    def block(self, rows: slice, first_id: int, scaled: Tensor) -> Tensor:
        """[rows, ids] of scaled logits -> their gradient. Overwrites `scaled`."""
        logprobs = scaled.sub_(self._largest[rows].unsqueeze(1)).sub_(self._log_total[rows].unsqueeze(1))
        share = self._share[rows].unsqueeze(1)
        if self._of_entropy is not None:
            share = share - self._of_entropy[rows].unsqueeze(1) * logprobs
        probabilities = logprobs.exp()
        absent = probabilities == 0  # there the share may have overflowed
        gradient = probabilities.mul_(share).masked_fill_(absent, 0)
        inside, column = _columns(self._targets[rows], first_id, scaled)
        gradient.scatter_add_(1, column, self._of_target[rows].masked_fill(~inside, 0).unsqueeze(1))
        self.slope[rows] += logprobs.mul_(gradient).masked_fill_(gradient == 0, 0).sum(1)
        return gradient


def spread(values: Tensor, places: Tensor, count: int) -> Tensor:
    """[..., D] at places [D] of [..., count], with zeros elsewhere."""
    return values.new_zeros(*values.shape[:-1], count).index_copy_(-1, places, values)


def _columns(targets: Tensor, first_id: int, block: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each target lies in the block, bool [rows], and its column there (0 if not), int64 [rows, 1]."""
    column = targets - first_id
    inside = (column >= 0) & (column < block.shape[1])
    return inside, column.where(inside, 0).unsqueeze(1)
