"""`tests/benchmarks/gpu.py`, at its smallest and on a CPU: the code that a CUDA device is measured and checked with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.benchmarks import gpu
from tests.benchmarks.replay import Case

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
    """With no time at all every section is named as skipped, and the values are still checked."""
    done = script("--device", "cpu", "--small", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    # The copy, dense forms, the transfer, and two dtypes of logits and of hidden.
    assert done.stdout.count(": no time left") == 3 + 2 * 2
    assert "a copy not measured" in done.stdout
    assert "| to_bool: elements unlike the CPU's | 0 |" in done.stdout
    assert done.stderr.count("\n") == 1  # the values


def test_time_that_runs_out_ends_a_section() -> None:
    """No repeat, no further case, and nothing made for one; what was measured counts."""
    bench = gpu.Bench(torch.device("cpu"), gpu.SMALL, budget_seconds=3600)
    runs = []

    def spend() -> None:
        runs.append(bench.is_over)
        bench.budget_seconds = 0

    def cases() -> Iterator[Case]:
        yield Case("rollgen", "forward", spend)
        raise AssertionError("inputs of the second case are made")

    gpu._measure_cases(bench, "section", cases, lambda _case: 1)
    assert runs == [False, True]  # a warm-up, and one run, that is measured
    assert [result.case for result in bench.results] == ["rollgen, forward"]
    assert bench.skipped == ["section: no time left for what comes after rollgen, forward"]


@pytest.mark.parametrize(
    "run",
    [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.empty(1 << 60, np.uint8)],
    ids=["of torch", "of numpy"],
)
def test_memory_of_a_cpu_that_is_too_small(run: Callable[[], object]) -> None:
    """2^60 bytes fit nowhere: the case is named, and the next one runs. Other errors are errors."""
    bench = gpu.Bench(torch.device("cpu"), gpu.SMALL, budget_seconds=3600)
    bench.measure("section", "large", run, 1)
    bench.measure("section", "small", lambda: None, 1)
    assert bench.skipped == ["section, large: out of memory"]
    assert [result.case for result in bench.results] == ["small"]
    with pytest.raises(RuntimeError, match="must match"):
        bench.measure("section", "wrong", lambda: torch.ones(2) + torch.ones(3), 1)


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """Before five minutes of measuring."""
    assert gpu.what_is_missing("cpu", tmp_path / "missing" / "numbers.json").endswith("No such file or directory")
    assert gpu.what_is_missing("cpu", tmp_path).endswith("Is a directory")
    assert gpu.what_is_missing("cpu", tmp_path / "numbers.json") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_is_one_line() -> None:
    """It is not skipped in silence, also when it was asked for: exit 2 and what to do."""
    done = script("--device", "cuda")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu: torch ")
    assert done.stderr.count("\n") == 1
