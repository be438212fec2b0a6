"""Keys of all rows, and which of them are current."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.datasets import read_rows as rows_of

from rollgen.errors import DatasetError
from rollgen.format.keys import Keys, ShardRows, read_rows
from rollgen.format.reader import open_dataset


def as_keys(rows: Sequence[tuple[int, int, int]]) -> Keys:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Keys(table[:, 0], table[:, 1].astype(np.int32), table[:, 2].astype(np.int32))


@given(st.lists(st.tuples(st.integers(-1, 8), st.integers(-1, 4), st.integers(-1, 4)), max_size=12))
def test_keys_are_ordered_like_tuples(rows: list[tuple[int, int, int]]) -> None:
    """Rising order, equal ones as they stand; steps say how each compares with the one before."""
    keys = as_keys(rows)
    order = keys.order().tolist()
    assert order == sorted(range(len(rows)), key=lambda row: (rows[row], row))
    assert keys.steps().tolist() == [(a < b) - (a > b) for a, b in itertools.pairwise(rows)]


def test_steps_between_the_ends_of_the_integers() -> None:
    """The difference of the largest and the smallest number is beyond both types."""
    rows = [(-(2**63), 0, 0), (2**63 - 1, -(2**31), 0), (2**63 - 1, 2**31 - 1, 0), (-(2**63), 0, 0)]
    assert as_keys(rows).steps().tolist() == [1, 1, -1]
    assert Keys.joined([]).steps().tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), unique=True, max_size=20))
def test_the_highest_generation_is_current(rows: list[tuple[int, int, int]]) -> None:
    """Of each sample one row, wherever it is."""
    latest = {(prompt, sample): generation for prompt, sample, generation in sorted(rows)}
    found = ShardRows(as_keys(rows), [], np.array([0, len(rows)])).current()
    assert found.tolist() == [latest[prompt, sample] == generation for prompt, sample, generation in rows]


def test_keys_are_those_of_the_rows(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """In the order of shards and rows; shards begin where they do."""
    directory = make_dataset(tmp_path / "run", shards=3, prompts=2, n=2)
    rows = read_rows(open_dataset(directory).shards)
    stored = rows_of(directory).values()
    assert list(zip(*(column.tolist() for column in rows.keys), strict=True)) == [
        (row["prompt_index"], row["sample_index"], row["generation"]) for row in stored
    ]
    assert rows.starts.tolist() == [0, 4, 8, 12]


def test_without_shards() -> None:
    """No rows, none of them current."""
    rows = read_rows([])
    assert (len(rows.keys.prompt_index), rows.starts.tolist(), rows.current().tolist()) == (0, [0], [])


def test_a_shard_that_was_copied(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Both are named."""
    directory = make_dataset(tmp_path / "run")
    shutil.copy(directory / "data" / "part-w0-000001.parquet", directory / "data" / "part-w0-000002.parquet")
    shards = open_dataset(directory).shards
    with pytest.raises(
        DatasetError, match=r"part-w0-000002.parquet: holds samples that .*part-w0-000001.parquet holds"
    ):
        read_rows(shards).current()
