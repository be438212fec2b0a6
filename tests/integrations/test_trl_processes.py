"""TRL on stored rollouts in two processes, as accelerate runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from models.ports import free_port

TESTS = Path(__file__).parents[1]


def test_processes_share_an_epoch(tmp_path: Path, tiny_model: Path, make_dataset: Callable[..., Path]) -> None:
    """Of 6 groups of 2 each process takes 3 samples a step: 2 steps an epoch, in which no sample is used twice.

    The second group of a step lies across both. Completions have 8 tokens each, so that the mean over processes is that
    over tokens, whoever has which: at a learning rate of 0 it is the same in both epochs.
    """
    stored = make_dataset(tmp_path / "stored", shards=2, prompts=3, n=2)
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "models.trl_program", stored, tiny_model, tmp_path / "output"],
            cwd=TESTS,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, second = (json.loads(process.communicate(timeout=720)[0].splitlines()[-1]) for process in processes)
    finally:
        for process in processes:  # one waits for ever for the other, if that dies
            process.kill()
            process.wait()
    steps = [one + other for one, other in zip(first["loaded"], second["loaded"], strict=True)]
    assert [len(step) for step in steps] == [6] * 4
    for step in steps:  # sample 2 k and 2 k + 1 are a group
        assert all(step[place + 1] == step[place] + 1 for place in range(0, 6, 2))
    for epoch in (steps[:2], steps[2:]):
        assert Counter(number for step in epoch for number in step) == dict.fromkeys(range(12), 1)
    assert steps[:2] != steps[2:]
    ratios = [entry["sampling/importance_sampling_ratio/mean"] for entry in first["logged"][:4]]
    assert sum(ratios[:2]) == pytest.approx(sum(ratios[2:]), rel=1e-4)
