"""A generation that is ended from outside: at random, by a signal once and twice, by the death of its engine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from models.datasets import read_rows
from models.kills import Hunt
from models.program import Program, Running
from models.stages import Life


def test_killed_at_random(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    """Eight times, most with SIGKILL of the whole group (soak: two hundred)."""
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    toll = Hunt(program, tmp_path, tiny_model, prompts=150, kills=8, seed=seed).run()
    assert toll.kills == 8
    assert toll.stored > 300


MADE = 5
"""Samples that come at once, so that they are finished when the signal comes; the others never do."""


def start_sampling(life: Life, out: Path, **faults: object) -> Running:
    """Started, and MADE samples later; nothing is committed before the end."""
    running = life.generate(out, "--n", 2, hang_after=MADE, **faults)
    wait_for_word(running, "all hang")
    return running


def wait_for_word(running: Running, word: str) -> None:
    """Until it has said so on standard error."""
    while word not in running.output[1]:
        assert running.alive, running.wait()
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_commits_what_is_finished(
    life: Life, program: Program, tmp_path: Path, number: signal.Signals
) -> None:
    """Of the whole group, as a terminal sends it: 128 + its number, and the rest is made later."""
    out = tmp_path / "out"
    running = start_sampling(life, out)
    running.signal_group(number)
    ended = running.wait()
    assert ended.code == 128 + number, ended
    assert "Traceback" not in ended.stderr
    assert len(read_rows(out)) == MADE
    program("verify", out)
    assert life.generate(out, "--n", 2, "--resume").wait().code == 0
    assert read_rows(out) == life.stages["begin"].rows


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_at_once(life: Life, program: Program, tmp_path: Path, number: signal.Signals) -> None:
    """Though the engine hangs: nothing was committed, and nothing is wrong."""
    out = tmp_path / "out"
    running = start_sampling(life, out, stubborn=True)
    running.signal_group(number)
    wait_for_word(running, "cancelled")  # two of a kind that come together are one
    running.signal_group(number)
    assert running.wait().code == 128 + number
    assert read_rows(out) == {}
    program("verify", out)
    assert life.generate(out, "--n", 2, "--resume").wait().code == 0
    assert read_rows(out) == life.stages["begin"].rows
    program("verify", out)


def test_the_engine_is_killed_twice(life: Life, program: Program, tmp_path: Path) -> None:
    """It is started again, and the run ends as if nothing had been.

    Four samples come each time; those that come when its process is dead notice that.
    """
    out, let_through = tmp_path / "out", tmp_path / "let through"
    let_through.touch()
    options = ("--n", 2, "--commit-interval", 0.1)
    running = life.generate(out, *options, let_through=let_through, engine_process=True)
    for death in range(2):
        let_more_through(let_through, 4)
        while committed_rows(out) < 4 * (death + 1):
            assert running.alive, running.wait()
            time.sleep(0.01)
        assert subprocess.run(["pkill", "-KILL", "-P", str(running.pid)], check=False).returncode == 0
        let_more_through(let_through, 8)  # all that are asked for
        while sum(log.read_text().count("starting it again") for log in out.glob("logs/*.log")) == death:
            assert running.alive, running.wait()
            time.sleep(0.01)
    let_more_through(let_through, 24)
    assert running.wait().code == 0
    assert read_rows(out) == life.stages["begin"].rows
    program("verify", out)


def committed_rows(out: Path) -> int:
    """Of all complete lines of the journal."""
    lines = [line for journal in out.glob("journal/w0.jsonl") for line in journal.read_text().splitlines(keepends=True)]
    return sum(json.loads(line)["rows"] for line in lines if line.endswith("\n"))


def let_more_through(path: Path, count: int) -> None:
    """See `replayed.Faults.let_through`."""
    with path.open("ab") as file:
        file.write(b"." * count)
