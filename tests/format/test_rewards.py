"""Rewards: which row of which file counts, and that no changed byte changes a reward."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.datasets import read_rows
from models.rewards import SCORER, crc_of, write_rewards

from rollgen.errors import DatasetError
from rollgen.format import rewards as rewards_module
from rollgen.format.keys import Keys
from rollgen.format.keys import read_rows as read_keys
from rollgen.format.manifest import read_manifest
from rollgen.format.ragged import Ragged
from rollgen.format.reader import open_dataset
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import (
    Part,
    PartRecord,
    Rewards,
    ScorerRecord,
    in_force,
    is_column,
    is_name,
    list_parts,
    part_schema,
    reward_names,
    rewards_in_force,
    stored_checksums,
    token_checksums,
)


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Two shards of three prompts with two samples each."""
    return make_dataset(tmp_path / "run")


def rewards_of(directory: Path, name: str = "correct") -> dict[str, list[float | None]]:
    """By column, of all rows in order; None where there is none."""
    stored = open_dataset(directory)
    rewards = rewards_in_force(directory, name, stored.manifest.config_digest, None)
    found = rewards.of(read_keys(stored.shards).keys, stored_checksums(stored.shards))
    return {column: [None if math.isnan(value) else value for value in values] for column, values in found.items()}


def test_a_reward_for_each_row(dataset: Path) -> None:
    """And further values, where there are."""

    def reward(row: dict[str, Any]) -> dict[str, float]:
        return {"reward": row["prompt_index"], **({"even": 1.0} if row["sample_index"] == 0 else {})}

    write_rewards(dataset, "correct", reward)
    assert rewards_of(dataset) == {"reward": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "even": [1, None] * 6}


def test_the_later_row_counts(dataset: Path) -> None:
    """Also where it is an error; a column that a part has not is null there."""
    write_rewards(dataset, "correct", lambda row: {"reward": 1.0, "style": 0.5})
    write_rewards(dataset, "correct", lambda row: 2.0, only=lambda row: row["prompt_index"] == 1)
    write_rewards(dataset, "correct", lambda row: None, only=lambda row: row["prompt_index"] == 2)
    found = rewards_of(dataset)
    assert found["reward"] == [1, 1, 2, 2, None, None, *[1] * 6]
    assert found["style"] == [0.5, 0.5, None, None, None, None, *[0.5] * 6]


def test_names_lie_side_by_side(dataset: Path) -> None:
    """One that begins like another is another; other files are nobody's."""
    for number, name in enumerate(("a", "a_1", "b")):
        write_rewards(dataset, name, lambda row, number=number: number)
    for foreign in ("notes.txt", "a-1.parquet", "a.parquet", "a-000001.tmp", ".tmp-a-000001"):
        (dataset / "rewards" / foreign).write_bytes(b"")
    assert reward_names(dataset) == ["a", "a_1", "b"]
    assert [rewards_of(dataset, name)["reward"][0] for name in ("a", "a_1", "b")] == [0, 1, 2]
    assert [path.name for path in list_parts(dataset, "a")] == ["a-000000.parquet"]


def test_without_rewards(dataset: Path) -> None:
    """There is nothing, and no scorer."""
    assert reward_names(dataset) == []
    assert rewards_in_force(dataset, "correct", "", ()).scorer is None
    assert rewards_of(dataset)["reward"] == [None] * 12


@pytest.mark.parametrize(
    ("scorings", "wanted"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(["1", "1"], [0, 1], id="one"),
        pytest.param(["1", "1", "2"], [0, 1], id="a rescoring has begun"),
        pytest.param(["1", "2", "2!"], [1, 2], id="it is complete"),
        pytest.param(["2", "2!"], [0, 1], id="what it replaced is gone"),
        pytest.param(["2", "2!", "2"], [0, 1, 2], id="more samples"),
        pytest.param(["2!", "3"], [0], id="another rescoring"),
        pytest.param(["1", "2!", "3!", "4"], [2], id="the last that is complete"),
    ],
)
def test_what_is_in_force(scorings: list[str], wanted: list[int]) -> None:
    """Of parts by their scoring, `!` where one closes it."""
    parts = [
        Part(Path(), PartRecord("a", number, int(text[0]), text.endswith("!"), 0, [], SCORER))
        for number, text in enumerate(scorings)
    ]
    assert [part.record.sequence for part in in_force(parts)] == wanted


