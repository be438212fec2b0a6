"""Several engines at one dataset: `--replicas`, and the processes of a job array."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from rollgen.verify.dataset import verify_dataset

pytestmark = pytest.mark.vllm

REPOSITORY = Path(__file__).parents[2]
TASKS = 4
SETTINGS = (
    *("--dtype", "float32", "--top-k", 20, "--max-tokens", 24, "--max-model-len", 128),
    *("--max-num-seqs", 8, "--commit-interval", 0.5),
)
"""Of every run. Few sequences at a time: else all samples end together, and the first commit is the last."""
PROMPTS = 120
"""Enough that something is left to do when the first commit has come."""


@pytest.fixture
def prompts(write_prompts: Callable[..., Path], tmp_path: Path) -> Path:
    rows = [{"id": f"p{index}", "prompt": f"Number {index} is"} for index in range(PROMPTS)]
    return write_prompts(tmp_path / "prompts.jsonl", rows)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 900) -> None:
    """Until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def keys(out: Path) -> list[tuple[str, int]]:
    """Of all rows that are stored."""
    table = pq.read_table(out / "data", columns=["prompt_id", "sample_index"])
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def is_engine(process: psutil.Process) -> bool:
    """Not of one that has ended meanwhile."""
    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def test_replicas_and_the_death_of_one(rollgen: Any, tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    """Two engines of one process; one is killed at work: the other goes on, every sample is there once."""
    out = tmp_path / "out"
    running = rollgen.start(
        "generate",
        prompts,
        "--model",
        tiny_model,
        "--out",
        out,
        *SETTINGS,
        "--replicas",
        2,
        "--n",
        8,
        "--json",
    )
    wait_for(lambda: any((out / "data").glob("part-*")) or running.poll() is not None, "no commit")
    engines = [child for child in psutil.Process(running.pid).children(recursive=True) if is_engine(child)]
    assert len(engines) == 2
    engines[0].kill()
    stdout, stderr = running.communicate(timeout=900)
    assert running.returncode == 0, stderr
    summary = json.loads(stdout)
    assert (summary["stored"], summary["owed"], summary["failed"], summary["restarts"]) == (PROMPTS * 8, 0, 0, 1), (
        summary
    )
    assert len(keys(out)) == len(set(keys(out))) == PROMPTS * 8
    assert verify_dataset(out).is_clean
    assert not any(engine.is_running() for engine in engines)


@pytest.fixture
def array(
    tiny_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollgen: Any
) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """`array(task)` starts a task of `examples/slurm.sbatch` as Slurm would."""
    running: list[subprocess.Popen[str]] = []

    def start(task: int) -> subprocess.Popen[str]:
        slurm = {"TASK_ID": task, "TASK_MIN": 0, "TASK_MAX": TASKS - 1, "TASK_STEP": 1, "TASK_COUNT": TASKS}
        environment = {f"SLURM_ARRAY_{name}": str(value) for name, value in slurm.items()}
        command = [prompts, "--model", tiny_model, "--out", tmp_path / "out", *SETTINGS, "--n", 8]
        process = subprocess.Popen(
            ["bash", REPOSITORY / "examples" / "slurm.sbatch", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=rollgen.scratch,
            env=os.environ
            | rollgen.environment
            | {"PATH": f"{rollgen.directory}:{os.environ['PATH']}", "TMPDIR": str(rollgen.scratch)}
            | environment,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_a_job_array(array: Callable[[int], subprocess.Popen[str]], rollgen: Any, tmp_path: Path) -> None:
    """All processes begin one dataset together; one is killed and comes back: every sample is there once."""
    out = tmp_path / "out"
    tasks = [array(task) for task in range(TASKS)]
    wait_for(lambda: (out / "journal" / f"s1of{TASKS}.jsonl").exists() or tasks[1].poll() is not None, "no commit")
    os.killpg(tasks[1].pid, signal.SIGKILL)
    tasks[1].communicate(timeout=900)
    tasks[1] = array(1)
    for task in tasks:
        log, _ = task.communicate(timeout=900)
        assert task.returncode == 0, log
    assert len(keys(out)) == len(set(keys(out))) == PROMPTS * 8
    assert verify_dataset(out).is_clean
    assert len(json.loads((out / "rollgen.json").read_text())["attempts"]) == TASKS + 1
