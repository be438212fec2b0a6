"""States of a RolloutStream: which ones it continues from, and which not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from rollgen.errors import ResumeRefused, UsageError
from rollgen.loader import RolloutBatch, RolloutStream
from rollgen.rollouts import Completion

TOKENS = 40

CHANGES: dict[str, dict[str, Any]] = {
    "batch_tokens": {"batch_tokens": 50},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 1},
    "group_by_prompt": {"group_by_prompt": True},
    "bucket_by_length": {"bucket_by_length": True},
    "shuffle_window": {"shuffle_window": 77},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_setting_is_refused_by_name(dataset: Path, name: str) -> None:
    """A position would mean other samples."""
    state = RolloutStream(dataset, **{"batch_tokens": TOKENS}).state_dict()
    with pytest.raises(ResumeRefused, match=f"cannot continue from the state: {name} was .*, is "):
        RolloutStream(dataset, **({"batch_tokens": TOKENS} | CHANGES[name])).load_state_dict(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "packed", "pad_id": 5},
        {"on_damage": "skip", "uneven": "drop"},
        {"prefetch": 0, "cache_bytes": 0},
        {"rank": 1, "world_size": 2},
        {"filter": pc.field("prompt_length") > 0, "allow_unreplayable": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_that_do_not_move_samples_may_change(dataset: Path, changes: dict[str, Any]) -> None:
    """How a batch looks, who gets it, and a filter that keeps everything are no part of the order."""
    RolloutStream(dataset, **changes).load_state_dict(RolloutStream(dataset).state_dict())


def test_another_dataset_is_refused(
    tmp_path: Path, dataset: Path, write_shards: Callable[..., Path], make_completion: Callable[..., Completion]
) -> None:
    """One with a shard more, say. The same one elsewhere is the same."""
    state = RolloutStream(dataset).state_dict()
    moved = dataset.rename(tmp_path / "moved")
    RolloutStream(moved).load_state_dict(state)
    with pytest.raises(ResumeRefused, match="the dataset, or what the filter keeps of it, has changed since"):
        RolloutStream(write_shards([[make_completion(0, 0)]])).load_state_dict(state)
    with pytest.raises(ResumeRefused, match="the dataset, or what the filter keeps"):
        RolloutStream(moved, filter=pc.field("sample_index") == 0).load_state_dict(state)


@pytest.mark.parametrize("name", ["version", "dataset", "seed", "position"])
def test_what_is_no_state(dataset: Path, name: str) -> None:
    """It says which part is missing."""
    state = RolloutStream(dataset).state_dict()
    del state[name]
    with pytest.raises(UsageError, match=f"not the state of a stream: it has no '{name}'"):
        RolloutStream(dataset).load_state_dict(state)


@pytest.mark.parametrize("given", [[], None, "state", 3], ids=str)
def test_what_is_no_mapping_is_no_state(dataset: Path, given: Any) -> None:
    """Of another type altogether."""
    with pytest.raises(UsageError, match=r"^load_state_dict: not the state of a stream$"):
        RolloutStream(dataset).load_state_dict(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": -1}, "position must be a whole number"),
        ({"position": 1.5}, "position must be a whole number"),
        ({"position": "1"}, "position must be a whole number"),
        ({"epoch": None}, "epoch must be a whole number"),
        ({"position": 999}, "epoch 0 has no batch 999"),
        ({"done": -2}, "done must be a whole number"),
    ],
    ids=str,
)
def test_what_is_no_place(dataset: Path, changes: dict[str, Any], message: str) -> None:
    """A position that no batch has would be an epoch of other samples."""
    state = RolloutStream(dataset).state_dict()
    with pytest.raises(UsageError, match=message):
        RolloutStream(dataset).load_state_dict(state | changes)


def test_numbers_of_numpy_are_numbers(dataset: Path) -> None:
    """What a configuration was computed with does not matter."""
    stream = RolloutStream(dataset, batch_tokens=np.int64(TOKENS), seed=np.int32(0))
    json.dumps(stream.state_dict())
    assert stream.state_dict() == RolloutStream(dataset, batch_tokens=TOKENS).state_dict()


def test_a_batch_of_another_origin_has_no_state(dataset: Path) -> None:
    """`collate` knows no position."""
    stream = RolloutStream(dataset)
    batch = next(iter(stream))
    with pytest.raises(UsageError, match="did not come from a stream"):
        stream.state_dict(RolloutBatch(**{name: getattr(batch, name) for name in batch.__slots__} | {"cursor": None}))


def test_batches_survive_moving(dataset: Path) -> None:
    """The state can be asked of what `to` returned."""
    stream = RolloutStream(dataset, batch_tokens=TOKENS)
    batch = next(iter(stream))
    assert stream.state_dict(batch.to("meta")) == stream.state_dict(batch)
