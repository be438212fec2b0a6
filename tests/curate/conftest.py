"""Datasets to be curated, whose rows can be listed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, Retry, create_manifest, read_manifest, replace_manifest
from rollgen.format.reader import open_dataset, read_row_group
from rollgen.format.retries import RetryList
from rollgen.format.schema import retry_file
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion


@pytest.fixture
def store() -> Callable[..., Path]:
    """`store(directory, manifest, shards, writer="w0")`: a shard for each list of completions."""
    return store_shards


@pytest.fixture
def retry() -> Callable[..., None]:
    """`retry(directory, keys, made)`: its first retry, of these (prompt, sample), of which `made` is stored."""
    return make_retry


@pytest.fixture
def read_shards() -> Callable[[Path], dict[str, list[dict[str, Any]]]]:
    """`read_shards(directory)`: the rows of each shard as dictionaries, every page verified."""
    return rows_by_shard


@pytest.fixture
def split(tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Completion]) -> Path:
    """Four shards of 16 tokens: prompts 0 and 1, again with a second sample, 2 and 3, 4 and 5."""
    keys = [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(2, 0), (3, 0)], [(4, 0), (5, 0)]]
    shards = [[make_completion(*key) for key in shard] for shard in keys]
    return store_shards(tmp_path / "run", make_manifest(), shards)


def store_shards(
    directory: Path, manifest: Manifest, shards: Iterable[Iterable[Completion]], writer: str = "w0"
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    create_manifest(directory, manifest)
    with (
        WriterSlot(directory, writer) as slot,
        ShardWriter(slot, manifest, commit_interval=math.inf) as shard_writer,
    ):
        for shard in shards:
            for completion in shard:
                shard_writer.add(completion)
            shard_writer.flush()
    return directory


def make_retry(directory: Path, keys: Sequence[tuple[int, int]], made: Iterable[Completion]) -> None:
    prompt, sample = np.array(keys).T
    limits = np.full(len(keys), 64, np.int32)
    RetryList(1, prompt.astype(np.int64), sample.astype(np.int32), limits).write(directory / retry_file(1))
    said = Retry(generation=1, started_at="2026-01-02T03:04:05+00:00", where={}, max_tokens=64, samples=len(keys))
    manifest = read_manifest(directory).with_retry(said)
    replace_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for completion in made:
            writer.add(completion)


def rows_by_shard(directory: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for stored in open_dataset(directory).shards:
        with stored.open() as shard:
            tables = [read_row_group(shard, index) for index in range(len(shard.row_group_rows))]
            found[stored.path.name] = pa.concat_tables(tables).to_pylist()
    return found
