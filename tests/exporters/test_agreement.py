"""What a trainer has one value of: found before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgen.errors import UsageError
from rollgen.exporters.agreement import Agreement
from rollgen.exporters.records import Records


@pytest.mark.parametrize(
    ("features", "message"),
    [
        pytest.param({"temperatures": (0.75, 0.75, 0.75, 0.75, 0.75, 1.0)}, "these have 0.75, 1.0;", id="temperatures"),
        pytest.param({"untruncated": (5,)}, "only some of these were truncated", id="masks"),
    ],
)
def test_the_last_prompt_is_different(
    features: dict[str, Any], message: str, write_odd: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but narrow columns is read: no block has been handed out."""
    monkeypatch.setattr("rollgen.exporters.records.BLOCK_TOKENS", 20)
    records = Records(write_odd(**features))
    with pytest.raises(UsageError, match=message):
        Agreement(records, "slime")
    assert not records.filled


def test_an_empty_prompt_is_named(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing predicted its first token."""
    directory = make_dataset(tmp_path / "run", prompt_token_ids=np.zeros(0, np.int32))
    with pytest.raises(UsageError, match=r"^'p0': the prompt is empty"):
        Agreement(Records(directory), "slime")


def test_what_agrees(write_odd: Callable[..., Path]) -> None:
    """The values of flags; supports are known when blocks have been seen: the largest has 12 ids, of a tie."""
    drawn = Agreement(records := Records(write_odd()), "slime")
    assert (drawn.temperature, drawn.truncated, drawn.top_p, drawn.top_k, drawn.widest) == ("0.75", True, 0.875, 8, 0)
    for block in records.blocks(1):
        drawn.see(block)
    assert drawn.widest == max(len(row) for row in _supports(records))


def _supports(records: Records) -> list[Any]:
    """Of all tokens."""
    return [
        support
        for block in records.blocks()
        for support in np.split(block.samples.mask_ids, np.cumsum(block.samples.mask_lengths)[:-1])
    ]
