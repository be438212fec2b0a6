"""examples/02_train_step.py, run on rollouts of the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "02_train_step.py"


def test_masks_make_the_importance_ratio_one(rollouts: Path, tiny_model: Path) -> None:
    """With masks every ratio is 1, without them they are all below it; a step moves the policy.

    Without masks the mean ratio is the probability mass that was kept; top_k 8 of 512 ids cuts deep.
    """
    command = [sys.executable, SCRIPT, rollouts, "--model", tiny_model, "--learning-rate", "1e-4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    masked, unmasked = result["before"]["with masks"], result["before"]["without masks"]
    assert masked["tokens"] == unmasked["tokens"] == 3 * (5 + 9)
    assert masked["mean_ratio"] == pytest.approx(1, abs=1e-4)
    assert masked["max_logprob_difference"] < 1e-4
    assert masked["share_outside_10_percent"] == 0
    assert 0.1 < unmasked["mean_ratio"] < 0.9
    assert unmasked["share_outside_10_percent"] > 0.5
    assert result["loss"] == pytest.approx(0, abs=1)
    assert result["after"]["max_logprob_difference"] > 1e-3
