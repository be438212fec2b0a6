"""The log file of an attempt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models.fake_engine import FakeEngine
from models.runs import Runs

from rollgen.errors import EngineError, UsageError

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \S.*")


def logs(out: Path) -> list[list[str]]:
    """The lines of all logs, oldest first."""
    return [path.read_text().splitlines() for path in sorted((out / "logs").glob("*-w0.log"))]


def test_an_attempt_leaves_a_log(runs: Runs) -> None:
    """Phases, the engine, the totals, the end: a line each, with its time."""
    runs()
    [lines] = logs(runs.out)
    assert all(LINE.fullmatch(line) for line in lines)
    text = "\n".join(line.split(" ", 1)[1] for line in lines)
    assert text.startswith("phase: check\nphase: load\n")
    assert "fake 1 on cpu, tiny, logprobs" in text
    assert "phase: generate" in text
    assert re.search(r"stored 10 of 10, this attempt 10 \(\d+ tokens in \d+ s\), failed 0, restarts 0\nended$", text)


def test_an_error_is_its_last_line(runs: Runs) -> None:
    """Whatever ended the attempt."""

    async def dies(request: object) -> None:
        raise EngineError("out of memory\nin many lines")

    with pytest.raises(EngineError):
        runs(FakeEngine(before=dies), max_restarts=0)
    [lines] = logs(runs.out)
    assert r" ended: EngineError: out of memory\nin many lines; finished samples" in lines[-1]


def test_a_refused_start_leaves_none(runs: Runs) -> None:
    """Nothing is left behind at all."""
    with pytest.raises(UsageError):
        runs(prompt_column="nowhere")
    assert not runs.out.exists()


def test_directories_with_spaces_are_left_out(runs: Runs) -> None:
    """Where the run and its prompts are is nobody's business, however the directories are called."""
    here = runs.out.parent / "my dir" / "al ice"
    here.mkdir(parents=True)
    runs.out = here / "set"
    runs()
    shard = next((runs.out / "data").glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    runs(resume=True)
    assert f"{shard}: its SHA-256" in "\n".join(runs.reporter.notes)
    assert " data/part-w0-000000.parquet: its SHA-256" in "\n".join(map("\n".join, logs(runs.out)))
    assert "al ice" not in str(logs(runs.out))
