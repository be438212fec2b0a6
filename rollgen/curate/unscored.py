"""The samples of a dataset that have no reward yet, read row group by row group.

Of rows that have one, only the ids of their tokens are read, because a reward belongs to these: a sample that was made
again has none. Memory is that of one row group, and some 40 bytes for each row of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.curate.answers import StoredAnswer
from rollgen.format.keys import read_rows
from rollgen.format.ragged import ragged
from rollgen.format.reader import ShardReader, StoredDataset, read_row_group
from rollgen.format.rewards import REWARD, Rewards, token_checksums

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

_COLUMNS: Final = (
    *("prompt_id", "prompt_index", "sample_index", "generation", "finish_reason", "stop_reason", "max_tokens"),
    *("prompt", "text", "metadata"),
)


@dataclass(slots=True)
class Tally:
    """What there is before anything is scored."""

    samples: int
    """Current ones."""
    kept: int = 0
    """That have a reward already, as far as has been read."""
    total: float = 0.0
    """Sum of these."""


class Unscored:
    """The current samples of a dataset that are not among `earlier` rewards."""

    def __init__(self, dataset: StoredDataset, earlier: Rewards) -> None:
        """Reads the keys of all rows. Raises DatasetError for damage."""
        self._shards = dataset.shards
        rows = read_rows(dataset.shards)
        self._starts = rows.starts
        self._current = rows.current()
        place = earlier.rows_of(rows.keys)
        there = np.flatnonzero(place >= 0)
        self._reward = np.full(len(place), np.nan)
        self._checksum = np.full(len(place), -1)
        self._reward[there] = earlier.values[REWARD][place[there]]
        self._checksum[there] = earlier.tokens_crc32[place[there]]
        self.tally = Tally(samples=int(self._current.sum()))

    def batches(self, size: int) -> Iterator[list[StoredAnswer]]:
        """All of them, at most `size` at a time, every page that is read verified. Raises DatasetError for damage."""
        for number, stored in enumerate(self._shards):
            first = int(self._starts[number])
            with stored.open() as shard:
                for group, rows in enumerate(shard.row_group_rows):
                    answers = self._read(shard, group, slice(first, first + rows))
                    yield from (answers[start : start + size] for start in range(0, len(answers), size))
                    first += rows

    def _read(self, shard: ShardReader, group: int, rows: slice) -> list[StoredAnswer]:
        if not self._current[rows].any():
            return []
        table = read_row_group(shard, group, ["token_ids"], use_threads=False)
        checksums = token_checksums(ragged(table["token_ids"]))
        wanted = self._wanted(rows, checksums)
        if not wanted.any():
            return []
        others = read_row_group(shard, group, [*_COLUMNS, "prompt_token_ids"], use_threads=False)
        return _answers(others.append_column("token_ids", table["token_ids"]), checksums, np.flatnonzero(wanted))

    def _wanted(self, rows: slice, checksums: Int64Array) -> npt.NDArray[np.bool_]:
        """bool [rows]: which of them are to be scored; the others are counted."""
        rewards, current = self._reward[rows], self._current[rows]
        kept = current & ~np.isnan(rewards) & (self._checksum[rows] == checksums)
        self.tally.kept += int(kept.sum())
        self.tally.total += float(rewards[kept].sum())
        wanted: npt.NDArray[np.bool_] = current & ~kept
        return wanted


def _answers(table: pa.Table, checksums: Int64Array, wanted: Int64Array) -> list[StoredAnswer]:
    prompts, tokens = ragged(table["prompt_token_ids"]), ragged(table["token_ids"])
    plain = table.select(_COLUMNS).take(pa.array(wanted)).to_pylist()
    return [
        StoredAnswer(
            **row,
            tokens_crc32=int(checksums[at]),
            prompt_token_ids=prompts.values[prompts.offsets[at] : prompts.offsets[at + 1]],
            token_ids=tokens.values[tokens.offsets[at] : tokens.offsets[at + 1]],
        )
        for row, at in zip(plain, wanted.tolist(), strict=True)
    ]
