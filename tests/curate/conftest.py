"""Datasets to be curated, whose rows can be listed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.reader import open_dataset, read_row_group
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion


@pytest.fixture
def store() -> Callable[..., Path]:
    """`store(directory, manifest, shards, writer="w0")`: a shard for each list of completions."""
    return store_shards


@pytest.fixture
def read_shards() -> Callable[[Path], dict[str, list[dict[str, Any]]]]:
    """`read_shards(directory)`: the rows of each shard as dictionaries, every page verified."""
    return rows_by_shard


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


def rows_by_shard(directory: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for stored in open_dataset(directory).shards:
        with stored.open() as shard:
            tables = [read_row_group(shard, index) for index in range(len(shard.row_group_rows))]
            found[stored.path.name] = pa.concat_tables(tables).to_pylist()
    return found
