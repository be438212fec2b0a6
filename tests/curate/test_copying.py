"""What it costs to copy rows: how often they are decoded, wherever they lie, and how much memory they take."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rollgen.curate.copying as copying
from rollgen.config import digest
from rollgen.curate.layout import read_index
from rollgen.curate.merge import merge
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import PLANLESS, Manifest, create_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.writer import ShardWriter
from rollgen.prompts.single import id_number
from rollgen.rollouts import Completion

PASSES = 3
PROMPTS = 24
ROWS = 4
"""Of a shard, which is one row group."""


def store_passes(
    directory: Path, number: int, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Completion]
) -> Path:
    """Each pass makes one sample of every prompt, in an order of its own: 18 row groups."""
    identity = {PLANLESS: True, "seed": number}
    manifest = make_manifest(identity=identity, config_digest=digest(identity))
    directory.mkdir()
    create_manifest(directory, manifest)
    order = np.random.default_rng(number)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for sample in range(PASSES):
            for made, prompt in enumerate(order.permutation(PROMPTS).tolist(), 1):
                name = f"p{prompt}"
                writer.add(replace(make_completion(prompt, sample), prompt_index=id_number(name)))
                if made % ROWS == 0:
                    writer.flush()
    return directory


def test_each_row_group_is_decoded_once_to_copy_and_once_to_compare(
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a new shard, wherever its rows lie: a cache of those used last would decode most again for every sample."""
    sources = [store_passes(tmp_path / str(n), n, make_manifest, make_completion) for n in range(2)]
    datasets = [open_dataset(path) for path in sources]
    whole = sum(int(read_index(each.shards, each.manifest.optional_columns).sizes.sum()) for each in datasets)
    for module in ("copying", "merge"):
        monkeypatch.setattr(f"rollgen.curate.{module}.CACHE_BYTES", whole // 3)
    read = Counter[tuple[str, int]]()
    real = copying.read_row_group

    def counted(shard: Any, number: int) -> Any:
        read[shard.place, number] += 1
        return real(shard, number)

    monkeypatch.setattr(copying, "read_row_group", counted)
    shards = merge(sources, tmp_path / "out").shards
    old = {place: count for place, count in read.items() if ".tmp-merge" not in place[0]}
    assert len(old) == 2 * PASSES * PROMPTS // ROWS
    assert shards in (3, 4)
    assert max(old.values()) <= 2 * shards


def store_texts(
    directory: Path, rows: int, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Completion]
) -> Path:
    """Shards of one row whose prompts are the same long text."""
    identity = {PLANLESS: True}
    manifest = make_manifest(identity=identity, config_digest=digest(identity))
    create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for number in range(rows):
            made = make_completion(number, prompt="x" * 10_000)
            writer.add(replace(made, prompt_index=id_number(made.prompt_id)))
    return directory


def test_a_text_that_many_rows_have(
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a row group it is stored once, decoded in each of them: no more are held at once than may be.

    48 rows of 10 kB are some 500 kB, where 60 kB may be held: four times in half leaves parts of three.
    """
    store_texts(tmp_path, 48, make_manifest, make_completion)
    [stored] = open_dataset(tmp_path).shards
    index = read_index([stored], make_manifest().optional_columns)
    rows = np.random.default_rng(0).permutation(48)
    with stored.open() as shard:
        whole = copying.read_row_group(shard, 0)
    monkeypatch.setattr(copying, "_MOST_BYTES", 60_000)
    parts = list(copying._gathered(index, rows, whole.schema, copying.as_it_is))
    assert pa.concat_tables(parts).equals(whole.take(pa.array(rows)))
    assert len(parts) == 16
    assert max(part.nbytes for part in parts) <= 60_000


MANY = 20_000
MEMORY = """
import resource, sys
from pathlib import Path
from rollgen.curate.compact import compact

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

compact(Path(sys.argv[1]), dry_run=True)
before = peak()
compact(Path(sys.argv[1]))
print(peak() - before)
"""


def test_memory_is_not_that_of_a_table_for_each_row(
    tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Completion]
) -> None:
    """A table takes 20 kB, however short its rows, and these are alone where they lie: 400 MB in all.

    Their own content is 10 MB. Even and odd prompts are in two shards, so that in the new one none follows another.
    """
    manifest = make_manifest()
    create_manifest(tmp_path, manifest)
    made = [make_completion(number, tokens=2) for number in range(64)]
    with WriterSlot(tmp_path, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for odd in range(2):
            for number in range(odd, MANY, 2):
                writer.add(replace(made[number % 64], prompt_id=f"p{number}", prompt_index=number))
            writer.flush()
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, timeout=180)
    assert int(done.stdout) < 150 << 20
    assert len(open_dataset(tmp_path).shards) == 1
