"""RolloutDataset: every row comes back as it was written, in any order, in any process, and damage never does."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from torch.utils.data import DataLoader

from rollgen.errors import DatasetError, UsageError
from rollgen.format import reader
from rollgen.format.row_groups import RowGroupCache
from rollgen.loader import Rollout, RolloutDataset, RolloutStream, collate
from rollgen.loader import index as index_module
from rollgen.rollouts import Completion, Sampling

MakeCompletion = Callable[..., Completion]
WriteShards = Callable[..., Path]


def assert_same(rollout: Rollout, written: Completion) -> None:
    """Compare every field."""
    for name in ("prompt_id", "sample_index", "generation", "prompt_index", "finish_reason", "seed", "replayable"):
        assert getattr(rollout, name) == getattr(written, name), name
    for name in ("stop_reason", "text", "prompt", "metadata"):
        assert getattr(rollout, name) == getattr(written, name), name
    for name in ("temperature", "top_p", "min_p", "top_k", "max_tokens"):
        assert getattr(rollout, name) == np.float32(getattr(written.sampling, name)), name
    assert rollout.prompt_ids.dtype == rollout.token_ids.dtype == torch.int64
    np.testing.assert_array_equal(rollout.prompt_ids, written.prompt_token_ids)
    np.testing.assert_array_equal(rollout.token_ids, written.token_ids)
    np.testing.assert_array_equal(rollout.logprobs, written.logprobs)
    assert rollout.support.ids.dtype == torch.int32
    np.testing.assert_array_equal(rollout.support.ids, written.mask_ids)
    np.testing.assert_array_equal(rollout.support.offsets, written.mask_offsets)


@pytest.fixture
def written(make_completion: MakeCompletion) -> list[list[Completion]]:
    """Three shards: mixed lengths, some rows untruncated; a single row; rows long enough for several row groups."""
    mixed = [make_completion(0, k, tokens=1 + k, full=k == 2) for k in range(5)]
    long = [make_completion(2, k, tokens=30_000) for k in range(5)]  # two rows pass the 57,344 tokens of a row group
    return [mixed, [make_completion(1, 0)], long]


def test_every_row_round_trips(write_shards: WriteShards, written: list[list[Completion]]) -> None:
    """Rows of all shards and row groups come back in order, bit for bit, from both ends."""
    ds = RolloutDataset(write_shards(written))
    rows = [row for shard in written for row in shard]
    assert len(ds) == len(rows) == 11
    for index, row in enumerate(rows):
        assert_same(ds[index], row)
        assert_same(ds[index - len(rows)], row)
    assert ds.vocab_size == ds.manifest.vocab_size == 512


def test_support_logprobs_are_parallel_to_the_ids(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """Stored support log-probabilities come with the rollout that they belong to."""
    rows = [make_completion(0, k, tokens=3, full=k == 1, support_logprobs=True) for k in range(3)]
    ds = RolloutDataset(write_shards([rows], support_logprobs=True))
    for index, row in enumerate(rows):
        stored = ds[index].stored_support_logprobs
        assert stored is not None
        np.testing.assert_array_equal(stored, row.support_logprobs)


def test_a_filter(write_shards: WriteShards, written: list[list[Completion]]) -> None:
    """What it keeps, in order; to keep nothing is a mistake."""
    directory = write_shards(written)
    ds = RolloutDataset(directory, filter=pc.field("sample_index") == 3)
    assert [(rollout.prompt_index, rollout.sample_index) for rollout in ds] == [(0, 3), (2, 3)]
    for read in (RolloutDataset, RolloutStream):
        with pytest.raises(UsageError, match=f"^{directory}: no sample to read passes the filter$"):
            read(directory, filter=pc.field("sample_index") == 9)


@pytest.mark.parametrize("index", [11, -12, 10**12])
def test_index_beyond_the_end(write_shards: WriteShards, written: list[list[Completion]], index: int) -> None:
    """IndexError, which ends a `for` loop over the dataset as for a list."""
    ds = RolloutDataset(write_shards(written))
    with pytest.raises(IndexError, match="of 11"):
        ds[index]
    assert len(list(ds)) == 11


def test_an_empty_dataset_has_no_rows(write_shards: WriteShards) -> None:
    """A run that has not committed yet is a dataset of length 0."""
    assert len(RolloutDataset(write_shards([]))) == 0


def test_tensors_own_their_memory(write_shards: WriteShards, written: list[list[Completion]]) -> None:
    """Writing into a rollout changes no other reading of the same row: the cache is not shared out."""
    ds = RolloutDataset(write_shards(written))
    first = ds[0]
    for tensor in (first.token_ids, first.logprobs, first.support.ids, first.support.offsets):
        tensor.fill_(7)
    assert_same(ds[0], written[0][0])


def test_cache_is_bounded(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """Least recently used row groups leave, and the pickled dataset carries none."""
    ds = RolloutDataset(write_shards([[make_completion(p, 0)] for p in range(4)]))
    ds._row_groups = RowGroupCache(ds._load, max_bytes=2 * ds._load(3).nbytes)
    for index in (0, 1, 0, 2, 3, 2):
        assert ds[index].prompt_index == index
    assert list(ds._row_groups) == [3, 2]
    assert not list(pickle.loads(pickle.dumps(ds))._row_groups)


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_data_loader(write_shards: WriteShards, written: list[list[Completion]], context: str | None) -> None:
    """Workers, forked after a read or spawned, and none give the same batches, each row once."""
    ds = RolloutDataset(write_shards(written[:2]))
    assert ds[0].prompt_id == "p0"  # the parent's cache is warm when it forks
    loader = DataLoader(
        ds, batch_size=4, collate_fn=collate, num_workers=2 if context else 0, multiprocessing_context=context
    )
    keys = [
        (prompt, int(sample))
        for batch in loader
        for prompt, sample in zip(batch.prompt_id, batch.sample_index, strict=True)
    ]
    assert keys == [("p0", 0), ("p0", 1), ("p0", 2), ("p0", 3), ("p0", 4), ("p1", 0)]


def test_shuffled_batches_come_in_the_order_asked(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """`__getitems__` reads in file order and returns in the caller's, with repeats."""
    ds = RolloutDataset(write_shards([[make_completion(p, 0)] for p in range(4)]))
    assert [rollout.prompt_index for rollout in ds.__getitems__([3, 0, 2, 3])] == [3, 0, 2, 3]


