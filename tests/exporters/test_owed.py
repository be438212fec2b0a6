"""Datasets that are not complete: what is told of them, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.rewards import write_rewards

import rollgen
from rollgen.errors import UsageError
from rollgen.exporters.export import RECORD_FILE
from rollgen.exporters.records import Records
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, Retry, create_manifest
from rollgen.format.retries import RetryList, retry_file
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.prompts.plan import PlanWriter
from rollgen.rollouts import Completion, Prompt

Write = Callable[..., Path]


@pytest.fixture
def write_part(
    tmp_path: Path,
    make_prompt: Callable[..., Prompt],
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
) -> Write:
    """`write_part(3, 2, 0)`: of prompts with three planned samples each, so many are stored, with rewards.

    The last row of the plan is a tombstone. `retried` are samples of the first prompt that are to be made again, `made`
    those of them that have been.
    """

    def write(*stored: int, retried: tuple[int, ...] = (), made: tuple[int, ...] = (), plan: bool = True) -> Path:
        directory = tmp_path / "part"
        directory.mkdir()
        prompts = [make_prompt(number, n=3) for number in range(len(stored) + 1)]
        if plan:
            with PlanWriter(directory / PLAN_FILE) as writer:
                writer.write([*prompts[:-1], replace(prompts[-1], error="f:1: no prompt")])
        manifest = make_manifest()
        if retried:
            limits = np.full(len(retried), 99, np.int32)
            listed = RetryList(1, np.zeros(len(retried), np.int64), np.array(retried, np.int32), limits)
            listed.write(directory / retry_file(1))
            manifest = manifest.with_retry(
                Retry(generation=1, started_at="", where={}, max_tokens=99, samples=len(retried))
            )
        assert create_manifest(directory, manifest)
        with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as shards:
            for prompt, count in enumerate(stored):
                for sample in range(count):
                    shards.add(make_completion(prompt, sample))
            for sample in made:
                shards.add(make_completion(0, sample, generation=1))
        write_rewards(directory, "correct", lambda row: float(row["sample_index"]))
        return directory

    return write


@pytest.mark.parametrize(
    ("stored", "features", "owed", "broken"),
    [
        pytest.param((3, 3), {}, 0, 0, id="complete"),
        pytest.param((3, 3, 0), {}, 3, 0, id="a prompt without samples"),
        pytest.param((3, 2, 0, 1), {}, 6, 2, id="parts of prompts"),  # 1 + 3 + 2
        pytest.param((3, 3), {"retried": (0, 2)}, 2, 1, id="to be made again"),
        pytest.param((3, 3), {"retried": (0, 2), "made": (0, 2)}, 0, 0, id="made again"),
    ],
)
def test_what_the_plan_says(
    stored: tuple[int, ...], features: dict[str, Any], owed: int, broken: int, write_part: Write
) -> None:
    """Tombstones owe nothing."""
    found = Records(write_part(*stored, **features)).owed
    assert found is not None
    assert (found.samples, found.broken_groups) == (owed, broken)


def test_advantages_over_half_groups_are_refused(write_part: Write, tmp_path: Path) -> None:
    """Unless they are asked for; without advantages groups do not matter. What is owed is told in any case."""
    directory = write_part(3, 2)
    with pytest.raises(UsageError, match=r"^'p1': not all of .* that is so: 1\), .*--allow-incomplete"):
        rollgen.export(directory, "jsonl", tmp_path / "out", reward="correct")
    assert not (tmp_path / "out").exists()
    assert rollgen.export(directory, "jsonl", tmp_path / "plain").owed == 1
    rollgen.export(directory, "jsonl", tmp_path / "out", reward="correct", allow_incomplete=True)
    assert json.loads((tmp_path / "out" / RECORD_FILE).read_text())["owed"] == 1


@pytest.mark.parametrize(("stored", "warned"), [((3, 2), True), ((3, 3), False)], ids=["unequal", "equal"])
def test_without_a_plan_nobody_knows(stored: tuple[int, ...], warned: bool, write_part: Write, tmp_path: Path) -> None:
    """A copy need not have it: groups of several sizes are then told of."""
    exported = rollgen.export(write_part(*stored, plan=False), "jsonl", tmp_path / "out", reward="correct")
    assert exported.owed is None
    assert any(line.startswith("prompts have from 2 to 3 samples") for line in exported.advice) == warned
