"""Prompt ids, unique over millions of rows in flat memory: 13 bytes a row, and no id is held as text.

A row without an id is named `<content hash>-<occurrence>`, 16 hex digits and a count from 0 over the rows with that
hash, in file order. So repeated prompts differ, and rows appended later rename none. Such names are unique among
themselves by construction, even when two contents share a hash.

Given ids are compared by 64-bit hashes first. Only rows whose hash occurs twice are read again, and there the texts
decide, so a collision of hashes refuses nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rollgen.prompts.rows import hash64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    from rollgen.prompts.rows import BadRow, Row
    from rollgen.prompts.sources import Line


def hash_id(prompt_id: str) -> int:
    """64 bits of an id."""
    return hash64(prompt_id.encode())


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A row whose id an earlier row has."""

    prompt_id: str
    """The id under which the row is recorded: the shared one, `#` and the first free number from 2."""
    first: Line
    """Where the earlier row is."""
    is_generated: bool
    """Whether the id was made for the later row, which has none of its own."""

    def problem(self, *, full_path: bool) -> str:
        """What is wrong and what to do."""
        place = str(self.first) if full_path else self.first.short
        shared = self.prompt_id.rpartition("#")[0]
        if self.is_generated:
            return f"the id made for this row, {shared!r}, is given at {place}; give this row an id of its own"
        return f'id {shared!r} is also at {place}; ids must be unique (7 and "7" are the same)'


class IdTable:
    """Names every row of a plan. Add the rows in order, call `freeze`, then look names up by row number."""

    def __init__(self, hash_id: Callable[[str], int] = hash_id) -> None:
        self._hash_id = hash_id
        self._hashes = array("Q")
        self._given = array("B")
        self._occurrences: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def nbytes(self) -> int:
        """Bytes retained."""
        return self._hashes.itemsize * len(self._hashes) + len(self._given) + self._occurrences.nbytes

    def add(self, row: Row | BadRow) -> None:
        """Take the next row into account."""
        given = row.prompt_id is not None
        self._hashes.append(self._hash_id(row.prompt_id) if row.prompt_id is not None else row.content_hash)
        self._given.append(given)

    def freeze(self) -> None:
        """Number the rows without an id; to be called once, after the last row."""
        generated = ~np.frombuffer(self._given, np.bool_)
        self._occurrences = np.zeros(len(self), np.int32)
        self._occurrences[generated] = _occurrences(np.frombuffer(self._hashes, np.uint64)[generated])

    def name(self, index: int, row: Row | BadRow) -> str:
        """The id of row number `index`, given or generated."""
        return row.prompt_id if row.prompt_id is not None else self._generated_id(index)

    def duplicates(self, rows: Iterable[tuple[Line, Row | BadRow]]) -> Iterator[tuple[int, Line, Duplicate]]:
        """Every row, by number, whose id an earlier row has. `rows` are read, once, only if two hashes are equal."""
        if not any(self._given):
            return
        hashes = self._final_hashes()
        hashes.sort()
        suspects = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        if not suspects.size:
            return
        first: dict[str, Line] = {}
        numbers: dict[str, int] = {}
        for index, (line, row) in enumerate(rows):
            name = self.name(index, row)
            if not _contains(suspects, self._hash_id(name)):
                continue
            if name not in first:
                first[name] = replace(line, data=b"")  # the place is all that is needed
                continue
            numbers[name] = self._free_number(name, numbers.get(name, 2), hashes)
            yield index, line, Duplicate(f"{name}#{numbers[name]}", first[name], is_generated=row.prompt_id is None)
            numbers[name] += 1

    def _final_hashes(self) -> npt.NDArray[np.uint64]:
        """uint64 [rows], a copy: the hash of each id as text, given or generated."""
        hashes = np.array(self._hashes, np.uint64)
        for index in np.flatnonzero(np.frombuffer(self._given, np.uint8) == 0):
            hashes[index] = self._hash_id(self._generated_id(index))
        return hashes

    def _free_number(self, name: str, number: int, hashes: npt.NDArray[np.uint64]) -> int:
        """The first from `number` on with which `name#number` is no row's id: an absent hash is an absent id."""
        while _contains(hashes, self._hash_id(f"{name}#{number}")):
            number += 1
        return number

    def _generated_id(self, index: int) -> str:
        return f"{self._hashes[index]:016x}-{self._occurrences[index]}"


def _occurrences(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """int32 [rows]: how many earlier rows have the same hash. `[7, 5, 7, 7]` gives `[0, 0, 1, 2]`."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if hashes.size else order
    lengths = np.diff(starts, append=hashes.size)
    occurrences = np.empty(hashes.size, np.int32)
    occurrences[order] = np.arange(hashes.size) - np.repeat(starts, lengths)
    return occurrences


def _contains(ordered: npt.NDArray[np.uint64], value: int) -> bool:
    position = np.searchsorted(ordered, np.uint64(value))
    return bool(position < ordered.size and ordered[position] == np.uint64(value))
