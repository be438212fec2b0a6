"""Which samples are stored, as a start finds it out shard by shard, and whether a shard is of this dataset at all.

Settings alone do not tell a dataset from one that was there before, under the same ids and other prompts: rows do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import DatasetError
from rollgen.format.reader import StoredKeys
from rollgen.format.retries import RetryList

Bools = npt.NDArray[np.bool_]
Problem = Callable[[pa.Table], str | None]
"""What keeps rows, given with all their columns, from being of a dataset: in words, or None."""


class Located(Protocol):
    """Rows of a shard, N, whose samples have been looked up."""

    @property
    def new(self) -> Bools:
        """bool [N]: those that are not stored now; of two of the same sample, the first."""

    def mark(self, rows: Bools) -> None:
        """The samples of these rows, bool [N], are stored."""


class StoredSamples(Protocol):
    """What is stored, by their keys."""

    def problem(self, table: pa.Table) -> str | None:
        """See `Problem`."""

    def locate(self, keys: StoredKeys, place: Path | str) -> Located:
        """Look up the samples of a shard. Raises DatasetError for what is not planned."""
        ...

    def mark(self, keys: StoredKeys, place: Path | str) -> None:
        """These are stored. Raises DatasetError, having marked none, when one is stored already or not planned."""


@dataclass(frozen=True, slots=True)
class PlannedKeys:
    """What recovery must know of the plan."""

    sample_offsets: npt.NDArray[np.int64]
    """int64 [prompts + 1]: cumulative samples per prompt."""
    prompt_ids: Callable[[npt.NDArray[np.int64]], pa.Array]
    """The ids of the prompts with these indexes."""
    problem: Problem
    """What of rows is not as planned."""
    retries: Sequence[RetryList] = ()
    """Generations 1, 2, ..."""


class _Place(NamedTuple):
    """Rows of one generation, and where their flags are."""

    generation: int
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _PlannedRows:
    """`Located`."""

    count: int
    places: list[_Place]
    done: list[Bools]

    @property
    def new(self) -> Bools:
        new = np.zeros(self.count, np.bool_)
        for generation, rows, places in self.places:
            first = np.zeros(len(rows), np.bool_)
            first[np.unique(places, return_index=True)[1]] = True
            new[rows] = first & ~self.done[generation][places]
        return new

    def mark(self, rows: Bools) -> None:
        for generation, at, places in self.places:
            self.done[generation][places[rows[at]]] = True


class PlannedSamples:
    """`StoredSamples` of a dataset with a plan. Raises DatasetError when retries and plan contradict each other."""

    def __init__(self, planned: PlannedKeys) -> None:
        self._planned = planned
        self._numbers = [retries.numbers(planned.sample_offsets) for retries in planned.retries]
        sizes = (int(planned.sample_offsets[-1]), *map(len, planned.retries))
        self.done = [np.zeros(size, np.bool_) for size in sizes]
        """By generation, a flag for each planned sample, in plan order, or for each row of a retry list."""

    def problem(self, table: pa.Table) -> str | None:
        """See `StoredSamples`; so below."""
        return self._planned.problem(table)

    def locate(self, keys: StoredKeys, place: Path | str) -> Located:
        return _PlannedRows(len(keys.prompt_index), self._places_of(keys, place), self.done)

    def mark(self, keys: StoredKeys, place: Path | str) -> None:
        mark_all(self.locate(keys, place), place)

    def _places_of(self, keys: StoredKeys, place: Path | str) -> list[_Place]:
        """The flags of a shard's rows, by generation."""
        index, sample, offsets = keys.prompt_index, keys.sample_index, self._planned.sample_offsets
        known = (index >= 0) & (index < len(offsets) - 1)
        known[known] &= (sample[known] >= 0) & (sample[known] < np.diff(offsets)[index[known]])
        if known.all():
            known = pc.equal(keys.prompt_id, self._planned.prompt_ids(index)).to_numpy()
        _refuse_unknown(known, keys, place)
        located = []
        for generation in np.unique(keys.generation).tolist():
            rows = np.flatnonzero(keys.generation == generation)
            places = offsets[index[rows]] + sample[rows]
            if generation != 0:
                known[rows], places = self._places(generation, places)
                _refuse_unknown(known, keys, place)
            located.append(_Place(generation, rows, places))
        return located

    def _places(self, generation: int, wanted: npt.NDArray[np.int64]) -> tuple[Bools, npt.NDArray[np.int64]]:
        """Whether samples are in the list of this generation, and where."""
        listed = self._numbers[generation - 1] if 0 < generation <= len(self._numbers) else np.empty(0, np.int64)
        places = np.searchsorted(listed, wanted)
        found = places < len(listed)
        found[found] = listed[places[found]] == wanted[found]
        return found, places


def mark_all(located: Located, place: Path | str) -> None:
    """Mark all rows of a shard. Raises DatasetError, having marked none, when a sample is stored already."""
    new = located.new
    if not new.all():
        raise DatasetError(f"{place}: holds samples that are stored already; remove one of the two copies")
    located.mark(new)


def _refuse_unknown(known: Bools, keys: StoredKeys, place: Path | str) -> None:
    if not known.all():
        row = int(known.argmin())
        again = f" again in generation {keys.generation[row]}" if keys.generation[row] else ""
        key = f"({keys.prompt_id[row]}, {keys.sample_index[row]})"
        raise DatasetError(f"{place}: row {row}: {key} is not in the plan{again}")
