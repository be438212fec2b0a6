"""The proof can fail: each kind of difference is seen, in the tokens where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from native.proof import check_both, compare, read_rows

TOKENS = 8 * 12


@pytest.fixture
def rows(make_dataset: Callable[..., Path], tmp_path: Path) -> pa.Table:
    """12 samples of 8 tokens, with the logprobs of their supports."""
    return read_rows(make_dataset(tmp_path / "dataset", support_logprobs=True))


def changed(table: pa.Table, column: str, row: int, token: int, value: Any) -> pa.Table:
    """The table with the value of one token replaced."""
    values = table[column].to_pylist()
    values[row][token] = value
    position = table.column_names.index(column)
    return table.set_column(position, table.schema.field(position), pa.array(values, table.schema.field(position).type))


def test_a_dataset_agrees_with_itself(rows: pa.Table) -> None:
    """Supports of up to 12 ids at top_k 8: some are counted as ties."""
    found = compare(check_both(rows), rows, rows)
    assert found.exact
    assert found.one_run == found.tokens == TOKENS
    assert found.largest_support == 12
    assert 0 < found.beyond_top_k < TOKENS
    assert f"equal ids {TOKENS}, logprobs {TOKENS}, masks {TOKENS}\n" in str(found)


@pytest.mark.parametrize(
    ("column", "value", "agree"),
    [
        pytest.param("sampling_mask", [1, 2, 3], (TOKENS, TOKENS, TOKENS - 1), id="one mask"),
        pytest.param("logprobs", -9.0, (TOKENS, TOKENS - 1, TOKENS), id="one logprob"),
        pytest.param("token_ids", 511, (TOKENS - 6, TOKENS - 6, TOKENS - 6), id="one id: nothing counts after it"),
    ],
)
def test_each_difference_is_counted(rows: pa.Table, column: str, value: Any, agree: tuple[int, int, int]) -> None:
    """The third token of one sample; five more follow it."""
    found = compare(TOKENS, rows, changed(rows, column, 5, 2, value))
    assert not found.exact
    assert (found.same_ids, found.same_logprobs, found.same_masks) == agree


@pytest.mark.parametrize(("column", "value"), [("logprobs", -9.0), ("token_ids", 511)])
def test_one_run_must_agree_with_itself(rows: pa.Table, column: str, value: Any) -> None:
    """A sampled logprob that is not its support's, and a sampled id outside its mask."""
    with pytest.raises(AssertionError):
        check_both(changed(rows, column, 5, 2, value))
