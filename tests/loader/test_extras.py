"""Weights and experts reach a trainer: each at the token that it belongs to, and experts only where asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, RoutedExperts, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.loader import RolloutDataset, RolloutStream, collate
from rollgen.loader.batch import BATCH_SCALARS, Layout, assemble
from rollgen.loader.samples import empty_samples
from rollgen.rollouts import Completion, WeightVersions

LAYERS, TOP_K = 3, 2
Key = tuple[int, int]


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Two shards of three prompts, of 1 to 5 tokens, with two samples each of 7 more; weights change at 3 and 6."""
    return make_dataset(tmp_path / "run", extras=True, tokens=7)


@pytest.fixture
def written(make_completion: Callable[..., Completion]) -> dict[Key, Completion]:
    """What is in there."""
    keys = [(prompt, sample) for prompt in range(6) for sample in range(2)]
    return {key: make_completion(*key, extras=True, tokens=7) for key in keys}


def test_a_rollout_has_those_of_its_row(dataset: Path, written: dict[Key, Completion]) -> None:
    """As they were sampled, in memory of their own."""
    for rollout in RolloutDataset(dataset, routed_experts=True):
        row = written[rollout.prompt_index, rollout.sample_index]
        assert rollout.weight_versions == row.weight_versions
        assert rollout.routed_experts is not None
        assert rollout.routed_experts.dtype == torch.int16
        np.testing.assert_array_equal(rollout.routed_experts.numpy(), row.routed_experts)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_has_the_experts_of_each_token(
    dataset: Path, written: dict[Key, Completion], layout: Layout, shuffle: bool
) -> None:
    """At its place in input_ids; zeros at the last token of a rollout, and on padding."""
    seen = 0
    for batch in RolloutStream(dataset, batch_tokens=40, layout=layout, shuffle=shuffle, routed_experts=True):
        assert batch.routed_experts is not None
        assert batch.weight_versions is not None
        assert batch.routed_experts.shape == (*batch.input_ids.shape, LAYERS, TOP_K)
        starts = batch.cu_seqlens.tolist() if layout == "packed" else [batch.max_length * i for i in range(len(batch))]
        expected = np.zeros((batch.input_ids.numel(), LAYERS, TOP_K), np.int16)
        for place, start in enumerate(starts[: len(batch)]):
            row = written[int(batch.prompt_index[place]), int(batch.sample_index[place])]
            assert batch.weight_versions[place] == row.weight_versions
            assert row.routed_experts is not None
            expected[start : start + len(row.routed_experts)] = row.routed_experts
            seen += 1
        np.testing.assert_array_equal(batch.routed_experts.flatten(0, 1).numpy(), expected)
    assert seen == 12


def test_they_are_collated(dataset: Path) -> None:
    """The batch of a stream in file order is that of the same rollouts; one without leaves them out."""
    rollouts = list(RolloutDataset(dataset, routed_experts=True))
    (streamed,) = RolloutStream(dataset, shuffle=False, routed_experts=True)
    batch = collate(rollouts)
    assert streamed.routed_experts is not None
    assert batch.routed_experts is not None
    torch.testing.assert_close(batch.routed_experts, streamed.routed_experts)
    assert batch.weight_versions == streamed.weight_versions
    mixed = collate([replace(rollouts[0], routed_experts=None, weight_versions=None), rollouts[1]])
    assert (mixed.routed_experts, mixed.weight_versions) == (None, None)


def test_those_of_different_models_do_not_join(dataset: Path) -> None:
    """Their layers would not fit."""
    one, other = list(RolloutDataset(dataset, routed_experts=True))[:2]
    assert other.routed_experts is not None
    with pytest.raises(UsageError, match="as many layers and experts"):
        collate([one, replace(other, routed_experts=other.routed_experts[:, :2])])


@pytest.mark.parametrize(
    ("filter", "kept"),
    [
        (pc.list_element(pc.field("weight_versions"), 1) == "step 3", 12),
        (pc.list_element(pc.field("weight_versions"), 1) == "step 4", 0),
        (pc.list_value_length(pc.field("weight_version_starts")) == 3, 12),
        (pc.list_element(pc.field("routed_experts"), 0) >= 4, 0),
        ((pc.list_element(pc.field("routed_experts"), 1) >= 4) & (pc.field("sample_index") == 0), 6),
    ],
    ids=str,
)
def test_a_filter_may_ask_for_them(
    dataset: Path, tmp_path: Path, make_dataset: Callable[..., Path], filter: pc.Expression, kept: int
) -> None:
    """As for any column that all datasets store; they need not be asked for besides."""
    if kept:
        assert len(RolloutDataset(dataset, filter=filter)) == RolloutStream(dataset, filter=filter).samples == kept
    else:
        with pytest.raises(UsageError, match="no sample to read passes the filter"):
            RolloutDataset(dataset, filter=filter)
    with pytest.raises(UsageError, match="cannot be evaluated on the columns"):
        RolloutStream([dataset, make_dataset(tmp_path / "without")], filter=filter)


def test_experts_are_read_on_request(dataset: Path) -> None:
    """They are most of such a dataset."""
    assert RolloutDataset(dataset)[0].routed_experts is None
    assert next(iter(RolloutStream(dataset))).routed_experts is None