def test_tokens_that_changed_have_no_reward(dataset: Path) -> None:
    """Whatever the key says."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    stored = open_dataset(dataset)
    keys, checksums = read_keys(stored.shards).keys, stored_checksums(stored.shards)
    checksums[3] ^= 1
    found = rewards_in_force(dataset, "correct", stored.manifest.config_digest).of(keys, checksums)["reward"]
    assert np.flatnonzero(np.isnan(found)).tolist() == [3]


def test_checksums() -> None:
    """Those of the bytes that struct packs; 0 of a row without ids."""
    tokens = Ragged(np.array([0, 1, 2**31 - 1, 7], np.int32), np.array([0, 2, 2, 4]))
    assert token_checksums(tokens).tolist() == [crc_of([0, 1]), 0, crc_of([2**31 - 1, 7])]


def test_checksums_of_stored_rows(dataset: Path) -> None:
    """In the order of shards and rows."""
    assert stored_checksums(open_dataset(dataset).shards).tolist() == [
        crc_of(row["token_ids"]) for row in read_rows(dataset).values()
    ]
    assert stored_checksums([]).tolist() == []


key = st.tuples(st.integers(0, 2**62), st.integers(0, 3), st.integers(0, 2)) | st.tuples(*[st.integers(0, 2)] * 3)


def as_keys(rows: list[tuple[int, int, int]]) -> Keys:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Keys(columns[0], columns[1].astype(np.int32), columns[2].astype(np.int32))


@given(st.lists(key, max_size=12), st.lists(key, max_size=12), st.booleans())
def test_the_last_row_of_a_key(rewarded: list[Any], asked: list[Any], both: bool) -> None:
    """Keys that occur several times on both sides, or not at all."""
    asked = asked + rewarded if both else asked
    rewards = Rewards(SCORER, as_keys(rewarded), np.zeros(len(rewarded), np.int64), {})
    last = {each: row for row, each in enumerate(rewarded)}
    assert rewards.rows_of(as_keys(asked)).tolist() == [last.get(each, -1) for each in asked]


@pytest.mark.parametrize(
    ("text", "name", "column"),
    [
        *[("correct", True, True), ("a_1", True, True), ("1", True, False), ("a-b", False, False), ("", False, False)],
        *[("é", False, False), ("reward", True, False), ("prompt_id", True, False), ("a.b", False, False)],
        *[("x" * 65, True, False), ("x" * 101, False, False), ("a\n", False, False)],
    ],
)
def test_names(text: str, name: bool, column: bool) -> None:
    """Letters of ASCII, digits and underscores; columns are identifiers, and not those that every file has."""
    assert (is_name(text), is_column(text)) == (name, column)


def test_a_reader_sees_one_moment(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old part goes, because a rescoring is complete, after it was listed and before it is opened."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    (old,) = list_parts(dataset, "correct")
    read = rewards_module.read_part

    def replaced(path: Path, config_digest: str) -> Part:
        if old.exists():
            write_rewards(dataset, "correct", lambda row: 2.0, scoring=2, closes=True)
            old.unlink()
        return read(path, config_digest)

    monkeypatch.setattr(rewards_module, "read_part", replaced)
    assert rewards_of(dataset)["reward"] == [2.0] * 12


def test_a_part_that_leads_nowhere(dataset: Path) -> None:
    """It is listed, and cannot be opened: an error, and no endless loop."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    (path,) = list_parts(dataset, "correct")
    path.unlink()
    path.symlink_to("/nowhere")
    with pytest.raises(DatasetError, match=r"correct-000000.parquet: missing; remove it"):
        rewards_of(dataset)