def test_groups_are_those_of_one_dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Rollouts of two datasets are joined as a stream joins them, though both are of the same configuration."""
    first, second = make_dataset(tmp_path / "first"), make_dataset(tmp_path / "second")
    link = tmp_path / "link"
    link.symlink_to(first, target_is_directory=True)
    opened = [RolloutDataset(path) for path in (second, first, link)]
    assert len({ds.manifest.config_digest for ds in opened}) == 1
    batch = collate([ds[index] for ds in opened for index in (0, 1)])
    assert batch.prompt_index.tolist() == [0] * 6
    assert batch.dataset_index.tolist() == batch.group.tolist() == [0, 0, 1, 1, 1, 1]


def test_unreplayable_rows_are_refused_unless_asked_for(
    write_shards: WriteShards, make_completion: MakeCompletion
) -> None:
    """One row with replayable=false in the last row group is enough, and the message says how to take it."""
    rows = [make_completion(0, k, replayable=k != 3) for k in range(4)]
    directory = write_shards([[make_completion(1, 0)], rows])
    with pytest.raises(UsageError, match=r"part-w0-000001\.parquet: the first of 1 samples.*allow_unreplayable=True"):
        RolloutDataset(directory)
    ds = RolloutDataset(directory, allow_unreplayable=True)
    assert [ds[index].replayable for index in range(len(ds))] == [True, True, True, True, False]


def test_damage_is_an_error_that_names_file_and_row_group(
    write_shards: WriteShards, make_completion: MakeCompletion
) -> None:
    """A bit flipped in the tokens opens (pages are read later), and fails when that row group is read."""
    directory = write_shards([[make_completion(0, 0, tokens=500)]])
    shard = directory / "data" / "part-w0-000000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    ds = RolloutDataset(directory)
    with pytest.raises(DatasetError, match=r"part-w0-000000\.parquet: row group 0: damaged"):
        ds[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_ids": np.empty(0, np.int32), "mask_offsets": np.zeros(9, np.int64)}, "null although its row truncates"),
        ({"sampling": Sampling(top_k=0)}, "listed although it does not"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature is not above 0"),
    ],
    ids=["no supports", "supports though untruncated", "temperature 0"],
)
def test_rows_that_would_train_on_wrong_numbers(
    write_shards: WriteShards, make_completion: MakeCompletion, change: dict[str, Any], message: str
) -> None:
    """A sound file by another writer that breaks the format is refused, not read as something else."""
    ds = RolloutDataset(write_shards([[replace(make_completion(0, 0, tokens=8), **change)]]))
    with pytest.raises(DatasetError, match=f"row group 0: .*{message}"):
        ds[0]


def test_support_ids_outside_the_vocabulary(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """They would read another row's logits, or end the process on a GPU."""
    row = make_completion(0, 0)
    ds = RolloutDataset(write_shards([[replace(row, mask_ids=row.mask_ids + 512)]]))
    with pytest.raises(DatasetError, match="outside the model's vocabulary of 512"):
        ds[0]


