"""The samples of a dataset that have no reward yet, read row group by row group.

Of rows that have one, only the ids of their tokens are read, because a reward belongs to these: a sample that was made
again has none. A dataset whose shards are replaced meanwhile (a compaction) is opened again; no row is read twice, and
what a run has added is read too. (One that was made again in between, with other tokens, counts as read: the next
scoring finds it.) Memory is that of one row group, and some 40 bytes for each row of the dataset.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.curate.answers import StoredAnswer
from rollgen.errors import MissingFile, UsageError
from rollgen.format.journal import is_unfinished
from rollgen.format.keys import ShardRows, read_rows
from rollgen.format.ragged import ragged
from rollgen.format.reader import ShardReader, StoredDataset, StoredShard, open_dataset, read_row_group
from rollgen.format.rewards import Rewards, token_checksums
from rollgen.rollouts import REWARD

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

T = TypeVar("T")

_COLUMNS: Final = (
    *("prompt_id", "prompt_index", "sample_index", "generation", "finish_reason", "stop_reason", "max_tokens"),
    *("prompt", "text", "metadata"),
)
_REPLACING_SECONDS: Final = 30.0
"""That replacing shards may take once it is decided: renaming, no more. Else it was interrupted."""


@dataclass(slots=True)
class RewardTally:
    """What there is before anything is scored."""

    samples: int
    """Current ones, of the dataset as it was opened last."""
    kept: int = 0
    """That have a reward already, as far as has been read."""
    total: float = 0.0
    """Sum of these."""


class Unscored:
    """The current samples of a dataset that are not among `earlier` rewards."""

    def __init__(self, directory: Path, earlier: Rewards) -> None:
        """Reads the keys of all rows. Raises DatasetError for damage."""
        self._directory = directory
        self._rows = _read_all(directory)
        self._current = self._rows.current()
        self._is_read = np.zeros(len(self._current), np.bool_)
        place = earlier.rows_of(self._rows.keys)
        self._reward, self._checksum = (
            _at(place, earlier.values[REWARD], math.nan),
            _at(place, earlier.tokens_crc32, -1),
        )
        self.tally = RewardTally(samples=int(self._current.sum()))

    def batches(self, size: int) -> Iterator[list[StoredAnswer]]:
        """All of them, at most `size` at a time, every page that is read verified. Raises DatasetError for damage."""
        number = 0
        while number < len(self._rows.shards):
            try:
                shard = self._rows.shards[number].open()
            except MissingFile:
                if not self._open_again():
                    raise
                number = 0
                continue
            with shard:
                yield from self._of_shard(shard, int(self._rows.starts[number]), size)
            number += 1

    def _of_shard(self, shard: ShardReader, first: int, size: int) -> Iterator[list[StoredAnswer]]:
        for group, count in enumerate(shard.row_group_rows):
            rows = slice(first, first + count)
            answers = self._read(shard, group, rows)
            self._is_read[rows] = True
            yield from (answers[start : start + size] for start in range(0, len(answers), size))
            first += count

    def _open_again(self) -> bool:
        """The same rows where they are now, and others that were added; False where it has the same shards as before.

        Raises DatasetError for damage.
        """
        rows = _read_all(self._directory)
        if _names(rows.shards) == _names(self._rows.shards):
            return False
        before = self._rows.keys.last_rows_of(rows.keys)
        self._rows, self._current = rows, rows.current()
        self._is_read = _at(before, self._is_read, False)
        self._reward, self._checksum = _at(before, self._reward, math.nan), _at(before, self._checksum, -1)
        self.tally.samples = int(self._current.sum())
        return True

    def _read(self, shard: ShardReader, group: int, rows: slice) -> list[StoredAnswer]:
        if not self._is_due(rows).any():
            return []
        table = read_row_group(shard, group, ["token_ids"], use_threads=False)
        checksums = token_checksums(ragged(table["token_ids"]))
        wanted = self._wanted(rows, checksums)
        if not wanted.any():
            return []
        others = read_row_group(shard, group, [*_COLUMNS, "prompt_token_ids"], use_threads=False)
        return _answers(others.append_column("token_ids", table["token_ids"]), checksums, np.flatnonzero(wanted))

    def _is_due(self, rows: slice) -> npt.NDArray[np.bool_]:
        """bool [rows]: which of them are current and have not been read."""
        due: npt.NDArray[np.bool_] = self._current[rows] & ~self._is_read[rows]
        return due

    def _wanted(self, rows: slice, checksums: Int64Array) -> npt.NDArray[np.bool_]:
        """bool [rows]: which of them are to be scored; the others are counted."""
        rewards, due = self._reward[rows], self._is_due(rows)
        kept = due & ~np.isnan(rewards) & (self._checksum[rows] == checksums)
        self.tally.kept += int(kept.sum())
        self.tally.total += float(rewards[kept].sum())
        wanted: npt.NDArray[np.bool_] = due & ~kept
        return wanted


def _at(place: Int64Array, values: npt.NDArray[Any], missing: float) -> npt.NDArray[Any]:
    """Of each place, of which -1 is none, its value."""
    found = np.full(len(place), missing, values.dtype)
    found[place >= 0] = values[place[place >= 0]]
    return found


def check_field(directory: Path, field: str) -> None:
    """Raise UsageError when the metadata of no row of a dataset has this field, naming those that there are.

    Reads the metadata of row group after row group, until one has it. Raises DatasetError for damage.
    """
    while_replaced(directory, lambda dataset: _check_field(dataset, field))


def _check_field(dataset: StoredDataset, field: str) -> None:
    fields: dict[str, None] = {}
    rows = 0
    for stored in dataset.shards:
        with stored.open() as shard:
            for group, count in enumerate(shard.row_group_rows):
                column = read_row_group(shard, group, ["metadata"], use_threads=False)["metadata"]
                fields |= dict.fromkeys(name for text in column.unique().to_pylist() for name in _names_in(text))
                rows += count
                if field in fields:
                    return
    if rows:
        there = f"there are: {', '.join(map(repr, fields))}" if fields else "there are none"
        raise UsageError(f"{dataset.directory}: no row has a field {field!r} in its metadata; {there}")


def _names_in(metadata: str | None) -> list[str]:
    """The fields; none of what is no JSON object, which is told of the answer that has it."""
    try:
        said = json.loads(metadata or "{}")
    except (ValueError, RecursionError):
        return []
    return list(said) if isinstance(said, dict) else []


def _read_all(directory: Path) -> ShardRows:
    return while_replaced(directory, lambda dataset: read_rows(dataset.shards))


def while_replaced(directory: Path, use: Callable[[StoredDataset], T]) -> T:
    """What `use` makes of a dataset, which is opened again as often as its shards are replaced meanwhile.

    Raises what `use` raises, and DatasetError where replacing them was interrupted.
    """
    names: list[str] | None = None
    while True:
        patience = time.monotonic() + _REPLACING_SECONDS
        while is_unfinished(directory) and time.monotonic() < patience:
            time.sleep(0.05)
        dataset = open_dataset(directory)
        try:
            return use(dataset)
        except MissingFile:
            if names == _names(dataset.shards):
                raise
            names = _names(dataset.shards)


def _names(shards: Sequence[StoredShard]) -> list[str]:
    return [stored.name for stored in shards]


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
