"""BatchMaker: what a batch holds is what the dataset holds, whatever the cache, and row groups leave when they can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch

from rollgen.errors import DatasetError
from rollgen.format.row_groups import CACHE_BYTES
from rollgen.loader import RolloutBatch, RolloutDataset, collate
from rollgen.loader.batch import Layout
from rollgen.loader.index import Index, Loss, OnDamage, open_index
from rollgen.loader.maker import BatchMaker
from rollgen.loader.order import BatchSettings, plan_epoch, samples_of, units_of
from rollgen.loader.schedule import Cursor
from rollgen.rollouts import Completion

MakeCompletion = Callable[..., Completion]
WriteShards = Callable[..., Path]

CURSOR = Cursor(0, 1)
SETTINGS = {"batch_tokens": 60, "shuffle": True, "seed": 4, "group_by_prompt": False, "bucket_by_length": False}


class Making:
    """A maker for a whole epoch, and which samples each of its batches should hold."""

    def __init__(
        self,
        index: Index,
        *,
        layout: Layout = "padded",
        cache_bytes: int = CACHE_BYTES,
        lost: dict[int, Loss] | None = None,
        **changes: Any,
    ) -> None:
        settings = BatchSettings(**(SETTINGS | {"shuffle_window": 10**9} | changes))
        units = units_of(index, group_by_prompt=settings.group_by_prompt)
        self.epoch = plan_epoch(units, settings, 0)
        self.wanted = [samples_of(units, self.epoch.batch(number)).tolist() for number in range(len(self.epoch))]
        self.maker = BatchMaker(index, units, self.epoch, layout=layout, pad_id=3, cache_bytes=cache_bytes, lost=lost)

    def __iter__(self) -> Iterator[tuple[list[int], RolloutBatch]]:
        with self.maker as maker:
            for number, wanted in enumerate(self.wanted):
                yield wanted, maker.make(number, CURSOR)

    @property
    def kept(self) -> list[int]:
        return list(self.maker._row_groups)


def assert_same(one: Any, other: Any) -> None:
    """Compare two batches field by field, but for what only a stream knows."""
    for name in one.__dataclass_fields__:
        if name in ("cursor", "lost", "dataset_index", "offsets_host"):
            continue
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=0, atol=0, msg=name)
        elif hasattr(left, "__dataclass_fields__"):
            assert_same(left, right)
        else:
            assert left == right, name


@pytest.fixture
def grown(
    write_shards: WriteShards, make_completion: MakeCompletion, once: Callable[[str, Callable[[], Path]], Path]
) -> Path:
    """A dataset that n was raised for: samples 0 and 1 of all prompts, then 2 and 3, two prompts to a shard.

    Lengths differ, and every third prompt is not truncated.
    """
    shards = [
        [
            make_completion(p, k, tokens=1 + (3 * p + 5 * k) % 11, full=p % 3 == 2, support_logprobs=True)
            for p in (first, first + 1)
            for k in samples
        ]
        for samples in ((0, 1), (2, 3))
        for first in range(0, 8, 2)
    ]
    return once("grown", lambda: write_shards(shards, support_logprobs=True))


@pytest.mark.parametrize("cache_bytes", [0, 2_000, CACHE_BYTES], ids=["no cache", "small", "default"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("group_by_prompt", [False, True], ids=["samples", "groups"])
def test_batches_hold_what_the_dataset_holds(
    grown: Path, layout: Layout, cache_bytes: int, group_by_prompt: bool
) -> None:
    """Every batch is, bit for bit, what `collate` makes of the same rollouts read one by one."""
    ds = RolloutDataset(grown)
    making = Making(open_index([grown]), layout=layout, cache_bytes=cache_bytes, group_by_prompt=group_by_prompt)
    for wanted, batch in making:
        assert_same(batch, collate([ds[sample] for sample in wanted], layout=layout, pad_id=3))
        assert (batch.cursor, batch.lost) == (CURSOR, 0)
        assert batch.dataset_index.tolist() == [0] * len(wanted)
    assert sorted(sample for wanted in making.wanted for sample in wanted) == list(range(len(ds)))


def test_row_groups_leave_after_their_last_use(grown: Path) -> None:
    """After each batch only those are kept that a later batch needs, and in the end none."""
    index = open_index([grown])
    making = Making(index, shuffle_window=30)
    for number, _ in enumerate(making):
        later = [sample for wanted in making.wanted[number + 1 :] for sample in wanted]
        group, _row = index.locate(torch.tensor(later, dtype=torch.int64).numpy())
        assert set(making.kept) <= set(group.tolist())
    assert making.kept == []


def test_each_row_group_is_read_once(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for all that are in use, an epoch reads the files once."""
    index = open_index([grown])
    making = Making(index, group_by_prompt=True)
    read: list[int] = []
    load = making.maker._row_groups._load
    monkeypatch.setattr(making.maker._row_groups, "_load", lambda group: read.append(group) or load(group))
    assert len(list(making)) == len(making.wanted)
    assert sorted(read) == list(range(len(index.groups)))


def test_the_cache_bound_is_kept(grown: Path) -> None:
    """Groups whose samples lie far apart want more row groups than there is memory for: some are read again."""
    making = Making(open_index([grown]), group_by_prompt=True, cache_bytes=3_000)
    cache = making.maker._row_groups
    held = []
    for _ in making:
        held.append(cache._bytes)
        assert cache._bytes == sum(cache._kept[number].nbytes for number in cache)
    assert 0 < max(held) <= 3_000


