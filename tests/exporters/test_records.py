"""The samples as exporters take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.rewards import write_rewards

import rollgen
from rollgen.errors import UsageError
from rollgen.exporters.records import Records, pieces, row_bytes
from rollgen.exporters.table import table_of
from rollgen.format.manifest import Manifest, create_manifest, read_manifest, replace_manifest

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]


@pytest.mark.parametrize("groups", [None, 1, 4, 100])
def test_every_sample_once_and_groups_whole(groups: int | None, write_odd: Callable[..., Path]) -> None:
    """In whatever blocks; the group that lies in two shards comes at the place of its first row."""
    records = Records(write_odd())
    blocks = list(records.blocks(groups))
    keys = [
        (int(group), int(prompt), int(sample))
        for block in blocks
        for group, prompt, sample in zip(
            block.group, block.samples.scalars["prompt_index"], block.samples.scalars["sample_index"], strict=True
        )
    ]
    assert keys == [(prompt, prompt, sample) for prompt in range(6) for sample in range(4)]
    assert [len(np.unique(block.group)) for block in blocks] == {None: [6], 1: [1] * 6, 4: [4, 2], 100: [6]}[groups]


def test_blocks_are_bounded(write_odd: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ends with the group in which it reaches BLOCK_TOKENS."""
    monkeypatch.setattr("rollgen.exporters.records.BLOCK_TOKENS", 60)
    records = Records(write_odd())
    sizes = [int(np.diff(block.samples.token_ids.offsets).sum()) for block in records.blocks()]
    assert len(sizes) > 2
    assert sum(int(block.group[-1] - block.group[0]) + 1 for block in records.blocks()) == 6


