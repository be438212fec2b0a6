"""Datasets whose shards and rows are chosen one by one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, Retry, create_manifest
from rollgen.format.schema import shard_schema
from rollgen.format.writer import build_row_groups, footer_metadata, write_parquet
from rollgen.loader import RolloutBatch
from rollgen.loader.index import Index
from rollgen.loader.samples import offsets_of
from rollgen.rollouts import Completion

Key = tuple[int, int, int]


@pytest.fixture
def write_shards(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> Callable[..., Path]:
    """`write_shards(shards, support_logprobs=False, retries=0)`: a directory with a shard for each list of rows.

    Its manifest has `retries` retries.
    """

    def write(shards: Iterable[list[Completion]], *, support_logprobs: bool = False, retries: int = 0) -> Path:
        directory = tmp_path / "dataset"
        directory.mkdir()
        manifest = make_manifest(support_logprobs=support_logprobs)
        for generation in range(1, retries + 1):
            where = {"finish_reason": "length"}
            retry = Retry(generation=generation, started_at="", where=where, max_tokens=99, samples=1)
            manifest = manifest.with_retry(retry)
        assert create_manifest(directory, manifest)
        schema = shard_schema(support_logprobs=support_logprobs).with_metadata(footer_metadata(manifest))
        with WriterSlot(directory, "w0") as slot:
            for rows in shards:
                temporary = slot.temporary()
                write_parquet(temporary, build_row_groups(rows, schema), schema)
                line = slot.publish(
                    temporary,
                    rows=len(rows),
                    tokens=sum(len(row.token_ids) for row in rows),
                    mask_ids=sum(len(row.mask_ids) for row in rows),
                )
                slot.append(line)
                temporary.unlink()
        return directory

    return write


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets by name, for `once`."""
    return tmp_path_factory.mktemp("templates")


@pytest.fixture
def once(tmp_path: Path, templates: Path) -> Callable[[str, Callable[[], Path]], Path]:
    """`once(name, write)`: what `write()` gives the first time, then a copy, which does not wait for the disk."""

    def make(name: str, write: Callable[[], Path]) -> Path:
        if not (templates / name).exists():
            shutil.copytree(write(), templates / name)
            return tmp_path / "dataset"
        return Path(shutil.copytree(templates / name, tmp_path / "dataset"))

    return make


@pytest.fixture
def dataset(
    write_shards: Callable[..., Path],
    make_completion: Callable[..., Completion],
    once: Callable[[str, Callable[[], Path]], Path],
) -> Path:
    """Five shards of 3, 7, 1, 6 and 5 samples of 12 prompts, whose samples are spread over shards."""
    sizes, shards, number = (3, 7, 1, 6, 5), [], 0
    for size in sizes:
        rows = [((number + place) % 12, (number + place) // 12) for place in range(size)]
        shards.append([make_completion(p, k, tokens=3 + (5 * p + 7 * k) % 13) for p, k in rows])
        number += size
    return once("stream", lambda: write_shards(shards))


@pytest.fixture
def keys_of() -> Callable[[RolloutBatch], list[Key]]:
    """`keys_of(batch)`: (dataset, prompt, sample) of each of its rollouts, in order."""

    def keys(batch: RolloutBatch) -> list[Key]:
        parts = (batch.dataset_index, batch.prompt_index, batch.sample_index)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    return keys


@pytest.fixture
def damage() -> Callable[..., Path]:
    """`damage(directory, shard, column, row_group=0)`: flips one bit in a page of this column. Returns the shard."""

    def flip(directory: Path, shard: int, column: str, row_group: int = 0) -> Path:
        path = sorted((directory / "data").glob("*.parquet"))[shard]
        group = pq.read_metadata(path).row_group(row_group)
        chunks = (group.column(number) for number in range(group.num_columns))
        chunk = next(chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)
        content = bytearray(path.read_bytes())
        content[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
        path.write_bytes(content)
        return path

    return flip


@pytest.fixture
def make_index() -> Callable[[list[list[tuple[int, int, int, int]]]], Index]:
    """`make_index(row_groups)`: an index without files, over rows (dataset, prompt, sample, tokens)."""

    def index(row_groups: list[list[tuple[int, int, int, int]]]) -> Index:
        rows = np.array([row for group in row_groups for row in group], np.int64).reshape(-1, 4)
        return Index(
            datasets=(),
            shards=(),
            groups=np.array([(0, number) for number in range(len(row_groups))], np.int64),
            group_offsets=offsets_of([len(group) for group in row_groups]),
            rows=np.arange(len(rows)),
            dataset=rows[:, 0].astype(np.int32),
            prompt_index=rows[:, 1],
            sample_index=rows[:, 2].astype(np.int32),
            generation=np.zeros(len(rows), np.int32),
            tokens=rows[:, 3].astype(np.int32),
            losses=(),
        )

    return index
