"""Which samples a page shows: `choose(dataset, ...)`.

Chosen at random, the same ones every time, in turn from each finish reason, so that the rare ones are there too.
Reads two narrow columns of every row group (a millisecond each), and holds some ten bytes a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.format.keys import read_rows
from rollgen.format.reader import read_row_group
from rollgen.format.schema import shard_schema

if TYPE_CHECKING:
    from rollgen.format.reader import StoredDataset, StoredShard

SEED: Final = 0
_COLUMNS: Final = ("finish_reason", "response_length")

Codes = npt.NDArray[np.int64]


class Row(NamedTuple):
    """Where a sample is stored."""

    shard: StoredShard
    row_group: int
    row: int


class Choice(NamedTuple):
    """Some of the samples of a dataset."""

    rows: list[Row]
    """In order of preference: any prefix is a fair choice."""
    of: int
    """Samples there are; superseded rows are none."""


def choose(dataset: StoredDataset, *, most: int, tokens: int, longest: int) -> Choice:
    """At most `most` samples of at most about `tokens` generated tokens; of a longer one `longest` tokens count.

    Raises DatasetError for damage.
    """
    groups, counts, table = _read(dataset)
    shards = dataset.shards
    rows = np.flatnonzero(read_rows(shards).current()) if dataset.manifest.retries else np.arange(len(table))
    order = rows[in_turn(_codes(table["finish_reason"])[rows], np.random.default_rng(SEED))][:most]
    lengths = np.minimum(table["response_length"].to_numpy()[order].astype(np.int64), longest)
    fitting = order[: max(1, int((lengths.cumsum() <= tokens).sum()))].tolist()
    starts = np.cumsum([0, *counts])
    places = np.searchsorted(starts, fitting, side="right") - 1
    chosen = []
    for row, place in zip(fitting, places.tolist(), strict=True):
        shard, row_group = groups[place]
        chosen.append(Row(shard, row_group, row - int(starts[place])))
    return Choice(chosen, len(rows))


def in_turn(codes: Codes, rng: np.random.Generator) -> Codes:
    """A random order of [N] things, one of each code in turn, as far as there are some."""
    shuffled = rng.permutation(len(codes))
    by_code = np.argsort(codes[shuffled], kind="stable")
    ordered = codes[shuffled][by_code]
    turn = np.empty(len(codes), np.int64)
    turn[by_code] = np.arange(len(codes)) - np.searchsorted(ordered, ordered)
    return shuffled[np.argsort(turn, kind="stable")]


def _read(dataset: StoredDataset) -> tuple[list[tuple[StoredShard, int]], list[int], pa.Table]:
    """Every row group, how many rows it has, and the narrow columns of all rows."""
    groups, tables = [], []
    for shard in dataset.shards:
        with shard.open() as reader:
            for index in range(len(reader.row_group_rows)):
                groups.append((shard, index))
                tables.append(read_row_group(reader, index, _COLUMNS, use_threads=False))
    empty = shard_schema(support_logprobs=False).empty_table().select(_COLUMNS)
    return groups, [len(table) for table in tables], pa.concat_tables([empty, *tables])


def _codes(column: pa.ChunkedArray) -> Codes:
    """A number for each distinct text."""
    encoded = column.combine_chunks().dictionary_encode()
    codes: Codes = encoded.indices.to_numpy().astype(np.int64)
    return codes