def test_wide_supports_bound_blocks_too(
    make_dataset: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens may hold many ids: a block ends with the group in which it reaches BLOCK_BYTES. All samples come."""
    directory = make_dataset(tmp_path / "run", tokens=4, largest=400)
    monkeypatch.setattr("rollgen.exporters.records.BLOCK_BYTES", limit := 12_000)
    blocks = list(Records(directory).blocks())
    assert len(blocks) > 1
    assert sum(map(len, blocks)) == 12
    assert all(row_bytes(block.samples)[:-2].sum() <= limit for block in blocks)  # of groups of two


def test_texts_and_experts_count(write_odd: Callable[..., Path]) -> None:
    """By hand, of the first sample: prompt of one token, one token, two ids, and its texts."""
    (block,) = Records(write_odd()).blocks()
    row = {name: block.samples.scalars[name][0] for name in ("text", "prompt", "metadata")}
    assert row_bytes(block.samples)[0] == 4 + 12 + 8 + sum(map(len, row.values()))


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 20))
def test_pieces(sizes: list[int], limit: int) -> None:
    """Everything once, in order, and none beyond the limit before its last one."""
    found = list(pieces(np.array(sizes), limit))
    assert [place for start, stop in found for place in range(start, stop)] == list(range(len(sizes)))
    assert all(sum(sizes[start : stop - 1]) <= limit for start, stop in found)


def test_a_group_that_no_arrow_list_takes(write_odd: Callable[..., Path]) -> None:
    """2**31 ids: list offsets are int32, and would wrap."""
    (block,) = Records(write_odd()).blocks()
    lengths = np.zeros_like(block.samples.mask_lengths)
    lengths[:2] = 1 << 30
    with pytest.raises(UsageError, match="hold 2,147,483,648 values of one column"):
        table_of(replace(block, samples=replace(block.samples, mask_lengths=lengths)))


def test_only_the_latest_generation(write_odd: Callable[..., Path], current: Rows) -> None:
    """And its own reward."""
    rows = current(directory := write_odd())
    (block,) = Records(directory, reward="correct").blocks()
    at = 4 + 2  # p1, sample 2
    assert block.samples.scalars["generation"].tolist() == [int(place == at) for place in range(24)]
    assert block.reward is not None
    assert block.reward.tolist() == [row["reward"] for _, row in sorted(rows.items())]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("mean", [-0.5, -1 / 6, 1 / 6, 0.5], id="mean"),
        pytest.param("leave_one_out", [-2 / 3, -2 / 9, 2 / 9, 2 / 3], id="leave_one_out"),  # 4/3 times mean
    ],
)
def test_advantages_are_of_whole_groups(kind: str, expected: list[float], write_odd: Callable[..., Path]) -> None:
    """Rewards 0, 1/3, 2/3 and 1, whatever blocks they come in."""
    for block in Records(write_odd(), reward="correct", advantages=kind).blocks(1):
        assert block.advantage is not None
        if block.group[0] not in (1, 4):  # p1 was made again, p4 has one reward for all
            assert block.advantage.tolist() == pytest.approx(expected)
        if block.group[0] == 4:
            assert block.advantage.tolist() == [0] * 4


def test_a_group_of_one_is_named(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """In the words of the command."""
    write_rewards(directory := make_dataset(tmp_path / "run", n=1), "correct", lambda row: 1.0)
    with pytest.raises(UsageError, match=r"^--advantages leave_one_out: 'p0' has one sample"):
        Records(directory, reward="correct", advantages="leave_one_out")


def test_an_advantage_that_float32_cannot_hold(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Rewards of 3e38 and -3e38 are float32, and 6e38 apart; their mean is not far from either."""
    directory = make_dataset(tmp_path / "run")
    write_rewards(directory, "correct", lambda row: 3e38 * (1 - 2 * row["sample_index"]))
    with pytest.raises(UsageError, match=r"^'p0', sample 0: reward 3e\+38 makes an advantage of 6e\+38, more than"):
        Records(directory, reward="correct", advantages="leave_one_out")
    assert next(Records(directory, reward="correct").blocks()).advantage is not None


def test_experts_that_are_not_stored(write_odd: Callable[..., Path]) -> None:
    """In the words of the command."""
    with pytest.raises(UsageError, match=r"^--option routed_experts: the dataset stores none"):
        Records(write_odd(), routed_experts=True)


def test_an_unknown_kind_is_refused(write_odd: Callable[..., Path]) -> None:
    """As by `ops.group_advantages`."""
    with pytest.raises(UsageError, match=r"^kind must be one of 'mean', 'mean_std', 'leave_one_out', not 'median'$"):
        Records(write_odd(), reward="correct", advantages="median")


def test_unreplayable_rows_are_refused(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Unless asked for: then that they are is counted."""
    directory = make_dataset(tmp_path / "run", replayable=False)
    with pytest.raises(UsageError, match=r"the first of 12 samples that cannot be replayed.* --allow-unreplayable"):
        Records(directory)
    records = Records(directory, allow_unreplayable=True)
    assert sum(len(block) for block in records.blocks()) == 12
    assert records.filled["replayable"] == 12


def test_no_sample(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> None:
    """An export of nothing is an error of somebody's."""
    assert create_manifest(tmp_path, make_manifest())
    with pytest.raises(UsageError, match=r": holds no sample$"):
        Records(tmp_path)


def test_counts_say_what_columns_say(write_odd: Callable[..., Path]) -> None:
    """Of the column of masks, samples that have some; of generations, those above 0."""
    records = Records(write_odd(untruncated=(2,), support_logprobs=True))
    assert records.filled == {}
    list(records.blocks())
    wanted = {
        "sampling_mask": 20,
        "support_logprobs": 20,
        "generation": 1,
        "min_p": 0,
        "top_k": 20,
        "stop_reason": 0,
        "text": 24,
        "replayable": 0,
    }
    assert {name: records.filled[name] for name in wanted} == wanted


def test_the_runs_of_a_merged_dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Prompts of the same id are groups of their own, and each sample says which run it is of."""
    directories = [make_dataset(tmp_path / name, shards=1, tokens=number) for number, name in enumerate("ab", 3)]
    later = read_manifest(directories[1]).model_copy(update={"created_at": "2026-02-03T04:05:06+00:00"})
    replace_manifest(directories[1], later)
    rollgen.merge(directories, tmp_path / "merged")
    (block,) = (records := Records(tmp_path / "merged")).blocks()
    samples = {
        (int(group), run, prompt)
        for group, run, prompt in zip(
            block.group, block.samples.scalars["run"], block.samples.scalars["prompt_id"], strict=True
        )
    }
    assert {group for group, _, _ in samples} == set(range(6))
    assert {(run, prompt) for _, run, prompt in samples} == {(run, f"p{number}") for run in "ab" for number in range(3)}
    assert records.filled["run"] == 12
    exported = rollgen.export(tmp_path / "merged", "jsonl", tmp_path / "out")
    assert exported.lost == {}
