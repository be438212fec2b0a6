"""`rollgen generate --ray local` with real vLLM: exact cover when nothing happens, and whatever is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq
import pytest

from rollgen.verify.dataset import verify_dataset

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PROMPTS, N = 60, 4
"""240 samples of 64 tokens."""
MARK = "MARK_OF_TEST_RAY"
"""Environment variable that tells our processes from all others: Ray's are in sessions of their own."""
REPLICA = "ray::MapWorker"
ENGINE = "EngineCore"
"""In the command lines of the processes, as Ray and vLLM name them."""


@pytest.fixture(scope="module")
def mark(rollgen: Any) -> Iterator[str]:
    """The command starts Ray in a short directory, since sockets have short names."""
    scratch = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    mark = uuid4().hex
    rollgen.environment |= {MARK: mark, "RAY_TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
    yield mark
    for pid in processes(mark):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(scratch)


@pytest.fixture
def options(mark: str, tiny_model: Path, tmp_path: Path, write_prompts: Any) -> list[object]:
    """A command line that commits every half second."""
    prompts = write_prompts(
        tmp_path / "prompts.jsonl", [{"id": f"p{index}", "prompt": f"Number {index} is"} for index in range(PROMPTS)]
    )
    flags = ["--max-tokens", 64, "--sampling-arg", "ignore_eos=true", "--commit-interval", 0.5, "--n", N, "--json"]
    model = ["--model", tiny_model, "--dtype", "float32", "--max-num-seqs", 8]
    return ["generate", prompts, "--out", tmp_path / "out", *model, "--ray", "local", *flags]


def test_a_replica_its_engine_and_the_driver_are_killed(
    rollgen: Any, options: list[object], mark: str, tmp_path: Path, wait_for_shards: Any
) -> None:
    """kill -9 of each in turn: the first two start again, and --resume with two replicas makes exactly the rest."""
    out = tmp_path / "out"
    process = rollgen.start(*options)
    wait_for_shards(out, 1, process)
    [replica] = processes(mark, REPLICA)
    engines = [pid for pid in processes(mark, ENGINE) if parent(pid) == replica]
    os.kill(replica, signal.SIGKILL)
    wait_until_gone(engines)
    wait_for_shards(out, lines(out) + 1, process)  # it may be of a shard that the dead one had finished: no engine yet
    [engine] = wait_for_engine(mark, process)
    wait_for_shards(out, lines(out) + 1, process)
    os.kill(engine, signal.SIGKILL)
    wait_until_gone([engine])
    wait_for_shards(out, lines(out) + 2, process)  # one was finished when it died
    process.kill()
    _, stderr = process.communicate()
    assert "its process ended without a word" in stderr
    assert re.search(r"vLLM's engine process died .*; the log of \S+ is /\S+\.err; Ray starts it again", stderr)
    wait_until_gone(processes(mark, REPLICA) + processes(mark, ENGINE))  # Ray's own agents take a minute
    before = {path.name: path.read_bytes() for path in out.glob("data/part-*.parquet")}

    process = rollgen.start(*options, "--resume", "--replicas", 2)
    stdout, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    assert (summary["restarts"], summary["failed"]) == (0, 0)
    assert 0 < summary["stored_before"] == PROMPTS * N - summary["stored"] < PROMPTS * N
    assert all((out / "data" / name).read_bytes() == content for name, content in before.items())
    check_whole(out)
    wait_until_gone(processes(mark, REPLICA) + processes(mark, ENGINE))


def check_whole(out: Path) -> None:
    """Every planned key once, verified clean, and nothing half written."""
    tables = [pq.read_table(path, columns=["prompt_id", "sample_index"]) for path in out.glob("data/part-*.parquet")]
    keys = [key for table in tables for key in zip(*(c.to_pylist() for c in table.columns), strict=True)]
    assert sorted(keys) == sorted((f"p{index}", sample) for index in range(PROMPTS) for sample in range(N))
    assert not list(out.glob("data/.tmp-*"))
    assert verify_dataset(out).is_clean


def lines(out: Path) -> int:
    """Commits in the journal."""
    return (out / "journal" / "w0.jsonl").read_bytes().count(b"\n")


def processes(mark: str, kind: str = "") -> list[int]:
    """Our processes, of this kind."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (place / "environ").read_bytes(), (place / "cmdline").read_bytes()
        except OSError:  # gone by now
            continue
        if f"{MARK}={mark}".encode() in environment and kind.encode() in command:
            found.append(int(place.name))
    return sorted(found)


def parent(pid: int) -> int:
    """Which process started it."""
    return int(subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True).stdout or 0)


def wait_for_engine(mark: str, process: subprocess.Popen[str]) -> list[int]:
    """The engines, once there are any."""
    while not (engines := processes(mark, ENGINE)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return engines


def wait_until_gone(pids: list[int]) -> None:
    """180 s at most."""
    deadline = time.monotonic() + 180
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
