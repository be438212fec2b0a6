"""Gaps of supports, by hand and against a float64 truncation in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rollgen.format.manifest import Manifest
from rollgen.ops import Support
from rollgen.verify.truncation import MASS_SLACK, Sampler, Truncation

CHANCES = (0.5, 0.25, 0.125, 0.1, 0.025)
EPS = torch.finfo(torch.float32).eps


def gap(
    mask: list[int],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    top_k_first: bool = True,
    step: float = EPS,
    chances: tuple[float, ...] = CHANCES,
) -> float:
    """Of one support, with these probabilities at the temperature; the row is the second of two."""
    logits = torch.tensor([[9.0] * len(chances), [temperature * math.log(chance) for chance in chances]])
    found = Sampler(top_k_first, step).gaps(
        logits,
        Support(torch.tensor(mask, dtype=torch.int32), torch.tensor([0, len(mask)]), len(chances)),
        Truncation(torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])),
        torch.tensor([temperature]),
        torch.tensor([1]),
    )
    return float(found[0])


def log_odds(mass: float) -> float:
    return math.log(mass / (1 - mass))


# With top_k 4 the four likeliest of CHANCES hold 0.975.
@pytest.mark.parametrize(
    ("mask", "truncation", "expected"),
    [
        pytest.param([0, 1, 2, 3], {"top_k": 4}, -math.log(1), id="top_k"),
        pytest.param([0, 1, 2, 3, 4], {"top_k": 4}, math.log(4), id="one too many"),
        pytest.param([0, 1, 2, 4], {"top_k": 4}, math.log(4), id="the fifth for the fourth"),
        pytest.param([0, 1, 2], {"top_k": 4}, log_odds(1 - MASS_SLACK) - math.log(0.875 / 0.1), id="one too few"),
        pytest.param(
            [0], {"top_k": 4, "top_p": 0.7}, log_odds(0.7 - MASS_SLACK) - math.log(0.5 / 0.475), id="top_p, too few"
        ),
        pytest.param(
            [0, 1, 2],
            {"top_k": 4, "top_p": 0.7},
            math.log(0.75 / 0.225) - log_odds(0.7 + MASS_SLACK),
            id="top_p, too many",
        ),
        # Of the whole vocabulary 0.75 is below 0.76, of the top four it is 0.769.
        pytest.param(
            [0, 1, 2],
            {"top_k": 4, "top_p": 0.76},
            math.log(0.75 / 0.225) - log_odds(0.76 + MASS_SLACK),
            id="top_p of what top_k left",
        ),
        pytest.param([0, 1, 2, 3, 4], {"min_p": 0.3}, math.log(0.15 / 0.025), id="min_p, too many"),
        pytest.param(
            [0, 1, 3],
            {"temperature": 0.5, "min_p": 0.1},
            0.5 * math.log(1.25),
            id="logits, at any temperature",
        ),
    ],
)
def test_gap_by_hand(mask: list[int], truncation: dict[str, float], expected: float) -> None:
    """The largest excess of the rules, each a quotient of the probabilities above; log-odds of 0.9999 in float32."""
    assert gap(mask, **truncation) == pytest.approx(expected, abs=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "truncation"),
    [
        pytest.param([0, 1], {"top_k": 4, "top_p": 0.7}, id="top_k, then top_p"),
        pytest.param([0, 1, 2], {"top_k": 4, "top_p": 0.76, "top_k_first": False}, id="another order"),
        pytest.param([0, 1, 2, 3, 4], {"top_k": 9}, id="a top_k that never binds"),
        pytest.param([0], {"top_k": 4, "top_p": 0.9, "min_p": 0.6}, id="min_p after top_p"),
        pytest.param([0, 1, 2], {"top_k": 2, "chances": (0.5, 0.2, 0.2, 0.1)}, id="a tie at top_k"),
        pytest.param([1, 2, 3], {"top_p": 0.5, "chances": (0.1, 0.3, 0.3, 0.3)}, id="a tie at top_p"),
        # log 0.21 and log 0.2 are 0.05 apart, and one step is 2^-7 * 1.6: an engine may see them as equal.
        pytest.param([0, 1, 2], {"top_p": 0.6, "chances": (0.5, 0.21, 0.2, 0.09), "step": 2**-5}, id="nearly a tie"),
    ],
)
def test_what_an_engine_may_keep_has_no_gap(mask: list[int], truncation: dict[str, float]) -> None:
    """Ties, another order, bounds that do nothing."""
    assert gap(mask, **truncation) <= 0  # type: ignore[arg-type]


def test_no_number_is_no_small_gap() -> None:
    """Of weights that are broken."""
    assert math.isnan(gap([0, 1], top_k=2, chances=(0.5, math.nan, 0.2)))


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_whatever_truncation_leaves_has_no_gap(top_p: float, min_p: float) -> None:
    """120 rows of two temperatures and four top_k, in blocks of a few rows, against numpy in float64."""
    rng, count, width = np.random.default_rng(0), 120, 30_000
    logits = torch.from_numpy(rng.normal(0, 3, (count, width))).float()
    temperature = torch.tensor([0.5, 1.25]).repeat(count // 2)
    top_k = torch.tensor([1, 7, 50, 40_000]).repeat(count // 4)
    scaled = logits.double().numpy() / temperature.double().numpy()[:, None]
    masks = [truncate(row, int(k), top_p, min_p) for row, k in zip(scaled, top_k, strict=True)]
    support = Support(
        torch.from_numpy(np.concatenate(masks).astype(np.int32)),
        torch.from_numpy(np.cumsum([0, *map(len, masks)])),
        width,
    )
    truncation = Truncation(top_k, torch.full((count,), top_p), torch.full((count,), min_p))
    found = Sampler(True, EPS).gaps(logits, support, truncation, temperature, torch.arange(count))
    assert found.max() < 1e-4


def truncate(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """min-p, top-k, then top-p over what is left, as vLLM has it: ids, rising."""
    order = np.argsort(-scaled)
    order = order[scaled[order] >= scaled.max() + np.log(max(min_p, 1e-300))][:top_k]
    chances = np.exp(scaled[order] - scaled.max())
    before = np.cumsum(chances / chances.sum()) - chances / chances.sum()
    return np.sort(order[before < top_p])


@pytest.mark.parametrize(
    ("processors", "top_k_first"),
    [
        pytest.param("temperature, min_p, top_k, top_p", True, id="vLLM"),
        pytest.param("top_p, top_k", False, id="the other way round"),
        pytest.param("unspecified", False, id="unknown"),
    ],
)
def test_the_manifest_says_the_order(
    make_manifest: Callable[..., Manifest], processors: str, top_k_first: bool
) -> None:
    """Of every attempt: one of another order may have made any row."""
    manifest = make_manifest()
    attempt = manifest.attempts[0]
    other = attempt.model_copy(update={"engine": attempt.engine.model_copy(update={"processors": processors})})
    manifest = manifest.model_copy(update={"attempts": [attempt, other]})
    assert Sampler.of(manifest, torch.bfloat16) == (top_k_first, 2**-7)
