"""The verdict over recomputed figures, and the figures as text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rollgen.verify.recomputation import Drift, Recomputation, describe

EXACT = Drift(mean_ratio=1 - 2e-8, standard_error=2e-7, mean_abs=5e-6, max_abs=5e-5, share_outside=0.0)
NOISY = Drift(mean_ratio=1.0008, standard_error=1.3e-3, mean_abs=3.4e-2, max_abs=0.5, share_outside=0.112)
BIASED = Drift(mean_ratio=0.922, standard_error=1.9e-3, mean_abs=9.3e-2, max_abs=0.93, share_outside=0.31)
FLOOR = Drift(mean_ratio=1.001, standard_error=1e-3, mean_abs=2.75e-2, max_abs=0.37, share_outside=0.055)


def made(**changes: Any) -> Recomputation:
    """The figures of a real float32 run, or of a bfloat16 one with `noise_floor`."""
    bfloat16 = "noise_floor" in changes
    run = Recomputation(
        model="smollm2",
        same_checkpoint=True,
        dtype="bfloat16" if bfloat16 else "float32",
        device="cpu",
        samples=64,
        unreplayable=0,
        tokens=2441,
        lowest_temperature=0.8,
        with_masks=NOISY if bfloat16 else EXACT,
        without_masks=BIASED,
        kl=2e-3,
        kl_estimator="k3",
        noise_floor=None,
    )
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        pytest.param(made(), None, id="float32"),
        pytest.param(made(noise_floor=FLOOR), None, id="bfloat16"),
        pytest.param(made(with_masks=BIASED), "|mean ratio - 1| is 7.80e-02", id="float32, biased"),
        # 5 * 1.9e-3 + 1e-3 / 0.8 is 1.1e-2
        pytest.param(
            made(with_masks=BIASED, noise_floor=FLOOR), "where rounding explains 1.1e-02", id="bfloat16, biased"
        ),
        # 1e-2 / 0.8
        pytest.param(
            made(with_masks=replace(EXACT, max_abs=0.02)),
            "the largest |delta| is 2.00e-02 with masks, where rounding explains 1.3e-02",
            id="float32, one token",
        ),
        pytest.param(
            made(with_masks=replace(EXACT, max_abs=0.02), lowest_temperature=0.1), None, id="a low temperature"
        ),
        pytest.param(
            made(with_masks=replace(EXACT, max_abs=0.02), lowest_temperature=1.5),
            "where rounding explains 1.0e-02",
            id="a high temperature does not sharpen",
        ),
        # 4 * 2.75e-2 + 1e-3 / 0.8 is 0.111
        pytest.param(
            made(with_masks=replace(NOISY, mean_abs=0.12), noise_floor=FLOOR),
            "the mean |delta| is 1.20e-01 with masks, where rounding explains 1.1e-01",
            id="bfloat16, everywhere",
        ),
        pytest.param(
            made(with_masks=replace(NOISY, max_abs=4.0), noise_floor=FLOOR),
            "the largest |delta| is 4.00e+00 with masks, where rounding explains 3.7e+00",
            id="bfloat16, one token",
        ),
        pytest.param(made(with_masks=replace(EXACT, max_abs=math.inf)), "|delta| is inf", id="outside its support"),
        pytest.param(made(with_masks=replace(EXACT, mean_ratio=math.nan)), "is nan", id="no number"),
        pytest.param(made(with_masks=BIASED, same_checkpoint=False), None, id="another checkpoint cannot tell"),
    ],
)
def test_verdict(run: Recomputation, problem: str | None) -> None:
    """Within the bounds of a dtype, or the first figure that is beyond them, with its bound."""
    found = run.problem()
    assert found is None if problem is None else problem in str(found)


def test_json_is_flat_and_finite() -> None:
    """The names that scripts rely on; null for what JSON has no number for."""
    figures = json.loads(json.dumps(made(noise_floor=FLOOR, kl=math.inf).to_json(), allow_nan=False))
    assert figures["mean_ratio"] == 1.0008
    assert figures["max_abs_delta_logprob"] == 0.5
    assert figures["mean_ratio_without_masks"] == 0.922
    assert figures["share_outside_without_masks"] == 0.31
    assert figures["tokens"] == 2441
    assert figures["noise_floor"]["mean_abs_delta_logprob"] == 2.75e-2
    assert (figures["kl"], figures["kl_estimator"], figures["problem"]) == (None, "k3", None)
    assert made().to_json()["noise_floor"] is None


def test_text_fits_a_terminal() -> None:
    """With masks and without side by side; the table within 80 columns."""
    lines = describe(made(noise_floor=FLOOR))
    assert lines[0] == "smollm2, the checkpoint that sampled, bfloat16 on cpu: 64 samples, 2,441 tokens"
    assert [line.split() for line in lines[2:3]] == [
        ["mean", "ratio", "pi_theta", "/", "pi_old", "1.000800", "0.922000"]
    ]
    assert "estimated at the sampled tokens" in lines[7]
    assert lines[8].startswith("noise floor of bfloat16: |delta| of this model against itself in float32 is 2.75e-02")
    assert max(map(len, lines[1:7])) <= 80
    assert len(describe(made())) == len(lines) - 1
