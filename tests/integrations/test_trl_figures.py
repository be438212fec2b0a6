"""Importance ratios as they are logged, over micro-batches of different lengths."""

from __future__ import annotations

import math

import pytest
import torch

from rollgen.integrations.trl_figures import RatioFigures, partial_figures


def test_tokens_count_the_same_in_every_micro_batch() -> None:
    """One of two processes has a token, the other three and, in a second micro-batch, none; means of means differ."""
    parts = [[math.log(4)], [0.0, 0.0, -math.log(2)], [math.log(3)], []]
    partial = [partial_figures(torch.tensor(part)) for part in parts]
    figures = RatioFigures()
    figures.add(torch.cat(partial[:2]))
    figures.add(torch.cat(partial[2:]))
    assert figures.take() == {
        "sampling/sampling_logp_difference/mean": pytest.approx(math.log(24) / 5),
        "sampling/sampling_logp_difference/max": pytest.approx(math.log(4)),
        "sampling/importance_sampling_ratio/min": pytest.approx(0.5),
        "sampling/importance_sampling_ratio/mean": pytest.approx(9.5 / 5),
        "sampling/importance_sampling_ratio/max": pytest.approx(4),
    }
    assert figures.take() == {}


def test_no_token_is_no_figure() -> None:
    """All completions were masked."""
    figures = RatioFigures()
    figures.add(partial_figures(torch.empty(0)))
    assert figures.take() == {}
