"""`rollgen score` killed with all its processes, again and again: each sample is scored once, and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from models.datasets import read_rows

from rollgen.format.rewards import list_parts

HELD = (7, 14)
"""Of twenty prompts, for each kill: what the next one finds to do."""
PROGRAM = """
import rollgen.curate.score
rollgen.curate.score.COMMIT_SECONDS = 0.0
from rollgen.cli.app import main
if __name__ == "__main__":
    main()
"""
GRADERS = """
import json, time
from pathlib import Path

def slow(answers):
    time.sleep(0.1)
    held = Path(__file__).with_name("held")
    while held.exists() and any(a.metadata["answer"] >= int(held.read_text()) for a in answers):
        time.sleep(0.1)
    with Path(__file__).with_name("calls").open("a") as file:
        file.write("".join(json.dumps([a.prompt_id, a.sample_index, a.generation]) + "\\n" for a in answers))
    return [float(a.metadata["answer"]) for a in answers]

def again(answers):
    return [value + 0.5 for value in slow(answers)]
"""
Key = tuple[str, int, int]


class Scoring:
    """`rollgen score` in a process group of its own."""

    def __init__(self, directory: Path, dataset: Path) -> None:
        self.dataset = dataset
        self.directory = directory
        directory.mkdir()
        (directory / "graders.py").write_text(GRADERS)
        (directory / "program.py").write_text(PROGRAM)

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "program.py",
            "score",
            self.dataset,
            "--processes",
            "2",
            "--batch-size",
            "2",
            *options,
        ]
        return subprocess.Popen(
            list(map(str, command)),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def called(self) -> list[Key]:
        """What functions were given since the last time; a line that was cut off is none."""
        log = self.directory / "calls"
        text = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        return [tuple(json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]

    def stored(self, name: str, scoring: int) -> list[tuple[Key, float]]:
        """Every row of a scoring."""
        rows = []
        for path in list_parts(self.dataset, name):
            table = pq.read_table(path)
            if json.loads(table.schema.metadata[b"rollgen.rewards"])["scoring"] == scoring:
                rows += [((r["prompt_id"], r["sample_index"], r["generation"]), r["reward"]) for r in table.to_pylist()]
        return rows

    def kill_at_random(self, name: str, scoring: int, chance: random.Random, *options: str, held: int) -> None:
        """Start it, and kill it some moment after it has committed something; it gets no further than prompt `held`."""
        (self.directory / "held").write_text(str(held))
        before = self.stored(name, scoring)
        running = self.start(*options)
        while running.poll() is None and len(self.stored(name, scoring)) <= len(before):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.3))
        killed = running.poll() is None
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(running.pid, signal.SIGKILL)
        _, error = running.communicate(timeout=180)
        assert killed, error
        (self.directory / "held").unlink()
        assert not {key for key, _ in before} & set(self.called()), "what had a reward was scored again"


@pytest.fixture
def scoring(tmp_path: Path, make_dataset: Callable[..., Path]) -> Scoring:
    """80 samples, four seconds of work."""
    return Scoring(tmp_path / "work", make_dataset(tmp_path / "run", shards=4, prompts=5, n=4))


def finish(scoring: Scoring, *options: str) -> None:
    running = scoring.start(*options)
    output, error = running.communicate(timeout=180)
    assert running.returncode == 0, error
    assert "could not" not in output


def test_each_sample_is_scored_once(scoring: Scoring) -> None:
    """What was committed before a kill is not scored again; in the end every sample has one reward, the right one."""
    chance = random.Random(5)
    options = ("--with", "graders:slow")
    for held in HELD:
        scoring.kill_at_random("slow", 1, chance, *options, held=held)
    finish(scoring, *options)
    rewards = scoring.stored("slow", 1)
    assert len(rewards) == 80
    assert dict(rewards) == {key: float(row["prompt_index"]) for key, row in read_rows(scoring.dataset).items()}
    assert not list((scoring.dataset / "rewards").glob(".tmp-*"))


def test_a_rescoring_is_all_or_nothing(scoring: Scoring) -> None:
    """At every kill the rewards in force are those of the old function, and in the end all those of the new."""
    chance = random.Random(7)
    finish(scoring, "--with", "graders:slow", "--name", "r")
    scoring.called()
    old = scoring.stored("r", 1)
    options = ("--with", "graders:again", "--name", "r", "--rescore")
    for held in HELD:
        scoring.kill_at_random("r", 2, chance, *options, held=held)
        assert scoring.stored("r", 1) == old
    finish(scoring, *options)
    assert scoring.stored("r", 1) == []
    rows = read_rows(scoring.dataset)
    assert dict(scoring.stored("r", 2)) == {key: row["prompt_index"] + 0.5 for key, row in rows.items()}
