"""Merged datasets: each rollout says which run it is of, and prompts of different runs are different prompts.

`merged` has the runs `base` and `step-1` of the same six prompts, two samples each, of 8 and 9 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pytest
from torch.utils.data import DataLoader

from rollgen import RolloutDataset, RolloutStream, collate
from rollgen.errors import UsageError

TOKENS = {"base": 8, "step-1": 9}


def test_each_rollout_has_its_run(merged: Path) -> None:
    """And the tokens of that run; so do batches that are made of them."""
    dataset = RolloutDataset(merged)
    rollouts = [dataset[index] for index in range(len(dataset))]
    assert Counter(rollout.run for rollout in rollouts) == {"base": 12, "step-1": 12}
    assert all(len(rollout.token_ids) == TOKENS[rollout.run or ""] for rollout in rollouts)
    batch = collate(rollouts[:5])
    assert batch.run == [rollout.run for rollout in rollouts[:5]]
    assert batch.to("cpu").run == batch.run


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_have_it_too(merged: Path, workers: int) -> None:
    """From workers as well; an empty batch has an empty list."""
    stream = RolloutStream(merged, batch_tokens=40, rank=0, world_size=1)
    batches = list(DataLoader(stream, batch_size=None, num_workers=workers))
    runs = [run for batch in batches for run in batch.run or []]
    assert Counter(runs) == {"base": 12, "step-1": 12}
    uneven = [*RolloutStream(merged, batch_tokens=10_000, rank=1, world_size=2)]
    assert [batch.run for batch in uneven] == [[]]


def test_groups_are_those_of_one_run(merged: Path) -> None:
    """The same prompt_id in two runs is two groups, also in one batch."""
    [batch] = RolloutStream(merged, batch_tokens=10_000, group_by_prompt=True)
    groups = {
        (number, run, prompt)
        for number, run, prompt in zip(batch.group.tolist(), batch.run, batch.prompt_id, strict=True)
    }
    assert len(groups) == len({number for number, _, _ in groups}) == 12


def test_a_filter_may_ask_for_a_run(merged: Path) -> None:
    """As for any column."""
    stream = RolloutStream(merged, filter=pc.field("run") == "step-1")
    assert {run for batch in stream for run in batch.run or []} == {"step-1"}
    assert stream.samples == 12


def test_other_datasets_have_no_run(merged: Path, tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Nor have batches of both kinds, and a filter over it is refused there."""
    plain = make_run(tmp_path / "plain", 3)
    assert RolloutDataset(plain)[0].run is None
    assert collate([RolloutDataset(plain)[0], RolloutDataset(merged)[0]]).run is None
    assert all(batch.run is None for batch in RolloutStream([merged, plain]))
    with pytest.raises(UsageError, match=r"filter: .*cannot be evaluated on the columns"):
        RolloutStream([merged, plain], filter=pc.field("run") == "base")
