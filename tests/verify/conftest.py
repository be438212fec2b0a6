"""Datasets that are wrong in one way: the journal vouches for the shards, so that only what is meant to be is found."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine, file_sha256, footer_sha256
from rollgen.format.manifest import Retry, read_manifest, replace_manifest
from rollgen.format.reader import count_mask_ids
from rollgen.format.retries import RetryList
from rollgen.format.schema import retry_file
from rollgen.format.writer import ShardWriter, write_parquet
from rollgen.rollouts import Completion

TIME = "2026-01-02T03:04:05+00:00"
RETRIED_TOKENS = 96

Rows = list[dict[str, Any]]
Rewrite = Callable[..., None]


def as_they_are(rows: Rows) -> Rows:
    return rows


@pytest.fixture
def directory(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Path]) -> Path:
    """A sound dataset of two shards of six samples, three prompts each, of eight tokens; `w0` wrote them."""
    original = tmp_path_factory.getbasetemp() / "sound-dataset"
    if not original.exists():
        make_dataset(original)
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def nobody() -> Callable[[], AbstractContextManager[None]]:
    """`with nobody():` root has no rights beyond those of others; who is not root has none to lose."""

    @contextmanager
    def become() -> Iterator[None]:
        user = os.geteuid()
        if user == 0:
            os.seteuid(65_534)
        try:
            yield
        finally:
            os.seteuid(user)

    return become


@pytest.fixture
def rewrite() -> Rewrite:
    """`rewrite(shard, edit, rows_a_group=100, footer={})`: a committed shard holds other rows, which its line says."""
    return rewrite_shard


@pytest.fixture
def set_line() -> Callable[..., None]:
    """`set_line(shard, **changes)`: its journal line says something else; without changes, what the file is."""
    return set_journal_line


@pytest.fixture
def add_retry(make_completion: Callable[..., Completion]) -> Callable[[Path], Path]:
    """`add_retry(directory)`: samples (0, 0) and (1, 1) of a dataset are made again. Returns the list's file."""

    def add(directory: Path) -> Path:
        listed = RetryList(
            1,
            prompt_index=np.array([0, 1]),
            sample_index=np.array([0, 1], np.int32),
            max_tokens=np.full(2, RETRIED_TOKENS, np.int32),
        )
        path = directory / retry_file(1)
        listed.write(path)
        retry = Retry(
            generation=1,
            started_at=TIME,
            where={"finish_reason": "length"},
            max_tokens=RETRIED_TOKENS,
            samples=2,
            sha256=file_sha256(path),
        )
        manifest = read_manifest(directory).with_retry(retry)
        replace_manifest(directory, manifest)
        with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for key in ((0, 0), (1, 1)):
                completion = make_completion(*key, generation=1)
                sampling = replace(completion.sampling, max_tokens=RETRIED_TOKENS)
                writer.add(replace(completion, sampling=sampling))
        return path

    return add


def rewrite_shard(
    path: Path,
    edit: Callable[[Rows], Rows] = as_they_are,
    *,
    rows_a_group: int = 100,
    footer: Mapping[bytes, bytes | None] | None = None,
) -> None:
    with pq.ParquetFile(path) as file:
        table, schema = file.read(), file.schema_arrow
    metadata = {key: value for key, value in (schema.metadata | (footer or {})).items() if value is not None}
    schema = schema.with_metadata(metadata)
    rows = edit(table.to_pylist())
    starts = range(0, len(rows), rows_a_group)
    write_parquet(path, [pa.Table.from_pylist(rows[start : start + rows_a_group], schema) for start in starts], schema)
    set_journal_line(path)


def set_journal_line(path: Path, **changes: Any) -> None:
    journal = path.parent.parent / "journal" / "w0.jsonl"
    lines = [json.loads(text) for text in journal.read_text().splitlines()]
    if not changes:
        with pq.ParquetFile(path) as file:
            table = file.read()
        changes = asdict(
            JournalLine(
                file=path.name,
                bytes=path.stat().st_size,
                sha256=file_sha256(path),
                footer_sha256=footer_sha256(path),
                rows=len(table),
                tokens=sum(map(len, table["token_ids"].to_pylist())),
                mask_ids=count_mask_ids(table),
            )
        )
    journal.write_text(
        "".join(json.dumps(line | (changes if line["file"] == path.name else {})) + "\n" for line in lines)
    )
