"""Sums over the tokens of a recomputation, one batch after the other, and the figures that they come to."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rollgen.verify.recomputation import OUTSIDE, TOLERANCES, Drift, SupportGaps, Temperature, support_tolerance


class DriftTally:
    """Sums over tokens; of ratios those of ratio - 1, so that no digits are lost near 1."""

    def __init__(self) -> None:
        self.tokens = 0
        self._excess, self._squares, self._abs, self._outside = 0.0, 0.0, 0.0, 0
        self._max_abs = 0.0

    def add(self, delta: Tensor) -> None:
        """float64 [N]"""
        excess = torch.expm1(delta)
        self.tokens += delta.numel()
        self._excess += float(excess.sum())
        self._squares += float(excess.square().sum())
        self._abs += float(delta.abs().sum())
        self._outside += int((excess.abs() > OUTSIDE).sum())
        self._max_abs = float(np.maximum(self._max_abs, float(delta.abs().max())))  # NaN stays

    def drift(self) -> Drift:
        """Of the tokens added, one at least."""
        mean = self._excess / self.tokens
        return Drift(
            mean_ratio=1 + mean,
            standard_error=math.sqrt(max(0.0, self._squares / self.tokens - mean**2) / self.tokens),
            mean_abs=self._abs / self.tokens,
            max_abs=self._max_abs,
            share_outside=self._outside / self.tokens,
        )


class GapTally:
    """How many supports have a gap beyond each tolerance, and how much two passes differ about the gaps."""

    def __init__(self) -> None:
        self._tokens, self._worst = 0, -math.inf
        self._beyond = torch.zeros(len(TOLERANCES), dtype=torch.int64)
        self._noise, self._largest_noise, self._compared = 0.0, 0.0, 0

    def add(self, gaps: Tensor, others: Tensor) -> None:
        """float32 [L] each, of the listed supports: by the pass that judges, and by that in the dataset's dtype."""
        if not gaps.numel():
            return
        self._tokens += gaps.numel()
        self._worst = float(np.maximum(self._worst, float(gaps.max())))  # NaN stays, and is beyond all
        self._beyond += (~(gaps.cpu().unsqueeze(1) <= torch.tensor(TOLERANCES))).sum(0)
        noise = (gaps - others).abs()
        noise = noise[noise.isfinite()]
        if noise.numel():
            self._noise += float(noise.sum(dtype=torch.float64))
            self._largest_noise = max(self._largest_noise, float(noise.max()))
            self._compared += noise.numel()

    def result(self, step: float, *, is_noisy: bool) -> SupportGaps | None:
        """None when nothing was judged. `step`: of the largest logit."""
        if not self._tokens:
            return None
        noise = self._noise / max(1, self._compared)
        tolerance = support_tolerance(noise, step, self._tokens) if is_noisy else TOLERANCES[0]
        return SupportGaps(
            tokens=self._tokens,
            violating=int(self._beyond[TOLERANCES.index(tolerance)]),
            tolerance=tolerance,
            worst=self._worst,
            noise=max(self._largest_noise, step) if is_noisy else None,
        )


class ScoreTally:
    """Sums of scores over tokens, and of what the stored log-probabilities say about them."""

    def __init__(self) -> None:
        self._score, self._variance, self._largest = 0.0, 0.0, 0.0
        self._product, self._products, self._squares = 0.0, 0.0, 0.0

    def add(self, score: Tensor, variance: Tensor, delta: Tensor) -> None:
        """float64 [N] each."""
        product = delta * score
        self._score += float(score.sum())
        self._variance += float(variance.sum())
        self._largest = max(self._largest, float(score.abs().max()))
        self._product += float(product.sum())
        self._products += float(product.square().sum())
        self._squares += float(score.square().sum())

    def result(self) -> Temperature | None:
        """None when no token had a choice."""
        if not (self._variance > 0 and self._squares > 0):
            return None
        return Temperature(
            by_tokens=1 - self._score / self._variance,
            tokens_error=self._variance**-0.5,
            largest_score=self._largest,
            by_logprobs=1 + self._product / self._squares,
            logprobs_error=math.sqrt(self._products) / self._squares,
        )
