"""A loop of one's own in several processes, of which one dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models import own_loop
from models.program import Program, Running

import rollgen
from rollgen.config import digest
from rollgen.format.manifest import read_manifest


def rows(directory: Path) -> pa.Table:
    """All rows, sorted by key."""
    return pq.read_table(directory / "data").sort_by([("prompt_index", "ascending"), ("sample_index", "ascending")])


@pytest.fixture
def start(program: Program, tmp_path: Path, tiny_model: Path) -> Callable[[int, Path], Running]:
    """`start(number, release)` starts the process of that part of three; it goes beyond its half when told to."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "p{number}", "prompt": "Prompt {number}"}}\n' for number in range(31)))

    def start(number: int, release: Path) -> Running:
        return program.start(tmp_path / "out", prompts, tiny_model, number, 3, release, entry=own_loop.main)

    return start


def wait_for_lines(running: Running, count: int) -> list[str]:
    """Its standard output, once it has so many lines."""
    while running.output[0].count("\n") < count:
        assert running.alive, running.wait()
        time.sleep(0.01)
    return running.output[0].splitlines()


def test_three_processes_one_of_which_is_killed(start: Callable[[int, Path], Running], tmp_path: Path) -> None:
    """Started at once on nothing; the second is killed at its half and started again beside the others: exact cover.

    31 prompts of 2 samples: parts of 11, 10 and 10 prompts.
    """
    out, at_once, later = tmp_path / "out", tmp_path, tmp_path / "later"
    processes = [start(number, later) for number in range(3)]
    owed = ["owes 22", "owes 20", "owes 20"]
    assert [wait_for_lines(one, 2) for one in processes] == [[owes, "half"] for owes in owed]
    while not any((out / "data").glob("part-w1-*")):  # committed beside the loop
        assert processes[1].alive
        time.sleep(0.02)
    processes[1].kill()
    stored = rows(out)["prompt_index"].to_numpy()
    of_second = np.count_nonzero(stored % 3 == 1)
    assert 0 < of_second <= 10
    processes[1] = start(1, at_once)
    again = processes[1].wait()
    assert again[:2] == (0, f"owes {20 - of_second}\nhalf\ndone\n")
    assert all("committed without its journal line" in line for line in again.stderr.splitlines())  # by the kill
    later.touch()
    assert [processes[number].wait() for number in (0, 2)] == [
        (0, f"owes {owes}\nhalf\ndone\n", "") for owes in (22, 20)
    ]

    table = rows(out)
    keys = list(zip(table["prompt_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    assert keys == [(prompt, sample) for prompt in range(31) for sample in range(2)]
    manifest = read_manifest(out)
    assert len(manifest.attempts) == 4, "each start is recorded, none is lost"
    assert manifest.config_digest == digest(manifest.identity)
    for shard in (out / "data").glob("part-*.parquet"):
        number = int(shard.name.split("-")[1].removeprefix("w"))
        assert set(pq.read_table(shard)["prompt_index"].to_numpy() % 3) == {number}
    assert not list(out.glob("data/.tmp-*"))
    assert len(rollgen.RolloutDataset(out)) == 62
    assert (out / "README.md").exists()
