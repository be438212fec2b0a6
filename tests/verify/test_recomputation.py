"""The verdict over recomputed figures, and the figures as text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from rollgen.verify.recomputation import Drift, Recomputation, SupportGaps, Temperature, describe, support_tolerance

EXACT = Drift(mean_ratio=1 - 2e-8, standard_error=2e-7, mean_abs=5e-6, max_abs=5e-5, share_outside=0.0)
NOISY = Drift(mean_ratio=1.0008, standard_error=1.3e-3, mean_abs=3.4e-2, max_abs=0.5, share_outside=0.112)
BIASED = Drift(mean_ratio=0.922, standard_error=1.9e-3, mean_abs=9.3e-2, max_abs=0.93, share_outside=0.31)
FLOOR = Drift(mean_ratio=1.001, standard_error=1e-3, mean_abs=2.75e-2, max_abs=0.37, share_outside=0.055)
RIGHT = Temperature(by_tokens=1.06, tokens_error=0.03, largest_score=3.5, by_logprobs=1.0016, logprobs_error=0.0023)
SOUND = SupportGaps(tokens=2304, violating=1, tolerance=0.25, worst=0.27, noise=1.7)
EXACT_SUPPORTS = SupportGaps(tokens=2441, violating=0, tolerance=0.0078125, worst=-2e-4, noise=None)


def made(**changes: Any) -> Recomputation:
    """The figures of a real float32 run, or of a bfloat16 one with `noise_floor`."""
    bfloat16 = "noise_floor" in changes
    run = Recomputation(
        model="smollm2",
        same_checkpoint=True,
        dtype="bfloat16" if bfloat16 else "float32",
        device="cpu",
        samples=64,
        replayable=64,
        unreplayable=0,
        tokens=2441,
        step=0.36 if bfloat16 else 5e-6,
        lowest_temperature=0.8,
        with_masks=NOISY if bfloat16 else EXACT,
        without_masks=BIASED,
        kl=2e-3,
        kl_estimator="k3",
        noise_floor=None,
        temperature=RIGHT,
        supports=SOUND if bfloat16 else EXACT_SUPPORTS,
        not_judged=None,
    )
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        pytest.param(made(), None, id="float32"),
        pytest.param(made(noise_floor=FLOOR), None, id="bfloat16"),
        pytest.param(made(with_masks=BIASED), "|mean ratio - 1| is 7.80e-02", id="float32, biased"),
        # 5 * 1.9e-3 + 1e-3 / 0.8, and 10 * 0.36 / 0.8 / 2441, is 1.3e-2
        pytest.param(
            made(with_masks=BIASED, noise_floor=FLOOR), "where rounding explains 1.3e-02", id="bfloat16, biased"
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
        # 4 * 2.75e-2 + 1e-3 / 0.8 + 10 * 0.36 / 0.8 / 2441 is 0.113
        pytest.param(
            made(with_masks=replace(NOISY, mean_abs=0.12), noise_floor=FLOOR),
            "the mean |delta| is 1.20e-01 with masks, where rounding explains 1.1e-01",
            id="bfloat16, everywhere",
        ),
        pytest.param(
            made(with_masks=replace(NOISY, max_abs=5.0), noise_floor=FLOOR),
            "the largest |delta| is 5.00e+00 with masks, where rounding explains 4.5e+00",
            id="bfloat16, one token",
        ),
        pytest.param(made(with_masks=replace(EXACT, max_abs=math.inf)), "|delta| is inf", id="outside its support"),
        pytest.param(made(with_masks=replace(EXACT, mean_ratio=math.nan)), "is nan", id="no number"),
        # One token says nothing about its own noise: 10 * 0.36 / 0.8 is allowed.
        pytest.param(
            made(
                with_masks=replace(NOISY, mean_ratio=1.3, standard_error=0.0, mean_abs=0.26, max_abs=0.26),
                noise_floor=replace(FLOOR, mean_abs=0.0, max_abs=0.0),
                tokens=1,
            ),
            None,
            id="bfloat16, one token in all",
        ),
        pytest.param(made(replayable=64, unreplayable=64), None, id="half could be compared"),
        pytest.param(
            made(replayable=64, unreplayable=65), "most samples were not compared: 65 of 129", id="most could not"
        ),
        pytest.param(made(supports=None, temperature=None), None, id="nothing was truncated, nothing was open"),
        pytest.param(made(with_masks=BIASED, same_checkpoint=False), None, id="another checkpoint cannot tell"),
    ],
)
def test_verdict(run: Recomputation, problem: str | None) -> None:
    """Within the bounds of a dtype, or the first figure that is beyond them, with its bound."""
    found = run.problem()
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({}, None, id="sound"),
        # 0.005 * 2304 + 5 * sqrt(0.005 * 2304) + 8.3 is 36.8
        pytest.param({"violating": 36}, None, id="as many as rounding explains"),
        pytest.param({"violating": 37}, "37 of 2,304 supports are not what top_k", id="more"),
        pytest.param({"worst": 6.7}, None, id="as far"),
        pytest.param({"worst": 6.9}, "by 6.9 at most, where rounding explains 36 and 6.8", id="further"),
        pytest.param({"worst": math.nan}, "by nan at most", id="no number"),
        pytest.param({"noise": None, "violating": 1, "worst": 0.3}, "where rounding explains 0 and 0.25", id="float32"),
    ],
)
def test_verdict_over_supports(changes: dict[str, Any], problem: str | None) -> None:
    """In float32 none may be off; below by share, and one by more than the noise of its gap."""
    found = replace(SOUND, **changes).problem()
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({}, None, id="right"),
        # 5 * 0.03 + 8.3 * 3.5 * 0.03**2 + 0.05 is 0.226
        pytest.param({"by_tokens": 1.22}, None, id="chance"),
        pytest.param({"by_tokens": 1.23}, "the tokens say that the temperature was 1.230 times", id="tokens"),
        # 5 * 0.0023 + 0.01 is 0.0215
        pytest.param({"by_logprobs": 0.98}, None, id="noise"),
        pytest.param({"by_logprobs": 0.889}, "explain ± 0.021", id="0.9 is stored for 0.8"),
        pytest.param({"by_logprobs": math.nan}, "the log-probabilities say", id="no number"),
        pytest.param({"by_tokens": 5.0, "tokens_error": 0.9, "largest_score": 1.2}, None, id="few tokens"),
    ],
)
def test_verdict_over_the_temperature(changes: dict[str, float], problem: str | None) -> None:
    """What tokens and log-probabilities say, within chance and rounding."""
    found = replace(RIGHT, **changes).problem()
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("noise", "step", "tokens", "tolerance"),
    [
        pytest.param(0.058, 0.36, 2304, 0.25, id="a real run"),  # 0.2336
        pytest.param(0.0, 0.36, 1, 4.0, id="one token"),  # 3.6
        pytest.param(0.0, 0.0, 9, 2**-7, id="never below that of float32"),
        pytest.param(1e9, 0.36, 9, 64.0, id="at most 64"),
    ],
)
def test_tolerance_of_a_gap(noise: float, step: float, tokens: int, tolerance: float) -> None:
    """The next power of two above 4 * noise + 10 * step / tokens."""
    assert support_tolerance(noise, step, tokens) == tolerance


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
    assert figures["supports"] == {"judged": 2304, "violating": 1, "tolerance": 0.25, "worst_gap": 0.27}
    assert figures["temperature"]["z_score"] == pytest.approx(-2)
    assert figures["temperature"]["ratio_by_logprobs"] == 1.0016
    assert (figures["replayable"], figures["unreplayable"]) == (64, 0)
    bare = made(temperature=None, supports=None).to_json()
    assert bare["noise_floor"] is bare["temperature"] is bare["supports"] is None


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
    assert lines[9:11] == [
        "temperature, sampled / stored: 1.060 ± 0.030 by the tokens (z -2.0), 1.0016 ± 0.0023 by the log-probabilities",
        "supports against the model's logits: 2,304 judged, 1 off by more than 0.25 logits, the worst by 0.27",
    ]
    assert len(describe(made())) == len(lines) - 1
    assert describe(made(unreplayable=9))[1].startswith("NOT COMPARED: 9 of 73 samples")
    assert describe(made(supports=None, temperature=None))[-3:-1] == [
        "temperature: no token had a choice that would show it",
        "supports: not judged, nothing was truncated",
    ]


def test_the_last_line_is_the_verdict() -> None:
    """What was found beside what rounding explains, or what is wrong, or that nothing is proved."""
    assert describe(made())[-1].startswith("it replays: |mean ratio - 1| is 2.0e-08 of at most ")
    assert re.fullmatch(
        r"it replays: \|mean ratio - 1\| is .* of at most .*, the mean \|delta\| is .* of at most .*, "
        r"the largest \|delta\| is .* of at most .*, which rounding explains",
        made(noise_floor=FLOOR).verdict(),
    )
    wrong = made(with_masks=BIASED)
    assert wrong.verdict() == f"wrong: {wrong.problem()}"
    assert made(same_checkpoint=False).verdict().endswith("a local copy has a fingerprint of its own")
