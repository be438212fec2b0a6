"""examples/05_trl_grpo.py, run on rollouts of the tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rollgen.errors import UsageError


def test_ratios_of_trl_are_one_with_masks(
    load_example: Callable[[str], ModuleType],
    rollouts: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the first step, which is all 3 groups. Without masks they are the mass that was kept."""
    size = ["--steps", 2, "--micro-batch", 2, "--accumulate", 3, "--learning-rate", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["trl", *map(str, [rollouts, "--model", tiny_model, *size, "--json"])])
    load_example("05_trl_grpo").main()
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second = runs["with masks"]
    assert first["mean_ratio"] == pytest.approx(1, abs=1e-4)
    assert first["smallest_ratio"] == pytest.approx(1, abs=1e-4)
    assert first["largest_ratio"] == pytest.approx(1, abs=1e-4)
    assert first["clipped"] == 0
    assert second["logprob_difference"] > 1e-3
    unmasked, _ = runs["without masks"]
    assert 0.1 < unmasked["mean_ratio"] < 0.9
    assert unmasked["clipped"] > 0
    assert unmasked["entropy"] > first["entropy"]
    assert unmasked["reward"] == first["reward"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(["--num-generations", "3"], "a divisor of the 8 rollouts of a step", id="groups"),
        pytest.param(["--num-generations", "1"], "--num-generations 1: 2 or more", id="one"),
        pytest.param(["--steps", "0"], "0 is not above 0", id="steps"),
    ],
)
def test_sizes_that_cannot_be_are_usage_errors(
    load_example: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    message: str,
) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(sys, "argv", ["trl", "nowhere", *given])
    with pytest.raises(SystemExit) as stopped:
        load_example("05_trl_grpo").main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_is_a_usage_error(load_example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """By one line."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no model can be loaded from there: .*; give another with --model$"):
        load_example("05_trl_grpo").load_model(str(tmp_path / "empty"))
