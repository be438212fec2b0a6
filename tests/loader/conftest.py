"""Datasets whose shards and rows are chosen one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, Retry, create_manifest
from rollgen.format.schema import shard_schema
from rollgen.format.writer import build_row_groups, footer_metadata, write_parquet
from rollgen.rollouts import Completion


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
                write_parquet(slot.temporary(), build_row_groups(rows, schema), schema)
                line = slot.publish(
                    slot.temporary(),
                    rows=len(rows),
                    tokens=sum(len(row.token_ids) for row in rows),
                    mask_ids=sum(len(row.mask_ids) for row in rows),
                )
                slot.append(line)
        return directory

    return write