def test_a_copied_shard_is_refused(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """Samples that are in the dataset twice would weigh double without a word."""
    directory = write_shards([[make_completion(0, 0)], [make_completion(0, 1), make_completion(0, 2)]])
    shutil.copy(directory / "data/part-w0-000001.parquet", directory / "data/part-w0-000002.parquet")
    with pytest.raises(DatasetError, match=r"000002\.parquet: holds samples that part-w0-000001\.parquet holds too"):
        RolloutDataset(directory)


@pytest.fixture
def retried(make_completion: MakeCompletion) -> list[list[Completion]]:
    """Two shards of three samples each; then (0, 1) and (2, 0) again, (2, 0) once more, and (2, 2) late by a crash."""
    first = [[make_completion(p, k) for k in range(3)] for p in (0, 2)]
    late = first[1].pop()
    again = [make_completion(*key, tokens=20, generation=1) for key in ((0, 1), (2, 0))]
    return [*first, again, [make_completion(2, 0, tokens=30, generation=2), late]]


def keys_of(ds: RolloutDataset) -> list[tuple[int, int, int]]:
    return [(rollout.prompt_index, rollout.sample_index, rollout.generation) for rollout in ds]


def test_current_rows_only(write_shards: WriteShards, retried: list[list[Completion]]) -> None:
    """Superseded rows are passed over, and the others come in the order of the shards, from both ends."""
    ds = RolloutDataset(write_shards(retried, retries=2))
    current = [(0, 0, 0), (0, 2, 0), (2, 1, 0), (0, 1, 1), (2, 0, 2), (2, 2, 0)]
    assert keys_of(ds) == current
    assert len(ds) == 6
    rows = {(row.prompt_index, row.sample_index, row.generation): row for shard in retried for row in shard}
    for index, key in enumerate(current):
        assert_same(ds[index], rows[key])
        assert_same(ds[index - 6], rows[key])
    with pytest.raises(IndexError, match="sample 6 of 6"):
        ds[6]


def test_all_generations_on_request(write_shards: WriteShards, retried: list[list[Completion]]) -> None:
    """Every row that is stored."""
    ds = RolloutDataset(write_shards(retried, retries=2), all_generations=True)
    assert keys_of(ds) == [(row.prompt_index, row.sample_index, row.generation) for shard in retried for row in shard]


def test_batches_carry_the_generation(write_shards: WriteShards, retried: list[list[Completion]]) -> None:
    """Also through workers, which get the selection with the dataset."""
    ds = RolloutDataset(write_shards(retried, retries=2))
    batches = list(DataLoader(ds, batch_size=6, collate_fn=collate, num_workers=1))
    assert [batch.generation.tolist() for batch in batches] == [[0, 0, 0, 1, 2, 0]]
    assert batches[0].generation.dtype == torch.int64


def test_generations_are_not_read_without_retries(
    write_shards: WriteShards, make_completion: MakeCompletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening costs no further column while the manifest has none."""
    asked: list[str] = []

    def read_row_group(shard: Any, group: int, columns: Any, **options: Any) -> Any:
        asked.extend(columns)
        return reader.read_row_group(shard, group, columns, **options)

    monkeypatch.setattr(index_module, "read_row_group", read_row_group)
    RolloutDataset(write_shards([[make_completion(0, 0)]]))
    assert "prompt_length" in asked
    assert "generation" not in asked


def test_a_copied_shard_of_a_retry_is_refused(write_shards: WriteShards, retried: list[list[Completion]]) -> None:
    """Two rows of one generation, though other generations of the sample lie between."""
    directory = write_shards(retried, retries=2)
    shutil.copy(directory / "data/part-w0-000002.parquet", directory / "data/part-w0-000009.parquet")
    with pytest.raises(DatasetError, match=r"000009\.parquet: holds samples that part-w0-000002\.parquet holds too"):
        RolloutDataset(directory)


def test_prompt_indexes_of_63_bits(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """A dataset without a plan may have any: these two are equal in their low 32 bits."""
    rows = [replace(make_completion(0, 0), prompt_index=index) for index in (1, 1 + 2**40)]
    assert len(RolloutDataset(write_shards([rows]))) == 2


def test_missing_directory(tmp_path: Path) -> None:
    """A wrong path is a DatasetError that names what was looked for."""
    with pytest.raises(DatasetError, match=r"nowhere/rollgen\.json: not found"):
        RolloutDataset(tmp_path / "nowhere")
