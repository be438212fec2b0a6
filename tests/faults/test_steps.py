"""SIGKILL at every eighth step of a generation, its growth, a retry, a compaction and a replacement (soak: at each)."""

from __future__ import annotations

import pytest
from models.stages import STAGES, Life

STRIDE = 8


@pytest.mark.parametrize(("stage", "first"), [(stage, first) for first, stage in enumerate(STAGES, 1)])
def test_killed_in_front_of_a_step(life: Life, stage: str, first: int) -> None:
    """Continued, the dataset has every row of an undisturbed run once, and nothing else."""
    for step in range(first, len(life.stages[stage].steps) + 1, STRIDE):
        life.kill_and_continue(stage, step)
