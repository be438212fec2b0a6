"""`RolloutDataset`: a dataset directory as a map-style PyTorch Dataset, `ds[i] -> Rollout`.

Opening reads the footers, the keys and the `replayable` column of every shard, no more. A row group is the unit of
reading: it is decoded once, checksums verified, into numpy arrays, and kept in a small cache; a sample is a slice of
these, copied. So reading in order or in neighbourhoods is fast (a few million tokens a second), while a fully shuffled
pass over a dataset larger than the cache decodes a row group for most samples.

Works in DataLoader workers, forked or spawned: no file stays open between reads, and the cache is not pickled.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_index
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rollgen.errors import DatasetError, UsageError
from rollgen.format.manifest import Manifest
from rollgen.format.ragged import NestedRagged, Ragged, nested_ragged, ragged
from rollgen.format.reader import ShardReader, StoredShard, open_dataset, read_columns, read_row_group
from rollgen.loader.batch import Rollout
from rollgen.ops import Support

CACHED_ROW_GROUPS: Final = 16
"""Decoded row groups kept per process: some 5 MB each."""

_SCALARS: Final = (
    "prompt_id",
    "sample_index",
    "generation",
    "prompt_index",
    "finish_reason",
    "stop_reason",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "max_tokens",
    "seed",
    "replayable",
    "text",
    "prompt",
    "metadata",
)
"""Columns that a Rollout has under the same name, one value a row."""


class RolloutDataset(Dataset[Rollout]):
    """All committed samples of a dataset directory, by shard name and row.

    Of a sample that was made again, with a larger max_tokens, only the latest row is one of them, unless
    `all_generations`: then every row that is stored is.

    Raises DatasetError when the directory is not a complete, undamaged dataset, and UsageError when it holds samples
    that cannot be replayed (penalties, biases: relative logits were changed inside the support), unless
    `allow_unreplayable`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, allow_unreplayable: bool = False, all_generations: bool = False
    ) -> None:
        dataset = open_dataset(Path(path))
        self.manifest: Manifest = dataset.manifest
        self._shards = dataset.shards
        places: list[tuple[int, int, int]] = []
        keys: list[Keys] = []
        for number, stored in enumerate(self._shards):
            with stored.open() as shard:
                if not allow_unreplayable:
                    check_replayable(shard)
                keys.append(_keys(shard, retried=bool(self.manifest.retries)))
                places += [(number, group, rows) for group, rows in enumerate(shard.row_group_rows)]
        current = _current_rows(keys, self._shards)
        self._places: npt.NDArray[np.int64] = np.array(places, np.int64).reshape(-1, 3)
        """int64 [G, 3]: shard, row group, rows. An array: a list would be copied by each forked worker touching it."""
        self._ends: npt.NDArray[np.int64] = np.cumsum(self._places[:, 2])
        self._rows: npt.NDArray[np.int64] | None = None if all_generations or current.all() else np.flatnonzero(current)
        """int64 [len(self)], rising: numbers of the rows that are handed out; None for all of them."""
        self._cache: OrderedDict[int, RowGroup] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        """Of the model that sampled; support ids lie below it."""
        return self.manifest.vocab_size

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Rollout:
        group, row = self._locate(index)
        return self._row_group(group).rollout(row)

    def __getitems__(self, indices: Sequence[int]) -> list[Rollout]:
        """What a DataLoader calls for a batch: each row group is decoded once, however the indices are shuffled."""
        rollouts = {index: self[index] for index in sorted(indices)}
        return [rollouts[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": OrderedDict()}

    def _locate(self, index: int) -> tuple[int, int]:
        """Row group (of all shards together) and row inside it. Raises IndexError."""
        position = as_index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        position %= len(self)
        row = position if self._rows is None else int(self._rows[position])
        group = int(np.searchsorted(self._ends, row, side="right"))
        return group, row - int(self._ends[group] - self._places[group, 2])

    def _row_group(self, group: int) -> RowGroup:
        cached = self._cache.pop(group, None)
        if cached is None:
            shard, index, _ = (int(value) for value in self._places[group])
            cached = load_row_group(self._shards[shard], index, self.vocab_size)
        self._cache[group] = cached  # last place: most recently used
        if len(self._cache) > CACHED_ROW_GROUPS:
            self._cache.popitem(last=False)
        return cached


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """A decoded row group of R rows and T generated tokens."""

    prompt_ids: Ragged
    token_ids: Ragged
    logprobs: Ragged
    mask: NestedRagged
    support_logprobs: npt.NDArray[np.float32] | None
    """float32, parallel to `mask.values`; None when not stored."""
    scalars: pa.Table
    """The columns `_SCALARS`, R rows."""
    vocab_size: int

    def __len__(self) -> int:
        return len(self.token_ids.offsets) - 1

    def rollout(self, row: int) -> Rollout:
        """One row as tensors of its own memory."""
        start, stop = self.mask.row_offsets[row : row + 2]
        offsets = self.mask.offsets[start : stop + 1]
        ids = slice(offsets[0], offsets[-1])
        stored = self.support_logprobs
        return Rollout(
            prompt_ids=_tensor(self.prompt_ids, row, np.int64),
            token_ids=_tensor(self.token_ids, row, np.int64),
            logprobs=_tensor(self.logprobs, row, np.float32),
            support=Support(
                torch.from_numpy(self.mask.values[ids].copy()),
                torch.from_numpy(offsets - offsets[0]),
                self.vocab_size,
            ),
            stored_support_logprobs=None if stored is None else torch.from_numpy(stored[ids].copy()),
            **{name: self.scalars[name][row].as_py() for name in _SCALARS},
        )


def check_replayable(shard: ShardReader) -> None:
    """Raise UsageError when any row of the shard says that it cannot be replayed."""
    for index in range(len(shard.row_group_rows)):
        column = read_row_group(shard, index, ["replayable"])["replayable"]
        refused = sum(chunk.false_count for chunk in column.chunks)
        if refused:
            raise UsageError(
                f"{shard.path}: row group {index}: {refused} samples are not replayable (penalties or "
                "biases changed the logits inside the support); allow_unreplayable=True takes them all the same"
            )


class Keys(NamedTuple):
    """The keys of a shard's rows, in file order."""

    prompt_index: npt.NDArray[np.int64]
    sample_index: npt.NDArray[np.int32]
    generation: npt.NDArray[np.int32]


def _keys(shard: ShardReader, *, retried: bool) -> Keys:
    """Without retries every generation is 0, and its column is not read."""
    table = read_columns(shard, Keys._fields if retried else Keys._fields[:2])
    prompt_index, sample_index, *generation = (column.to_numpy() for column in table.columns)
    return Keys(prompt_index, sample_index, *(generation or [np.zeros_like(sample_index)]))


def _current_rows(keys: Sequence[Keys], shards: Sequence[StoredShard]) -> npt.NDArray[np.bool_]:
    """Of all rows of all shards, which have the highest generation of their sample.

    Raises DatasetError when a generation of a sample is in the dataset twice: a shard was copied.
    """
    if not keys:
        return np.empty(0, np.bool_)
    prompt, sample, generation = (np.concatenate(column) for column in zip(*keys, strict=True))
    order = np.lexsort((generation, sample, prompt))
    same_sample = (np.diff(prompt[order]) == 0) & (np.diff(sample[order]) == 0)
    repeated = np.flatnonzero(same_sample & (np.diff(generation[order]) == 0))
    if repeated.size:
        ends = np.cumsum([len(part.prompt_index) for part in keys])
        one, other = (
            shards[int(np.searchsorted(ends, order[at], side="right"))] for at in (repeated[0], repeated[0] + 1)
        )
        raise DatasetError(f"{other.path}: holds samples that {one.path.name} holds too; remove one of the two copies")
    current = np.ones(len(order), np.bool_)
    current[order[:-1][same_sample]] = False  # a later generation of the same sample follows
    return current


def load_row_group(stored: StoredShard, index: int, vocab_size: int) -> RowGroup:
    """Read, verify and decode one row group. Raises DatasetError for damage and for lists that do not align."""
    with stored.open() as shard:
        table = read_row_group(shard, index, use_threads=False)  # workers of a DataLoader are the parallelism
    token_ids, logprobs = ragged(table["token_ids"]), ragged(table["logprobs"])
    mask = nested_ragged(table["sampling_mask"])
    aligned = [(token_ids.offsets, logprobs.offsets), (token_ids.offsets, mask.row_offsets)]
    support = nested_ragged(table["support_logprobs"]) if "support_logprobs" in table.column_names else None
    if support is not None:
        aligned.append((mask.offsets, support.offsets))
    if not all(np.array_equal(one, other) for one, other in aligned):
        raise DatasetError(f"{stored.path}: row group {index}: tokens, logprobs and masks differ in length")
    if problem := _find_problem(table, np.diff(token_ids.offsets), mask, vocab_size):
        raise DatasetError(f"{stored.path}: row group {index}: {problem}")
    return RowGroup(
        prompt_ids=ragged(table["prompt_token_ids"]),
        token_ids=token_ids,
        logprobs=logprobs,
        mask=mask,
        support_logprobs=None if support is None else support.values,
        scalars=table.select(_SCALARS),
        vocab_size=vocab_size,
    )


def _find_problem(table: pa.Table, lengths: npt.NDArray[np.int64], mask: NestedRagged, vocab_size: int) -> str | None:
    """What would make a well-formed file train on wrong numbers in silence: the checks that cost next to nothing."""
    if not np.array_equal(table["response_length"].to_numpy(), lengths) or (lengths == 0).any():
        return "response_length is not the number of tokens, or is 0"
    if not (table["temperature"].to_numpy() > 0).all():
        return "a temperature is not above 0"
    truncates = (table["top_k"].to_numpy() > 0) | (table["top_p"].to_numpy() < 1) | (table["min_p"].to_numpy() > 0)
    if not np.array_equal(np.diff(mask.offsets) == 0, np.repeat(~truncates, lengths)):
        return "a support is empty or null although its row truncates, or is listed although it does not"
    if mask.values.size and (mask.values.min() < 0 or mask.values.max() >= vocab_size):
        return f"a support id is outside the model's vocabulary of {vocab_size}"
    return None


def _tensor(column: Ragged, row: int, dtype: npt.DTypeLike) -> Tensor:
    """One row as a tensor of its own memory: Arrow's buffers are read-only, and shared by the whole row group."""
    return torch.from_numpy(column.values[column.offsets[row] : column.offsets[row + 1]].astype(dtype))
