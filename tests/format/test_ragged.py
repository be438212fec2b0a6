"""Arrow lists to CSR: every shape that pyarrow hands out must decode to the same numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.format.ragged import nested_ragged, ragged
from rollgen.format.schema import MASK_LIST, TOKEN_LIST

ROWS = [[1, 2], [], [3], [4, 5, 6]]
NESTED = [[[1], [2, 3]], [], [None, [4]], [[5, 6, 7], None, []]]
LARGE_NESTED = pa.large_list(pa.large_list(pa.int32()))

flat_rows = st.lists(st.lists(st.integers(0, 9)))
nested_rows = st.lists(st.lists(st.none() | st.lists(st.integers(0, 9))))


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(pa.array(ROWS, TOKEN_LIST), id="array"),
        pytest.param(pa.array(ROWS, pa.large_list(pa.int32())), id="large_list"),
        pytest.param(pa.chunked_array([ROWS[:1], [], ROWS[1:]], TOKEN_LIST), id="chunks, one of them empty"),
        pytest.param(pa.array([[9, 9], *ROWS, [8]], TOKEN_LIST)[1:5], id="slice"),
        pytest.param(pa.chunked_array([[[9], *ROWS[:2]], [*ROWS[2:], [8]]], TOKEN_LIST)[1:5], id="sliced chunks"),
    ],
)
def test_one_level(column: pa.Array | pa.ChunkedArray) -> None:
    """`.values` of a slice would start with 9; offsets of a later chunk would start at 0 again."""
    values, offsets = ragged(column)
    assert values.tolist() == [1, 2, 3, 4, 5, 6]
    assert offsets.tolist() == [0, 2, 2, 3, 6]
    assert (values.dtype, offsets.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(pa.array(NESTED, MASK_LIST), id="array"),
        pytest.param(pa.array(NESTED, LARGE_NESTED), id="large_list"),
        pytest.param(pa.chunked_array([NESTED[:2], NESTED[2:]], MASK_LIST), id="chunks"),
        pytest.param(pa.array([[[9, 9]], *NESTED, [[8], None]], MASK_LIST)[1:5], id="slice"),
    ],
)
def test_two_levels(column: pa.Array | pa.ChunkedArray) -> None:
    """A null inner list is an empty range, like an empty one."""
    values, offsets, row_offsets = nested_ragged(column)
    assert values.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert offsets.tolist() == [0, 1, 3, 3, 4, 7, 7, 7]
    assert row_offsets.tolist() == [0, 2, 2, 4, 7]


def test_null_lists_hide_nothing() -> None:
    """A null slot may span values that are not part of the column: they do not come out."""
    hiding = pa.ListArray.from_arrays([0, 2, 5, 6], pa.array([1, 2, 9, 9, 9, 3]), mask=pa.array([False, True, False]))
    values, offsets = ragged(hiding)
    assert values.tolist() == [1, 2, 3]
    assert offsets.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("column", [pa.array([], MASK_LIST), pa.chunked_array([], MASK_LIST)], ids=["array", "chunked"])
def test_no_rows(column: pa.Array | pa.ChunkedArray) -> None:
    """A column without rows has one offset on each level."""
    values, offsets, row_offsets = nested_ragged(column)
    assert (len(values), offsets.tolist(), row_offsets.tolist()) == (0, [0], [0])


def test_one_chunk_is_not_copied() -> None:
    """The values of the usual case are Arrow's own memory."""
    column = pa.array(ROWS, TOKEN_LIST)
    assert np.shares_memory(ragged(column).values, column.values.to_numpy())


@given(rows=nested_rows, cut=st.integers(0, 20), start=st.integers(0, 5), stop=st.integers(0, 20))
def test_any_chunks_and_slices(rows: list[list[list[int] | None]], cut: int, start: int, stop: int) -> None:
    """However a column is cut into chunks and sliced, its rows can be put together again."""
    column = pa.chunked_array([rows[:cut], rows[cut:]], MASK_LIST)[start:stop]
    values, offsets, row_offsets = nested_ragged(column)
    inner = [values[a:b].tolist() for a, b in pairwise(offsets)]
    outer = [inner[a:b] for a, b in pairwise(row_offsets)]
    assert outer == [[part or [] for part in row] for row in rows[start:stop]]
