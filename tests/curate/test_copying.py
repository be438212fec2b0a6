"""How often rows that are copied are decoded: not by where they lie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
