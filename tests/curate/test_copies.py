"""What it takes to look for samples that two datasets hold: the tokens of a row group at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from models.memory import counted

from rollgen.curate.copies import _checksums_of
from rollgen.format.manifest import Manifest
from rollgen.format.reader import StoredShard, open_dataset
from rollgen.format.rewards import stored_checksums
from rollgen.rollouts import Completion

ROWS = 32
PROMPT = np.arange(250_000, dtype=np.int32) % 512
"""A megabyte."""


@pytest.fixture
def shard(
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Completion],
    store: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> StoredShard:
    """Long prompts that are answered at length, a row group each."""
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 1)
    rows = [
        make_completion(row, tokens=250_000, full=True, prompt_token_ids=np.roll(PROMPT, row)) for row in range(ROWS)
    ]
    [shard] = open_dataset(store(tmp_path / "run", make_manifest(), [rows])).shards
    return shard


@pytest.mark.parametrize("read", [_checksums_of, lambda shard: stored_checksums([shard])], ids=["copies", "rewards"])
def test_one_row_group_is_held_at_a_time(shard: StoredShard, read: Callable[[StoredShard], np.ndarray]) -> None:
    """Of 32 or 64 MB of tokens; a row group takes two, and what it is decoded with."""
    with counted() as pool:
        checksums = read(shard)
    assert len(set(checksums.tolist())) == ROWS
    assert 1_000_000 < pool.max_memory() < 16_000_000
