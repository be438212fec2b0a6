"""A run that is killed, continued, refused and grown: real vLLM, the real command, exact cover every time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.vllm

PROMPTS, N = 120, 4
"""480 samples of 64 tokens: 10 to 20 s of sampling, so that there is something to interrupt."""


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


def planned(prompts: int = PROMPTS, n: int = N) -> list[tuple[str, int]]:
    """Every key that a complete dataset has exactly once."""
    return sorted((f"p{index}", sample) for index in range(prompts) for sample in range(n))


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    """The engine processes of the command: vLLM names them so."""
    listing = subprocess.run(["ps", "-eo", "pid=,sess=,args="], capture_output=True, text=True).stdout
    return [
        int(pid)
        for pid, session, arguments in re.findall(r"^\s*(\d+)\s+(\d+)\s+(.*)$", listing, re.MULTILINE)
        if int(session) == process.pid and "EngineCore" in arguments
    ]


@pytest.mark.timeout(600)  # four engines are loaded
def test_its_engine_killed_and_stopped_then_interrupted_and_continued(
    rollgen: Any, options: list[object], tmp_path: Path, wait_for_shards: Any
) -> None:
    """Each time the engine is started again; Ctrl-C commits what is finished; --resume makes exactly the rest.

    The second time the engine is stopped (SIGSTOP), not killed: it hangs, like a device that has died.
    """
    out, journal = tmp_path / "out", tmp_path / "out" / "journal" / "w0.jsonl"
    process = rollgen.start(*options, "--stall-timeout", 10)
    for death, kind in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        wait_for_shards(out, journal.read_bytes().count(b"\n") + 1 if death else 1, process)
        for pid in engines_of(process):
            os.kill(pid, kind)
        while sum(log.read_text().count("starting it again") for log in out.glob("logs/*.log")) == death:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    wait_for_shards(out, journal.read_bytes().count(b"\n") + 1, process)

    os.killpg(process.pid, signal.SIGINT)  # the whole foreground group, as a terminal does
    assert process.wait(timeout=60) == 130
    stderr = rollgen.wait_until_gone(process)
    assert [int(number) for number in re.findall(r"starting it again \((\d) of 5\)", stderr)] == [1, 2]
    assert len(re.findall("vLLM's engine process died", stderr)) == 1
    assert "no token for" in stderr
    end = stderr.rpartition("starting it again")[2]
    assert "interrupted by SIGINT" in end
    assert "rollgen: error" not in end
    assert "Traceback" not in end
    assert not list(out.glob("data/.tmp-*"))
    before = {file.name: file.read_bytes() for file in out.glob("data/part-*.parquet")}
    stored = keys(out)
    assert 0 < len(stored) < PROMPTS * N
    assert sum(json.loads(line)["rows"] for line in journal.read_text().splitlines()) == len(stored)

    started = time.monotonic()
    refused = rollgen(*options, "--resume", "--temperature", 0.9, code=4)
    assert "temperature (1.0 -> 0.9)" in refused.stderr
    assert time.monotonic() - started < 30, "refused before a model loads"
    assert "holds a run already" in rollgen(*options, code=2).stderr

    summary = json.loads(rollgen(*options, "--resume", "--json").stdout)
    assert summary["stored_before"] == len(stored)
    assert summary["stored"] == PROMPTS * N - len(stored)
    assert (summary["restarts"], summary["failed"]) == (0, 0)
    assert keys(out) == planned()
    assert all((out / "data" / name).read_bytes() == content for name, content in before.items())

    again = json.loads(rollgen(*options, "--resume", "--json").stdout)
    assert (again["stored_before"], again["stored"], again["owed"]) == (PROMPTS * N, 0, 0)

    fewer = [*options[: options.index("--n")], "--n", N - 1]
    assert "n: " in rollgen(*fewer, "--resume", code=4).stderr


def test_killing_rollgen_alone_ends_an_engine_that_loads(rollgen: Any, options: list[object]) -> None:
    """kill -9 of the one process that could clean up: the engine's find out when they start."""
    process = rollgen.start(*options)
    while len(rollgen.members(process)) < 3:  # vLLM's resource tracker, and the engine
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    rollgen.wait_until_gone(process)


def rows(out: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Every stored row by its key."""
    tables = [pq.read_table(file) for file in out.glob("data/part-*.parquet")]
    found = [row for table in tables for row in table.to_pylist()]
    by_key = {(row["prompt_id"], row["sample_index"], row["generation"]): row for row in found}
    assert len(by_key) == len(found)
    return by_key


def test_grown_by_samples_by_prompts_and_by_a_retry(
    rollgen: Any, tiny_model: Path, tmp_path: Path, write_prompts: Any
) -> None:
    """n 2 -> 4, ten more prompts, what was cut once more and longer, all at once: exact cover, no old row changes."""
    out, file = tmp_path / "out", tmp_path / "prompts.jsonl"
    questions = [{"id": f"p{index}", "prompt": f"Number {index} is"} for index in range(30)]
    command = ["generate", file, "--model", tiny_model, "--out", out, "--dtype", "float32", "--max-num-seqs", 4]

    write_prompts(file, questions[:20])
    rollgen(*command, "--n", 2, "--max-tokens", 24)
    first = rows(out)
    assert sorted(first) == [(*key, 0) for key in planned(20, 2)]

    cut = {key for key, row in first.items() if row["finish_reason"] == "length"}
    assert cut, "a random model rarely ends by itself"
    write_prompts(file, questions)
    retry = ["--resume", "--retry", "finish_reason=length", "--max-tokens", 48]
    summary = json.loads(rollgen(*command, "--n", 4, *retry, "--json").stdout)
    assert (summary["stored_before"], summary["stored"], summary["owed"]) == (40, 80 + len(cut), 0)
    final = rows(out)
    assert sorted(key for key in final if not key[2]) == [(*key, 0) for key in planned(30, 4)]
    assert all(final[key] == row for key, row in first.items())
    again = {key[:2]: row for key, row in final.items() if key[2] == 1}
    assert again.keys() == {key[:2] for key in cut}
    for key, row in again.items():
        before = first[(*key, 0)]
        assert (row["seed"], row["max_tokens"], before["max_tokens"]) == (before["seed"], 48, 24)
        assert row["response_length"] > 24 or row["finish_reason"] == "stop"
