"""Rewards of datasets that are merged: carried over under the new keys, or left behind and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.memory import counted
from models.rewards import SCORER, write_rewards

from rollgen.config import digest
from rollgen.curate import merged_rewards
from rollgen.curate.merge import merge
from rollgen.format.keys import read_rows
from rollgen.format.manifest import PLANLESS, Manifest, Retry
from rollgen.format.reader import open_dataset
from rollgen.format.rewards import list_parts, rewards_in_force, stored_checksums
from rollgen.prompts.single import id_number
from rollgen.rollouts import Completion

MakeRun = Callable[..., Path]
MakeCompletion = Callable[..., Completion]
ReadShards = Callable[[Path], dict[str, list[dict[str, Any]]]]
RETRY = Retry(generation=1, started_at="2026-01-02T03:04:05+00:00", where={}, max_tokens=64, samples=1)


def all_rows(directory: Path, read_shards: ReadShards) -> list[dict[str, Any]]:
    return [row for rows in read_shards(directory).values() for row in rows]


@pytest.fixture
def two(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    """The runs `base` and `step-1`."""
    return [make_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]


@pytest.mark.parametrize(("part_rows", "parts"), [(1 << 18, 1), (5, 4)], ids=["one part", "parts"])
def test_rewards_are_carried_over(
    two: list[Path],
    tmp_path: Path,
    read_shards: ReadShards,
    monkeypatch: pytest.MonkeyPatch,
    part_rows: int,
    parts: int,
) -> None:
    """Under the new keys: those of a name that both have by one scorer. A sample without one has none afterwards.

    Four row groups have 5, 6, 5 and 6 of them.
    """
    monkeypatch.setattr("rollgen.curate.merged_rewards._PART_ROWS", part_rows)

    def reward(row: dict[str, Any]) -> dict[str, float | None]:
        unscored = (row["prompt_id"], row["sample_index"]) == ("p1", 0)
        return {"reward": None if unscored else float(row["response_length"] + row["sample_index"] / 2)}

    for path in two:
        write_rewards(path, "correct", reward)
    write_rewards(
        two[1], "correct", lambda row: {"reward": 7.0, "style": 0.25}, only=lambda row: row["prompt_id"] == "p2"
    )
    write_rewards(two[0], "only_here", lambda row: 1.0)
    for path, function in zip(two, ("scorers:one", "scorers:other"), strict=True):
        write_rewards(path, "mixed", lambda row: 1.0, scorer=replace(SCORER, function=function))
    done = merge(two, tmp_path / "out")
    assert (done.rewards, done.rewards_left) == (("correct",), ("mixed", "only_here"))
    assert len(list_parts(tmp_path / "out", "correct")) == parts
    dataset = open_dataset(tmp_path / "out")
    rewards = rewards_in_force(tmp_path / "out", "correct", dataset.manifest.config_digest, None)
    found = rewards.of(read_rows(dataset.shards).keys, stored_checksums(dataset.shards))
    wanted = []
    for row in all_rows(tmp_path / "out", read_shards):
        again = (row["run"], row["prompt_id"]) == ("step-1", "p2")
        wanted.append((7.0, 0.25) if again else (reward(row)["reward"], None))
    nulls = [[None if math.isnan(value) else value for value in found[name]] for name in ("reward", "style")]
    assert list(zip(*nulls, strict=True)) == wanted
    assert sum(value is None for value, _ in wanted) == 2


def test_no_more_ids_are_held_than_those_of_a_part(
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: MakeCompletion,
    store: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids of 100 kB, 64 in all; four in a row group, and twelve in a part, for these pass a megabyte."""
    sources = []
    for number in range(2):
        identity = {PLANLESS: True, "seed": number}
        rows = [make_completion(row, prompt_id=f"{number} {row} ".ljust(100_000, "x")) for row in range(32)]
        rows = [replace(row, prompt_index=id_number(row.prompt_id)) for row in rows]
        manifest = make_manifest(identity=identity, config_digest=digest(identity))
        with monkeypatch.context() as patch:
            patch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 32)
            sources.append(store(tmp_path / str(number), manifest, [rows]))
        write_rewards(sources[-1], "correct", lambda row: 1.0)
    monkeypatch.setattr(merged_rewards, "_PART_BYTES", 1_000_000)
    real, peak = merged_rewards.write_rewards, []

    def measured(*given: Any) -> None:
        with counted() as pool:
            real(*given)
        peak.append(pool.max_memory())

    monkeypatch.setattr("rollgen.curate.merge.write_rewards", measured)
    assert merge(sources, tmp_path / "out").rewards == ("correct",)
    assert len(list_parts(tmp_path / "out", "correct")) == 6
    [most] = peak
    assert 1_000_000 < most < 6_000_000


def test_rewards_of_superseded_rows_stay_behind(
    tmp_path: Path, make_run: MakeRun, make_completion: MakeCompletion, retry: Callable[..., None]
) -> None:
    """A sample that was made again since has no reward, here and there: its current row was never scored."""
    first, second = make_run(tmp_path / "a", 0, shards=1, prompts=1), make_run(tmp_path / "b", 1, shards=1, prompts=1)
    for path in (first, second):
        write_rewards(path, "correct", lambda row: 1.0)
    retry(first, [(0, 0)], [make_completion(0, 0, tokens=20, generation=1)])
    merge([first, second], tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    rewards = rewards_in_force(tmp_path / "out", "correct", dataset.manifest.config_digest)
    found = rewards.of(read_rows(dataset.shards).keys, stored_checksums(dataset.shards))["reward"]
    assert (len(found), sum(map(math.isnan, found))) == (4, 1)


def test_more_columns_than_a_scorer_may_have(two: list[Path], tmp_path: Path) -> None:
    """40 of one and 25 others of the other: to go on with them would fail. 40 and 24 are 64, and are carried over."""
    for path, first, counts in ((two[0], 0, (40, 40)), (two[1], 40, (25, 24))):
        for name, count in zip(("many", "enough"), counts, strict=True):
            values = {f"value_{number}": 0.5 for number in range(first, first + count)}
            write_rewards(path, name, lambda row, values=values: {"reward": 1.0} | values)
    done = merge(two, tmp_path / "out")
    assert (done.rewards, done.rewards_left) == (("enough",), ("many",))
