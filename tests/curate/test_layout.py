"""Arithmetic on keys: the same as going from row to row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollgen.curate.layout import Index, KeyColumns, plan_layout, read_index
from rollgen.format.reader import open_dataset
from rollgen.rollouts import Completion


def some_index(row_groups: Sequence[int]) -> Index:
    """An index without shards: of these row groups, by their rows."""
    starts = np.concatenate([[0], np.cumsum(row_groups, dtype=np.int64)])
    nothing = np.zeros(int(starts[-1]), np.int64)
    places = tuple((number, 0) for number in range(len(row_groups)))
    return Index((), (), (), KeyColumns(*[nothing] * 4), places, starts, np.full(len(places), 100))


@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_stretches_are_as_long_as_possible(data: st.DataObject, row_groups: list[int]) -> None:
    """Rows in one follow each other in one row group; where one begins, they do not, or another row group does."""
    index = some_index(row_groups)
    rows = np.array(data.draw(st.lists(st.integers(0, sum(row_groups) - 1), min_size=1)))
    edges = index.stretches(rows).tolist()
    owners = np.repeat(np.arange(len(row_groups)), row_groups)[rows]
    together = [bool(two == one + 1) for one, two in pairwise(rows)]
    together = [follows and bool(one == two) for follows, (one, two) in zip(together, pairwise(owners), strict=True)]
    assert edges == [0, *(place for place, follows in enumerate(together, 1) if not follows), len(rows)]


def test_where_a_row_is(tmp_path: Path, make_completion: Callable, make_manifest: Callable, store: Callable) -> None:
    """Shard by shard, and in each from 0; a shard names its engine."""
    shards = [[make_completion(0), make_completion(1)], [make_completion(2)]]
    stored = open_dataset(store(tmp_path, make_manifest(), shards)).shards
    index = read_index(stored, make_manifest().optional_columns)
    assert [index.locate(row) for row in range(3)] == [(stored[0], 0), (stored[0], 1), (stored[1], 0)]
    assert index.shard_starts.tolist() == [0, 2, 3]
    assert index.engines_of(np.array([2, 0])) == index.engines[0] == index.engines[1]


@given(st.data(), st.integers(1, 500))
def test_windows_are_the_rows_in_order(data: st.DataObject, max_bytes: int) -> None:
    """Put end to end they are what was asked for, and none is larger than by a half, and a row.

    Of row groups of 100 bytes and 1, 2 or 4 rows, rows have 100, 50 and 25 of them.
    """
    index = some_index([1, 2, 4])
    rows = np.array(data.draw(st.lists(st.integers(0, 6), min_size=1)))
    windows = list(index.windows(rows, max_bytes))
    assert np.concatenate(windows).tolist() == rows.tolist()
    of_row = np.array([100, 50, 50, 25, 25, 25, 25])
    assert len(windows) <= max(1, round(of_row[rows].sum() / max_bytes))
    assert all(of_row[window].sum() <= 1.5 * max_bytes + 100 for window in windows)


def test_prompts_of_a_dataset_without_a_plan_stay_in_the_order_they_came(
    tmp_path: Path, make_completion: Callable[..., Completion], make_manifest: Callable, store: Callable[..., Path]
) -> None:
    """Five prompts of 8 tokens are 33 or more: the first five that came, or with a plan the first five of that."""
    shards = [[make_completion(index) for index in shard] for shard in ((3, 9), (5, 7), (0, 1))]
    index = read_index(open_dataset(store(tmp_path, make_manifest(), shards)).shards, make_manifest().optional_columns)
    dealt = {
        planned: [index.rows.prompt_index[rows].tolist() for rows in layout.shards]
        for planned in (True, False)
        for layout in [plan_layout(index, shard_tokens=33, planned=planned)]
    }
    assert dealt == {False: [[0, 3, 5, 7, 9], [1]], True: [[0, 1, 3, 5, 7], [9]]}
