"""Sums over tokens: chance alone is never a problem, another temperature is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollgen.verify.recomputation import SupportGaps, Temperature
from rollgen.verify.tallies import GapTally, ScoreTally


def tempered(tokens: int, seed: int, factor: float = 1.0) -> Temperature | None:
    """Of tokens that were sampled at `factor` times the temperature that is stored, from supports of 2 to 20 ids.

    Logits are far apart in most, so that the likeliest id has nearly all probability: no bell curve for a few tokens.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 21, tokens)
    logits = np.where(np.arange(20) < sizes[:, None], rng.normal(0, 3, (tokens, 20)), -np.inf)
    chosen = (logits / factor + rng.gumbel(size=logits.shape)).argmax(1)
    tally = ScoreTally()
    for part in np.array_split(np.arange(tokens), min(3, tokens)):
        new, old = log_softmax(logits[part]), log_softmax(logits[part] / factor)
        mean, at = expected(new, new), (np.arange(len(part)), chosen[part])
        variance = expected(new, (new - mean[:, None]) ** 2)
        tally.add(*(torch.from_numpy(each) for each in (new[at] - mean, variance, new[at] - old[at])))
    return tally.result()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def expected(logprobs: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(logprobs), np.exp(logprobs) * np.nan_to_num(values, posinf=0, neginf=0), 0).sum(1)


def test_chance_is_never_a_problem() -> None:
    """300 datasets of 1 to 2,000 tokens: five standard errors alone would be passed by those of a few tokens."""
    for seed in range(300):
        found = tempered(int(2000 ** (seed / 299)), seed)
        assert found is not None
        assert found.problem() is None


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_another_temperature_shows_in_the_tokens_alone(factor: float) -> None:
    """2,000 of them, whatever the log-probabilities say. Estimates are of first order."""
    found = tempered(2000, 0, factor)
    assert found is not None
    assert found.by_tokens == pytest.approx(factor, abs=0.2)
    assert np.sign(found.z_score) == np.sign(1 - factor)
    assert "the tokens say" in str(found.problem())


def test_log_probabilities_know_the_temperature_sooner() -> None:
    """600 tokens, sampled at 0.8 where 0.9 is stored: too few to tell by themselves."""
    found = tempered(600, 1, 0.8 / 0.9)
    assert found is not None
    assert found.by_logprobs == pytest.approx(0.8 / 0.9, abs=0.02)
    assert "the log-probabilities say" in str(found.problem())


def test_no_choice_says_nothing() -> None:
    """Supports of one id."""
    tally = ScoreTally()
    tally.add(*(torch.zeros(3, dtype=torch.float64) for _ in range(3)))
    assert tally.result() is None


def test_gaps_are_counted_beyond_the_tolerance() -> None:
    """Over two batches; noise is 0.5 for one of five, a mean of 0.1, so that 0.4 is far enough."""
    tally = GapTally()
    tally.add(torch.tensor([-1.0, 0.3, 2.0]), torch.tensor([-1.0, 0.3, 2.5]))
    tally.add(torch.tensor([]), torch.tensor([]))
    tally.add(torch.tensor([0.6, -torch.inf]), torch.tensor([0.6, -torch.inf]))
    assert tally.result(0.0, is_noisy=True) == SupportGaps(5, violating=2, tolerance=0.5, worst=2.0, noise=0.5)
    assert tally.result(0.0, is_noisy=False) == SupportGaps(5, violating=3, tolerance=2**-7, worst=2.0, noise=None)


def test_a_gap_that_is_no_number_is_beyond_all() -> None:
    """Of broken weights."""
    tally = GapTally()
    tally.add(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, 0.0]))
    found = tally.result(0.0, is_noisy=True)
    assert found is not None
    assert found.violating == 1
    assert found.problem() is not None


def test_nothing_judged() -> None:
    """No support was listed."""
    assert GapTally().result(0.0, is_noisy=False) is None
