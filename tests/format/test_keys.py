"""Keys of all rows, and which of them are current."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.datasets import read_rows as rows_of

from rollgen.errors import DatasetError
from rollgen.format.keys import Keys, ShardRows, read_rows
from rollgen.format.reader import open_dataset


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), unique=True, max_size=20))
def test_the_highest_generation_is_current(rows: list[tuple[int, int, int]]) -> None:
    """Of each sample one row, wherever it is."""
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    keys = Keys(columns[0], columns[1].astype(np.int32), columns[2].astype(np.int32))
    latest = {(prompt, sample): generation for prompt, sample, generation in sorted(rows)}
    found = ShardRows(keys, np.array([0, len(rows)])).is_current([])
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
    assert (len(rows.keys.prompt_index), rows.starts.tolist(), rows.is_current([]).tolist()) == (0, [0], [])


def test_a_shard_that_was_copied(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Both are named."""
    directory = make_dataset(tmp_path / "run")
    shutil.copy(directory / "data" / "part-w0-000001.parquet", directory / "data" / "part-w0-000002.parquet")
    shards = open_dataset(directory).shards
    with pytest.raises(
        DatasetError, match=r"part-w0-000002.parquet: holds samples that .*part-w0-000001.parquet holds"
    ):
        read_rows(shards).is_current(shards)
