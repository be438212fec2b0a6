"""Completions of the tiny model, of which everything that a recomputation has to give is known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollgen.rollouts import Completion

VOCAB_SIZE = 512
KEPT = 7
"""top_k, and the ids of a support: of the 512 they hold about four fifths of the probability."""
LENGTHS = (1, 30, 5, 17, 2, 40, 9, 9, 3, 24)
"""Generated tokens of the ten rows."""
ROUNDING = 2e-5
"""Between float32 and float64 passes of the tiny model, at most, on the figures of these rows."""


class Row(NamedTuple):
    """A completion and what a recomputation of each of its T tokens has to give, all float64."""

    completion: Completion
    masked: np.ndarray
    """[T], log pi_theta over the support."""
    full: np.ndarray
    """[T], log pi_theta over the vocabulary."""
    kl: np.ndarray
    """[T], KL(pi_old || pi_theta) over the support."""
    score: np.ndarray
    """[T], log pi_theta above its mean."""
    variance: np.ndarray
    """[T], of log pi_theta over the support."""


def log_softmax(scaled: np.ndarray) -> np.ndarray:
    """float64 [V]"""
    return scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
