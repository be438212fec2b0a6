"""Shards for which nothing vouches but themselves, because a crash or a storage that failed kept their journal line.

They are read whole: every page is verified, and every row must be one of this dataset. Of one that holds samples that
are stored elsewhere by now, the other rows make a shard too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from rollgen.errors import DatasetError, Unreadable
from rollgen.format.done import Bools, Problem
from rollgen.format.files import fsync_file
from rollgen.format.journal import JournalLine, file_sha256, footer_sha256
from rollgen.format.reader import (
    ShardReader,
    StoredKeys,
    count_mask_ids,
    open_shard,
    read_row_group,
    read_row_groups,
    stored_keys,
    verify_shard,
)
from rollgen.format.writer import write_parquet

_FOOTER_KEYS: Final = b"rollgen."
"""What those of ours begin with."""


class PlanUnreadable(Unreadable):
    """The plan is missing or damaged: nobody can tell whether rows are of this dataset."""


class Adopted(NamedTuple):
    """A sound shard of this dataset."""

    keys: StoredKeys
    line: JournalLine


def adopt(path: Path, config_digest: str, problem: Problem, place: str | None = None) -> Adopted:
    """Read a shard whole. Raises DatasetError, which names `place`, when it is damaged or not of this dataset,

    and PlanUnreadable when that cannot be told.
    """
    place = place or str(path)
    with open_shard(path, config_digest=config_digest, place=place) as shard:
        for index in range(len(shard.row_group_rows)):
            if found := _asked(problem, read_row_group(shard, index)):
                raise DatasetError(f"{place}: row group {index}: {found}: it is of another dataset")
        return Adopted(stored_keys(shard), line_of(path, shard))


def _asked(problem: Problem, table: pa.Table) -> str | None:
    try:
        return problem(table)
    except Unreadable:
        raise
    except DatasetError as error:
        raise PlanUnreadable(str(error)) from error


def line_of(path: Path, shard: ShardReader) -> JournalLine:
    """The journal line that a crash kept from being written, read back from the shard."""
    tokens = mask_ids = 0
    for table in read_row_groups(shard, ["response_length", "sampling_mask"]):
        tokens += int(table["response_length"].to_numpy().sum())
        mask_ids += count_mask_ids(table)
    rows, size = sum(shard.row_group_rows), path.stat().st_size
    return JournalLine(path.name, size, file_sha256(path), footer_sha256(path), rows, tokens, mask_ids)


def write_rows(path: Path, kept: Bools, target: Path) -> JournalLine:
    """Make a shard of some rows of one, which are bool [N], in their order. Returns its line. Raises OSError.

    It is on disk on return, if not under its name.
    """
    with open_shard(path) as shard:
        metadata = {name: text for name, text in shard.file.metadata.metadata.items() if name.startswith(_FOOTER_KEYS)}
        schema = pa.schema([field for field in shard.schema if field.name in shard.stored], metadata)
        write_parquet(target, _kept_row_groups(shard, schema, kept), schema)
    verify_shard(target)
    fsync_file(target)
    with open_shard(target) as shard:
        return line_of(target, shard)


def _kept_row_groups(shard: ShardReader, schema: pa.Schema, kept: Bools) -> Iterator[pa.Table]:
    starts = np.cumsum([0, *shard.row_group_rows])
    for index, (start, stop) in enumerate(pairwise(starts)):
        if kept[start:stop].any():
            yield read_row_group(shard, index, schema.names).filter(pa.array(kept[start:stop]))
