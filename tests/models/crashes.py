"""A dataset as a crash or a disk left it, and what `recover` makes of it.

It has four prompts of two samples in two shards: shard 0 holds prompts 0 and 1, shard 1 holds 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from models.damage import flip

from rollgen.format.commit import WriterSlot
from rollgen.format.done import PlannedKeys
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import Manifest
from rollgen.format.recovery import recover
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, sample_seed

MakeCompletion = Callable[..., Completion]
MakeManifest = Callable[..., Manifest]
OFFSETS = np.array([0, 2, 4, 6, 8])
SEEDS = {sample_seed(0, f"p{prompt}", sample) for prompt in range(5) for sample in range(3)}


def problem(table: pa.Table) -> str | None:
    """What `random_prompt` has is planned."""
    return None if set(table["seed"].to_pylist()) <= SEEDS else "a seed that nobody planned"


def planned(offsets: np.ndarray = OFFSETS, name: str = "p") -> PlannedKeys:
    """Prompts p0, p1, ... of a plan."""
    return PlannedKeys(offsets, lambda indices: pa.array([f"{name}{index}" for index in indices]), problem)


ALL, SHARD_0_ONLY, SHARD_1_ONLY = [True] * 8, [True] * 4 + [False] * 4, [False] * 4 + [True] * 4


class Stored(NamedTuple):
    """The dataset, and where its parts are."""

    directory: Path
    digest: str
    lines: list[JournalLine]
    manifest: Manifest

    @property
    def journal(self) -> Path:
        return self.directory / "journal" / "w0.jsonl"

    def shard(self, index: int) -> Path:
        return self.directory / "data" / f"part-w0-{index:06d}.parquet"

    def forget_last_line(self) -> None:
        """As if the process died before it appended to the journal."""
        self.journal.write_bytes(self.journal.read_bytes().splitlines(keepends=True)[0])

    def recover(self, offsets: np.ndarray = OFFSETS, name: str = "p") -> tuple[list[bool], tuple[str, ...]]:
        with WriterSlot(self.directory, "w0") as slot:
            recovery = recover(slot, self.digest, planned(offsets, name))
        return recovery.done.tolist(), recovery.findings


def assert_stable(stored: Stored, done: list[bool]) -> None:
    """A second recovery finds the same, and nothing to report: the first has settled it."""
    assert stored.recover() == (done, ())


def flip_page(path: Path, column: str) -> None:
    """Flip a bit in the data of the last page of a column of the first row group."""
    row_group = pq.read_metadata(path).row_group(0)
    chunks = [row_group.column(index) for index in range(row_group.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]
    flip(path, chunk.data_page_offset + chunk.total_compressed_size - 1)


def write_shard(directory: Path, manifest: Manifest, rows: list[Completion], writer: str = "w0") -> None:
    with WriterSlot(directory, writer) as slot, ShardWriter(slot, manifest, commit_interval=1) as shard_writer:
        for row in rows:
            shard_writer.add(row)
