"""`tests/benchmarks/gpu.py`, at its smallest and on a CPU: the code that a CUDA device is measured and checked with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def script(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.gpu", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_section_runs(tmp_path: Path) -> None:
    """Each section appears, nothing is skipped, and every value is right within its limit."""
    file = tmp_path / "numbers.json"
    done = script("--device", "cpu", "--small", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(file.read_text())
    sections = [result["section"] for result in numbers["results"]]
    # Copy and memset, three dense forms, one transfer; for each of two dtypes 2 x 2 cases of logits, 2 x 3 of hidden.
    assert len(sections) == 2 + 3 + 1 + 2 * (4 + 6)
    assert numbers["skipped"] == []
    assert "| logits, N 8, float32 | rollgen, forward + backward |" in done.stdout
    # Two dtypes: value and gradient of logits; value, two gradients and repeats of hidden. Three dense forms.
    assert len(numbers["checks"]) == 2 * (2 + 4) + 3
    assert all(check["error"] <= check["limit"] for check in numbers["checks"])


def test_nothing_is_measured_after_the_time_is_up() -> None:
    """With no time at all every case is named as skipped, and the values are still checked."""
    done = script("--device", "cpu", "--small", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": no time left") == 2 + 3 + 1 + 2 * (4 + 6)
    assert "| to_bool: elements unlike the CPU's | 0 |" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_is_one_line() -> None:
    """It is not skipped in silence: exit 2 and what to do."""
    done = script()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu: torch ")
    assert done.stderr.count("\n") == 1
