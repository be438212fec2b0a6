"""Single flipped bits in shards, journals, manifest, plan and retry lists (soak: a thousand of them)."""

from __future__ import annotations

import time
from pathlib import Path

from models.flips import flip_bits, make_dataset
from models.program import Program


def test_no_flip_passes_unseen(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    """Each is reported, or all that can be decoded is what it was; the loader refuses, or gives the original rows."""
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    tally = flip_bits(make_dataset(program, tmp_path, tiny_model), 150, seed)
    assert tally.wrong == []
    assert tally.detected.total() > 120  # all but some bits of journal lines that are retired