def test_files_of_two_scorers(dataset: Path) -> None:
    """Put together by hand: nobody knows what these rewards are."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    write_rewards(dataset, "correct", lambda row: 2.0, scorer=ScorerRecord("scorers:score", "1" * 64))
    with pytest.raises(DatasetError, match=r"correct-000001.parquet: by scorers:score, the files before it by another"):
        rewards_of(dataset)


def test_rewards_of_another_dataset(dataset: Path, tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Its keys may be the same."""
    other = make_dataset(tmp_path / "other", support_logprobs=True)
    write_rewards(other, "correct", lambda row: 1.0)
    shutil.copytree(other / "rewards", dataset / "rewards")
    with pytest.raises(DatasetError, match=r"/correct-000000.parquet: rewards of another dataset"):
        rewards_of(dataset)


def test_a_file_under_another_name(dataset: Path) -> None:
    """It would be out of order, or of another scorer."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    (path,) = list_parts(dataset, "correct")
    for name in ("correct-000001.parquet", "other-000000.parquet"):
        path = path.rename(path.with_name(name))
        with pytest.raises(DatasetError, match=rf"{name}: .*it says that it is correct-000000.parquet; remove it"):
            rewards_of(dataset, name.partition("-")[0])


def test_no_changed_bit_changes_a_reward(dataset: Path) -> None:
    """One of each byte of a file: every one is found, or decides nothing."""
    write_rewards(dataset, "correct", lambda row: {"reward": row["prompt_index"] / 3, "style": 1.0})
    (path,) = list_parts(dataset, "correct")
    content, wanted, found = path.read_bytes(), rewards_of(dataset), 0
    stored = open_dataset(dataset)
    keys, checksums = read_keys(stored.shards).keys, stored_checksums(stored.shards)
    digest = read_manifest(dataset).config_digest
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        try:
            values = rewards_in_force(dataset, "correct", digest, None).of(keys, checksums)
        except DatasetError:
            found += 1
        else:
            assert {name: column.tolist() for name, column in values.items()} == wanted, at
    assert found > 0.7 * len(content), f"{found} of {len(content)} found"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward": math.nan}, "column 'reward' has a number that is not finite"),
        ({"reward": -math.inf}, "column 'reward' has a number that is not finite"),
        ({"reward": 1e39}, "or that float32 cannot hold"),
        ({"reward": 1.0, "style": math.nan}, "column 'style' has a number that is not finite"),
        ({"reward": 1.0, "error": "failed"}, "a row has a reward and an error, or neither"),
        ({"reward": None, "error": None}, "a row has a reward and an error, or neither"),
    ],
)
def test_a_row_that_cannot_be(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    """By another writer; it is not handed out, whichever columns are asked for."""
    monkeypatch.setattr(RewardWriter, "_read_back", lambda *written: None)
    columns = sorted(values.keys() - {"reward", "error"})
    row = {"prompt_id": "p", "prompt_index": 0, "sample_index": 0, "generation": 0, "tokens_crc32": 1, **values}
    digest = read_manifest(dataset).config_digest
    with RewardWriter(dataset, "correct", digest) as writer:
        table = pa.Table.from_pylist([row], schema=part_schema(columns))
        writer.write(table, columns, SCORER, scoring=1, closes=False)
    with pytest.raises(DatasetError, match=rf"correct-000000.parquet: damaged: .*{message}"):
        rewards_in_force(dataset, "correct", digest, columns)


def test_a_file_that_ends_early(dataset: Path) -> None:
    """Named, with what to do."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    (path,) = list_parts(dataset, "correct")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        DatasetError, match=r"correct-000000.parquet: damaged, .*; remove it, and `rollgen score` makes"
    ):
        rewards_of(dataset)
