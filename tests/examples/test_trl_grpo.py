"""examples/05_trl_grpo.py, run on rollouts of the tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


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
