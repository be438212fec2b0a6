"""Random supports, and what the log-probability ops have to return over them: row by row in float64 numpy.

The oracle shares no code with the ops or with their dense twins, and gets its gradients from the textbook.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rollgen.ops import Support

SHAPES = [
    pytest.param([1], 1, 0, id="one id in all"),
    pytest.param([3, 1, 7, 7, 2], 7, 0, id="up to the vocabulary"),
    pytest.param([5, 0, 1, 0, 13], 13, 4, id="full rows and a padded vocabulary"),
    pytest.param([0, 0, 0], 101, 3, id="full rows only"),
    pytest.param([1] * 17, 33, 0, id="singletons only"),
    pytest.param([1, 62, 50, 3, 1, 1, 229], 501, 11, id="like a real batch"),
    pytest.param([], 5, 1, id="no rows"),
]
"""Lengths of the rows (0 is a full row), the vocabulary, and how many columns the logits have beyond it."""


def draw(lengths: list[int], vocab_size: int, generator: torch.Generator) -> Support:
    """A support with rows of these lengths; 0 is a full row."""
    rows = [torch.randperm(vocab_size, generator=generator)[:length].sort().values for length in lengths]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *rows])
    return Support(ids.int(), torch.tensor([0, *lengths]).cumsum(0), vocab_size)


def draw_targets(support: Support, generator: torch.Generator) -> Tensor:
    """One id of each row's support, at random."""
    weights = support.to_bool().float()
    return weights.multinomial(1, generator=generator).squeeze(1) if len(support) else torch.empty(0, dtype=torch.int64)


class Expected(NamedTuple):
    """float64 arrays."""

    logprobs: np.ndarray
    """[N]"""
    entropy: np.ndarray
    """[N]"""
    log_kept_mass: np.ndarray
    """[N]"""
    gradient: np.ndarray
    """[N, V], in the logits, of the sum of each of the three times its weight."""


def oracle(
    logits: np.ndarray,
    support: Support,
    targets: Tensor,
    temperature: Tensor,
    weights: tuple[float, float, float] = (1, 0, 0),
) -> Expected:
    """From raw float64 logits [N, V] and temperatures [N]; `weights` of log-probability, entropy and log kept mass."""
    results, gradient = np.empty((3, len(support))), np.zeros(logits.shape)
    for row, scale in enumerate(temperature.double().tolist()):
        start, stop = support.offsets[row : row + 2].tolist()
        ids = support.ids[start:stop].numpy() if stop > start else np.arange(support.vocab_size)
        kept, kept_total = log_softmax(logits[row, ids] / scale)
        whole, whole_total = log_softmax(logits[row, : support.vocab_size] / scale)
        mass = np.exp(kept)
        entropy = -(mass * kept).sum()
        target = ids.tolist().index(int(targets[row]))
        results[:, row] = kept[target], entropy, kept_total - whole_total
        gradient[row, ids] += (weights[2] - weights[0] - weights[1] * (kept + entropy)) * mass / scale
        gradient[row, targets[row]] += weights[0] / scale
        gradient[row, : support.vocab_size] -= weights[2] * np.exp(whole) / scale
    return Expected(*results, gradient)


def log_softmax(scaled: np.ndarray) -> tuple[np.ndarray, float]:
    """With the log-sum-exp."""
    total = scaled.max() + np.log(np.exp(scaled - scaled.max()).sum())
    return scaled - total, total
