"""Datasets that are not complete: what is told of them, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.rewards import write_rewards
from models.storage import send

import rollgen
from rollgen.errors import MissingFile, UsageError
from rollgen.exporters.export import RECORD_FILE
from rollgen.exporters.records import Records
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import Manifest, Retry, create_manifest, read_manifest, replace_manifest
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
        pytest.param((3, 3), {}, 0, "", id="complete"),
        pytest.param((3, 3, 0), {}, 3, "", id="a prompt without samples"),
        pytest.param((3, 2, 0, 1), {}, 6, r"'p1': .* so: 2\)", id="parts of prompts"),  # 1 + 3 + 2
        pytest.param((3, 3), {"retried": (0, 2)}, 2, r"'p0': .* or made again .* so: 1\)", id="to be made again"),
        pytest.param((2, 3), {"retried": (0, 2)}, 2, r"'p0': .* so: 1\)", id="neither made nor made again"),
        pytest.param((3, 3), {"retried": (0, 2), "made": (0, 2)}, 0, "", id="made again"),
    ],
)
@pytest.mark.parametrize("remote", [False, True], ids=["here", "in object storage"])
def test_what_the_plan_says(
    stored: tuple[int, ...], features: dict[str, Any], owed: int, broken: str, remote: bool, write_part: Write
) -> None:
    """Tombstones owe nothing; a sample counts once, whether it was never made or is to be made again, or both."""
    directory = write_part(*stored, **features)
    found = Records(send(directory, "memory://owed-test").url if remote else directory).owed
    assert found.samples == owed
    assert re.fullmatch(broken, found.broken)
    assert [f": {owed}; " in note for note in found.notes] == [True] * bool(owed)


@pytest.mark.parametrize("remote", [False, True], ids=["here", "in object storage"])
@pytest.mark.parametrize("plan", [False, True], ids=["without a plan", "with one"])
def test_a_list_of_retries_that_is_gone(plan: bool, remote: bool, write_part: Write) -> None:
    """Beside a plan it is missed: without it groups that are to be made again would count as whole."""
    directory = write_part(3, retried=(0, 2), plan=plan)
    (directory / retry_file(1)).unlink()
    place = send(directory, "memory://owed-test").url if remote else directory
    with pytest.raises(MissingFile, match=f"^{place}/retry-1.parquet: missing") if plan else nullcontext():
        assert Records(place).owed.samples is None


def test_advantages_over_half_groups_are_refused(write_part: Write, tmp_path: Path) -> None:
    """Unless they are asked for; without advantages groups do not matter. What is owed is told in any case."""
    directory = write_part(3, 2)
    with pytest.raises(UsageError, match=r"^'p1': some of .* that is so: 1\), .*--allow-incomplete"):
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


@pytest.fixture
def merge_two(tmp_path: Path, make_run: Write, make_prompt: Callable[..., Prompt]) -> Write:
    """`merge_two(3, 2, planned=3)`: two runs of six prompts, with rewards, so many samples of each stored, merged."""

    def write(*stored: int, planned: int | None = None) -> Path:
        runs = [make_run(tmp_path / name, number, n=stored[number]) for number, name in enumerate("ab")]
        for run, count in zip(runs, stored, strict=True):
            with PlanWriter(run / PLAN_FILE) as writer:
                writer.write([make_prompt(number, n=planned or count) for number in range(6)])
            said = {"plan_sha256": file_sha256(run / PLAN_FILE)}
            replace_manifest(run, read_manifest(run).model_copy(update=said))
            write_rewards(run, "correct", lambda row: float(row["sample_index"]))
        rollgen.merge(runs, tmp_path / "merged", shard_tokens=1)
        return tmp_path / "merged"

    return write


def test_what_merged_runs_owed(merge_two: Write, tmp_path: Path) -> None:
    """Of 18 samples each has 12. Groups of two look whole and are not, and nothing can be resumed there."""
    merged = merge_two(2, 2, planned=3)
    told = [f"run {name} was merged with 6 samples owed" for name in "ab"]
    with pytest.raises(UsageError, match=rf"^{'; '.join(told)}, and .*; merge its runs again .* --allow-incomplete"):
        rollgen.export(merged, "slime", tmp_path / "out", reward="correct")
    exported = rollgen.export(merged, "slime", tmp_path / "out", reward="correct", allow_incomplete=True)
    assert (exported.owed, exported.advice[1:]) == (12, told)
    record = json.loads((tmp_path / "out" / RECORD_FILE).read_text())
    assert (record["owed"], record["advice"]) == (12, exported.advice)


@pytest.mark.parametrize(
    ("planned", "fix"),
    [pytest.param(None, "", id="nothing is owed"), pytest.param(3, ", and merge its runs again when", id="owed")],
)
def test_groups_of_two_sizes(planned: int | None, fix: str, merge_two: Write, tmp_path: Path) -> None:
    """What helps is said only where something does."""
    merged, message = (
        merge_two(3, 2, planned=planned),
        "some have 2 and some 3; prime-rl and jsonl take them as they are",
    )
    with pytest.raises(UsageError, match=f"^slime takes equally many .*{message}{fix}" + "$" * (not fix)):
        rollgen.export(merged, "slime", tmp_path / "out", reward="correct", allow_incomplete=True)


def test_what_a_merged_dataset_has_lost_since(merge_two: Write, tmp_path: Path) -> None:
    """Its manifest says how many samples there were."""
    merged = merge_two(2, 2)
    assert rollgen.export(merged, "jsonl", tmp_path / "whole", reward="correct").owed == 0
    (journal,) = (merged / "journal").glob("*.jsonl")
    *kept, last = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(kept))
    (merged / "data" / json.loads(last)["file"]).unlink()
    lost = json.loads(last)["rows"]
    with pytest.raises(UsageError, match=rf"^samples that were merged and are not stored any more: {lost}, and adv"):
        rollgen.export(merged, "jsonl", tmp_path / "out", reward="correct")
    assert rollgen.export(merged, "jsonl", tmp_path / "out").owed == lost
