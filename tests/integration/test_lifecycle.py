"""A run that is killed, interrupted, refused and continued: real vLLM, the real command, exact cover every time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.vllm

PROMPTS, N = 120, 4
"""480 samples of 64 tokens: 10 to 20 s of sampling, so that there is something to interrupt."""
AGAIN = "starting it again"
"""What a run says of its engine."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, write_prompts: Any) -> Path:
    rows = [{"id": f"p{index}", "prompt": f"Number {index} is"} for index in range(PROMPTS)]
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture
def options(prompts: Path, tiny_model: Path, tmp_path: Path) -> list[object]:
    """A command line that commits every half second."""
    flags = ["--max-tokens", 64, "--sampling-arg", "ignore_eos=true", "--commit-interval", 0.5, "--n", N]
    flags += ["--max-num-seqs", 16]  # many short waves: something is left at the third commit, however fast it is
    return ["generate", prompts, "--model", tiny_model, "--out", tmp_path / "out", "--dtype", "float32", *flags]


def keys(out: Path) -> list[tuple[str, int]]:
    """(prompt_id, sample_index) of every stored row, sorted, duplicates kept."""
    found = []
    for file in out.glob("data/part-*.parquet"):
        table = pq.read_table(file, columns=["prompt_id", "sample_index"])
        found += list(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))
    return sorted(found)


def planned() -> list[tuple[str, int]]:
    """Every key that a complete dataset has exactly once."""
    return sorted((f"p{index}", sample) for index in range(PROMPTS) for sample in range(N))


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    """The engine processes of the command: vLLM names them so."""
    listing = subprocess.run(["ps", "-eo", "pid=,sess=,args="], capture_output=True, text=True).stdout
    return [
        int(pid)
        for pid, session, arguments in re.findall(r"^\s*(\d+)\s+(\d+)\s+(.*)$", listing, re.MULTILINE)
        if int(session) == process.pid and "EngineCore" in arguments
    ]


def restarts(out: Path) -> list[str]:
    """What the logs say of each, in their order."""
    return [line for log in sorted(out.glob("logs/*.log")) for line in log.read_text().splitlines() if AGAIN in line]


def end_engines(process: subprocess.Popen[str], number: signal.Signals, out: Path) -> None:
    """Send this signal to the engine's processes, and wait until it is started again."""
    before = len(restarts(out))
    for pid in engines_of(process):
        with suppress(ProcessLookupError):  # ended with another one of them
            os.kill(pid, number)
    while len(restarts(out)) == before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_its_engine_killed_then_interrupted_then_continued_and_stopped(
    rollgen: Any, options: list[object], tmp_path: Path, wait_for_shards: Any
) -> None:
    """Each time the engine is started again; Ctrl-C commits what is finished; --resume makes exactly the rest.

    In the second run the engine is stopped (SIGSTOP), not killed: it hangs, like a device that has died.
    """
    out, journal = tmp_path / "out", tmp_path / "out" / "journal" / "w0.jsonl"
    started = time.monotonic()
    process = rollgen.start(*options)
    wait_for_shards(out, 1, process)
    patience = max(10, (time.monotonic() - started) / 2)
    end_engines(process, signal.SIGKILL, out)
    wait_for_shards(out, journal.read_bytes().count(b"\n") + 1, process)

    os.killpg(process.pid, signal.SIGINT)  # the whole foreground group, as a terminal does
    assert process.wait(timeout=900) == 130
    stderr = rollgen.wait_until_gone(process)
    assert re.findall(rf"{AGAIN} \((\d) of 5\)", stderr) == ["1"]
    assert len(re.findall("vLLM's engine process died", stderr)) == 1
    end = stderr.rpartition(AGAIN)[2]
    assert "interrupted by SIGINT" in end
    assert "rollgen: error" not in end
    assert "Traceback" not in end
    assert not list(out.glob("data/.tmp-*"))
    before = {file.name: file.read_bytes() for file in out.glob("data/part-*.parquet")}
    stored = keys(out)
    assert 0 < len(stored) < PROMPTS * N
    assert sum(json.loads(line)["rows"] for line in journal.read_text().splitlines()) == len(stored)

    refused = rollgen(*options, "--resume", "--temperature", 0.9, code=4)
    assert "temperature (1.0 -> 0.9)" in refused.stderr
    assert "loading the model" not in refused.stderr

    # One that is silent for half as long as another took from its start to its first commit does not just take its
    # time. Yet where it does, the run is to go on.
    process = rollgen.start(*options, "--resume", "--json", "--stall-timeout", patience, "--max-restarts", 100)
    wait_for_shards(out, journal.read_bytes().count(b"\n") + 1, process)
    end_engines(process, signal.SIGSTOP, out)
    stdout, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    assert all("no token for" in line for line in restarts(out)[1:])
    summary = json.loads(stdout)
    assert summary["stored_before"] == len(stored)
    assert summary["stored"] == PROMPTS * N - len(stored)
    assert (summary["restarts"], summary["failed"]) == (len(restarts(out)) - 1, 0)
    assert keys(out) == planned()
    assert all((out / "data" / name).read_bytes() == content for name, content in before.items())


def test_killing_rollgen_alone_ends_an_engine_that_loads(rollgen: Any, options: list[object]) -> None:
    """kill -9 of the one process that could clean up: the engine's find out when they start."""
    process = rollgen.start(*options)
    while len(rollgen.members(process)) < 3:  # vLLM's resource tracker, and the engine
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    rollgen.wait_until_gone(process)