def test_an_empty_batch_uses_up_nothing(grown: Path) -> None:
    """What a rank without a batch gets at the end: no rollouts, and one token for the model to run on."""
    for layout in ("padded", "packed"):
        batch = Making(open_index([grown]), layout=layout).maker.make(None, CURSOR)
        assert (len(batch), batch.lost, batch.cursor, batch.max_length) == (0, 0, CURSOR, 1)
        assert batch.input_ids.shape == batch.logprobs.shape == batch.position_ids.shape == (1, 1)
        assert (batch.attention_mask.tolist(), batch.response_mask.tolist()) == ([[True]], [[False]])
        assert (batch.cu_seqlens.tolist(), batch.support.offsets.tolist()) == ([0, 1], [0])
        assert batch.input_ids.dtype == batch.sample_index.dtype == torch.int64
        logits = torch.zeros(1, 1, 512, requires_grad=True)
        batch.support_logprobs(logits).sum().backward()
        assert logits.grad is not None
        assert logits.grad.abs().sum() == 0


def test_two_datasets_keep_apart(tmp_path: Path, write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """The same prompt of two datasets is two groups; `dataset_index` tells which."""
    first = write_shards([[make_completion(0, k, text="first") for k in range(2)]]).rename(tmp_path / "first")
    second = write_shards([[make_completion(0, k, text="second") for k in range(3)]])
    making = Making(open_index([first, second]), group_by_prompt=True, batch_tokens=1)
    found = {tuple(batch.dataset_index.tolist()): set(batch.text) for _, batch in making}
    assert found == {(0, 0): {"first"}, (1, 1, 1): {"second"}}


def test_latest_generation_only(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """Of a sample that was made again, in its place in the group although it is stored elsewhere."""
    shards = [[make_completion(0, k) for k in range(3)], [make_completion(0, 1, tokens=20, generation=1)]]
    ((_, batch),) = Making(open_index([write_shards(shards, retries=1)]), group_by_prompt=True)
    assert (batch.sample_index.tolist(), batch.generation.tolist()) == ([0, 1, 2], [0, 1, 0])
    assert batch.response_rollouts.bincount().tolist() == [8, 20, 8]


def test_support_logprobs_of_some_datasets(
    tmp_path: Path, write_shards: WriteShards, make_completion: MakeCompletion
) -> None:
    """A stream has them when all of its datasets do: not in some batches only."""
    rows = [make_completion(0, 0, support_logprobs=True)]
    first = write_shards([rows], support_logprobs=True).rename(tmp_path / "first")
    second = write_shards([[make_completion(1, 0)]])
    index = open_index([first, second])
    assert [batch.stored_support_logprobs for _, batch in Making(index, batch_tokens=1)] == [None, None]
    alone = Making(open_index([first]))
    assert all(batch.stored_support_logprobs is not None for _, batch in alone)
    empty = alone.maker.make(None, CURSOR).stored_support_logprobs
    assert empty is not None
    assert empty.shape == (0,)


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_damage_surfaces_at_the_batch_that_needs_it(
    grown: Path, damage: Callable[..., Path], caplog: pytest.LogCaptureFixture, on_damage: OnDamage
) -> None:
    """Batches before it come; then an error that names it, or all other samples and a count of those it took."""
    path = damage(grown, 2, "sampling_mask")
    ds = RolloutDataset(grown)
    lost: dict[int, Loss] | None = {} if on_damage == "skip" else None
    making = Making(open_index([grown], on_damage=on_damage), lost=lost, shuffle=False)
    made: list[RolloutBatch] = []
    if lost is None:
        with pytest.raises(DatasetError, match=rf"{path.name}: row group 0: damaged"):
            made += (batch for _, batch in making)
        # Shards 0 and 1 hold rows 0 to 7; the batch that has row 8 too is not made.
        assert [len(batch) for batch in made] == [len(w) for w in making.wanted if max(w) < 8]
        return
    with caplog.at_level(logging.WARNING):
        for wanted, batch in making:
            there = [sample for sample in wanted if not 8 <= sample < 12]
            assert batch.lost == len(wanted) - len(there)
            assert list(zip(batch.prompt_index.tolist(), batch.sample_index.tolist(), strict=True)) == [
                (ds._index.prompt_index[sample], ds._index.sample_index[sample]) for sample in there
            ]
    assert [(loss.place, loss.samples) for loss in lost.values()] == [(f"{path}: row group 0", 4)]
    assert [record.getMessage() for record in caplog.records] == [f"4 samples are lost: {lost[2].reason}"]


def test_a_shard_that_goes_while_it_is_read(grown: Path) -> None:
    """Truncated after it was opened for the index: each of its row groups is lost when it is asked for."""
    index = open_index([grown])
    path = sorted((grown / "data").glob("*.parquet"))[1]
    path.write_bytes(path.read_bytes()[:100])
    lost: dict[int, Loss] = {}
    batches = [batch for _, batch in Making(index, lost=lost)]
    assert sum(batch.lost for batch in batches) == 4
    assert sum(map(len, batches)) == len(index) - 4
    assert "truncated" in lost[1].reason


def test_a_batch_of_which_nothing_is_left(grown: Path, damage: Callable[..., Path]) -> None:
    """It comes, empty, so that ranks stay in step."""
    damage(grown, 0, "token_ids")
    index = open_index([grown], filter=pc.field("prompt_index") < 1)
    # Samples 0 to 3 have 2, 7, 12 and 6 tokens: two batches of two, the first all from shard 0.
    (_, lost_batch), (_, other) = Making(index, lost={}, shuffle=False, batch_tokens=18)
    assert (len(lost_batch), lost_batch.lost, len(other), other.lost) == (0, 2, 2, 0)