@pytest.mark.parametrize("loader", [RolloutDataset, RolloutStream])
def test_a_dataset_without_says_so(tmp_path: Path, make_dataset: Callable[..., Path], loader: Any) -> None:
    """Before anything is read, and nobody misses versions."""
    directory = make_dataset(tmp_path / "plain")
    assert RolloutDataset(directory)[0].weight_versions is None
    assert next(iter(RolloutStream(directory))).weight_versions is None
    with pytest.raises(UsageError, match="routed_experts: not all datasets store them"):
        loader(directory, routed_experts=True)


def test_an_empty_batch_has_their_shape() -> None:
    """One token of padding, so that a model with replayed routing can run on it."""
    batch = assemble(empty_samples(512, BATCH_SCALARS, experts=(LAYERS, TOP_K)))
    assert batch.routed_experts is not None
    assert batch.routed_experts.shape == (1, 1, LAYERS, TOP_K)


def test_experts_of_other_tokens_are_damage(
    tmp_path: Path, make_completion: Callable[..., Completion], make_manifest: Callable[..., Manifest]
) -> None:
    """A row short of a position would shift all that follow."""
    directory, manifest = tmp_path / "run", make_manifest(extras=True)
    directory.mkdir()
    create_manifest(directory, manifest)
    completion = make_completion(0, 0, extras=True)
    assert completion.routed_experts is not None
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        writer.add(replace(completion, routed_experts=completion.routed_experts[1:]))
    with pytest.raises(DatasetError, match="row group 0: tokens and routed experts differ in length"):
        RolloutDataset(directory, routed_experts=True)[0]
    assert RolloutDataset(directory)[0].routed_experts is None


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, make_completion: Callable[..., Completion], make_manifest: Callable[..., Manifest]) -> Write:
    """`write(change, name="run", experts=8)`: a dataset of three samples of 7 tokens, `change(row)` in the middle."""

    def make(change: Callable[[Completion], Completion], *, name: str = "run", experts: int | None = 8) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        layout = RoutedExperts(layers=LAYERS, top_k=TOP_K, experts=experts)
        manifest = make_manifest(extras=True, routed_experts=layout)
        create_manifest(directory, manifest)
        rows = [make_completion(0, sample, extras=True, tokens=7) for sample in range(3)]
        with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for row in (rows[0], change(rows[1]), rows[2]):
                writer.add(row)
        return directory

    return make


VERSIONS = {
    "none": ((), (), "differ in length, or are empty"),
    "more versions": (("a", "b"), (0,), "differ in length, or are empty"),
    "more starts": (("a",), (0, 3), "differ in length, or are empty"),
    "empty text": (("a", ""), (0, 3), "a weight version is empty"),
    "not from 0": (("a", "b"), (1, 3), "do not start at 0 and rise below the tokens"),
    "negative": (("a", "b"), (-1, 3), "do not start at 0 and rise below the tokens"),
    "falling": (("a", "b", "c"), (0, 4, 3), "do not start at 0 and rise below the tokens"),
    "twice": (("a", "b"), (0, 0), "do not start at 0 and rise below the tokens"),
    "beyond": (("a", "b"), (0, 7), "do not start at 0 and rise below the tokens"),
}


@pytest.mark.parametrize(("versions", "starts", "problem"), VERSIONS.values(), ids=VERSIONS)
def test_versions_that_contradict_themselves(
    write: Write, versions: tuple[str, ...], starts: tuple[int, ...], problem: str
) -> None:
    """Damage: tokens would be given to other weights. Also to be skipped, like any other."""
    directory = write(lambda row: replace(row, weight_versions=WeightVersions(versions, starts)))
    place = f"^{directory}/data/part-w0-000000.parquet: row group 0: .*{problem}"
    with pytest.raises(DatasetError, match=place):
        RolloutDataset(directory)[0]
    with pytest.raises(DatasetError, match=place):
        list(RolloutStream(directory))
    skipping = RolloutStream(directory, on_damage="skip")
    assert [batch.lost for batch in skipping] == [3]


@pytest.mark.parametrize(("number", "experts", "limit"), [(-3, 8, 8), (8, 8, 8), (900, 8, 8), (-1, None, 32768)])
def test_experts_that_no_layer_has(write: Write, number: int, experts: int | None, limit: int) -> None:
    """Damage, where they are read."""

    def change(row: Completion) -> Completion:
        assert row.routed_experts is not None
        routed = row.routed_experts.copy()
        routed[2, 1, 0] = number
        return replace(row, routed_experts=routed)

    directory = write(change, experts=experts)
    problem = f"row group 0: a number of an expert is not below {limit}, or negative"
    with pytest.raises(DatasetError, match=problem):
        RolloutDataset(directory, routed_experts=True)[0]
    with pytest.raises(DatasetError, match=problem):
        list(RolloutStream(directory, routed_experts=True))
    assert len(RolloutDataset(directory)[0].token_ids) == 7


def test_each_dataset_has_its_own_number_of_experts(write: Write) -> None:
    """One of a model with more of them does not hide a wrong number in another."""

    def change(row: Completion) -> Completion:
        assert row.routed_experts is not None
        return replace(row, routed_experts=row.routed_experts + np.int16(8))  # 8 to 15

    larger = write(change, name="larger", experts=16)
    sound, wrong = write(lambda row: row, name="sound"), write(change, name="wrong")
    for paths in ([larger, sound], [sound, larger]):
        assert sum(map(len, RolloutStream(paths, routed_experts=True))) == 6
    for paths in ([larger, wrong], [wrong, larger]):
        with pytest.raises(DatasetError, match=f"^{wrong}/.*row group 0: a number of an expert is not below 8"):
            list(RolloutStream(paths, routed_experts=True))
