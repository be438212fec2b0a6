"""Rows against the plan: nothing twice, nothing that was not asked for, everything as it was asked for.

A row's place in the plan (`prompt_index`, `sample_index`, `generation`) says what else it must hold: the prompt, the
sampling parameters, the seed that the hash of section 9 of `schema/SPEC.md` gives, the length that a retry allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.format.keys import Keys
from rollgen.format.manifest import read_manifest
from rollgen.format.ragged import ragged
from rollgen.format.retries import RetryList, read_retries
from rollgen.format.row_groups import RowGroupCache
from rollgen.format.schema import PLAN_FILE
from rollgen.prompts.plan import Plan
from rollgen.prompts.single import id_number
from rollgen.rollouts import sample_seed

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

    Bools = npt.NDArray[np.bool_]

_COMPARED: Final = ("prompt_id", "prompt_token_ids", "prompt", "metadata")
_SAMPLING: Final = ("temperature", "top_p", "min_p", "top_k")
_NUMBERS: Final = (*_SAMPLING, "max_tokens", "seed")

CHECKED: Final = (*Keys._fields, *_COMPARED, *_NUMBERS)
"""Columns that `Planned.check` needs."""


class Mismatch(NamedTuple):
    """One way in which some rows of a table are not what was asked for."""

    kind: Literal["unplanned", "mismatch", "seed"]
    bad: Bools
    """bool [N], true at least once."""
    problem: str
    """Of the first of them."""


class Planned:
    """What was asked for, row groups of the plan at hand as they are needed.

    `retries` are the lists that could be read, from the oldest on. Whether rows of later generations were asked for,
    and how long they may be, is not judged.
    """

    def __init__(self, plan: Plan, retries: Sequence[RetryList]) -> None:
        self.plan = plan
        self.retries = retries
        self.numbers = [retry.numbers(plan.offsets) for retry in retries]
        """Of each retry, int64 [R], rising: its samples, numbered as `Plan.offsets` does."""
        self._starts = plan.group_starts()
        self._groups = RowGroupCache(plan.group)

    @classmethod
    def of_dataset(cls, directory: Path) -> Self:
        """Of the dataset in a directory. Raises DatasetError when its manifest, plan or retry lists are damaged."""
        return cls(Plan(directory / PLAN_FILE), read_retries(directory, read_manifest(directory)))

    def check(self, table: pa.Table) -> Iterator[Mismatch]:
        """What is wrong with rows of a shard, as far as the plan knows."""
        keys = Keys.of(table)
        known = self.is_planned(keys) | (self._is_in_plan(keys) & (keys.generation > len(self.retries)))
        if not known.all():
            row = int(known.argmin())
            yield Mismatch("unplanned", ~known, f"{keys.name(row)} is not in the plan")
        rows = np.flatnonzero(known)
        if not rows.size:
            return
        stored = table if known.all() else table.take(rows)
        for mismatch in self._check_known(stored, keys.take(rows)):
            bad = np.zeros(len(table), np.bool_)
            bad[rows] = mismatch.bad
            yield mismatch._replace(bad=bad)

    def problem(self, table: pa.Table) -> str | None:
        """The first thing that is wrong with them, and where."""
        return first_problem(self.check(table))

    def is_planned(self, keys: Keys) -> Bools:
        """bool [N]: which rows were asked for. A skipped row of the input has no samples."""
        known = self._is_in_plan(keys)
        for generation in np.unique(keys.generation[keys.generation != 0]).tolist():
            rows = np.flatnonzero(known & (keys.generation == generation))
            known[rows] = self._places(generation, keys.take(rows)) >= 0
        return known

    def _is_in_plan(self, keys: Keys) -> Bools:
        """The same, whatever the generation."""
        prompt, sample, plan = keys.prompt_index, keys.sample_index, self.plan
        known: Bools = (prompt >= 0) & (prompt < plan.prompts) & (sample >= 0)
        known[known] &= (sample[known] < plan.n[prompt[known]]) & ~plan.tombstone[prompt[known]]
        return known

    def _places(self, generation: int, keys: Keys) -> Int64Array:
        """Where samples of the plan are in the list of a retry; -1 where it has them not."""
        listed = self.numbers[generation - 1] if 0 < generation <= len(self.numbers) else np.zeros(0, np.int64)
        numbers = self.plan.offsets[keys.prompt_index] + keys.sample_index
        places = np.searchsorted(listed, numbers)
        found = places < len(listed)
        found[found] = listed[places[found]] == numbers[found]
        return np.where(found, places, -1)

    def _check_known(self, table: pa.Table, keys: Keys) -> Iterator[Mismatch]:
        differ, planned = self._compare(table.select(_COMPARED), keys.prompt_index)
        for name, bad in differ.items():
            if bad.any():
                yield Mismatch("mismatch", bad, f"{name} is not the plan's")
        for name in _SAMPLING:
            stored = table[name].to_numpy()
            with np.errstate(over="ignore"):  # what is too large for a row's type is not what the row holds
                bad = stored != planned[name].to_numpy().astype(stored.dtype)
            if bad.any():
                row = int(bad.argmax())
                yield Mismatch("mismatch", bad, f"{name} is {stored[row]}, the plan says {planned[name][row]}")
        stored, wanted = table["max_tokens"].to_numpy(), self._max_tokens(planned, keys)
        bad = (stored != wanted) & (wanted >= 0)
        if bad.any():
            row = int(bad.argmax())
            yield Mismatch("mismatch", bad, f"max_tokens is {stored[row]}, {wanted[row]} was asked for")
        yield from _check_seeds(table, planned["seed"].to_pylist())

    def _max_tokens(self, planned: pa.Table, keys: Keys) -> npt.NDArray[np.int32]:
        """int32 [N]: of the plan, and of the lists of retries; -1 where that cannot be told."""
        wanted: npt.NDArray[np.int32] = planned["max_tokens"].to_numpy().copy()
        for generation in np.unique(keys.generation[keys.generation > 0]).tolist():
            rows = np.flatnonzero(keys.generation == generation)
            if generation > len(self.retries):
                wanted[rows] = -1
            else:
                wanted[rows] = self.retries[generation - 1].max_tokens[self._places(generation, keys.take(rows))]
        return wanted

    def _compare(self, stored: pa.Table, prompt_index: Int64Array) -> tuple[dict[str, Bools], pa.Table]:
        """Which values of these columns are not the plan's, and what else it says of these prompts, in numbers.

        One row group of the plan after the other: the prompts may lie far apart, and their texts be of any length.
        """
        groups = np.searchsorted(self._starts, prompt_index, side="right") - 1
        order = np.argsort(groups, kind="stable")
        needed, first = np.unique(groups[order], return_index=True)
        differ = {name: np.zeros(len(stored), np.bool_) for name in stored.column_names}
        numbers = []
        for group, rows in zip(needed.tolist(), np.split(order, first[1:]), strict=True):
            planned, places = self._groups[group], prompt_index[rows] - self._starts[group]
            part = stored.take(pa.array(rows))
            for name, bad in differ.items():
                bad[rows] = _differ(part[name], planned[name], places)
            numbers.append(planned.select(_NUMBERS).take(pa.array(places)))
        return differ, pa.concat_tables(numbers).take(pa.array(np.argsort(order)))


def planless_numbers(prompt_ids: pa.ChunkedArray, runs: pa.ChunkedArray | None = None) -> Int64Array:
    """int64 [N]: the `prompt_index` of rows without a plan, by their ids, and in a merged dataset by their runs too.

    Sections 4 and 15 of `schema/SPEC.md`.
    """
    names = prompt_ids if runs is None else pc.binary_join_element_wise(runs, prompt_ids, "\n")
    encoded = names.combine_chunks().dictionary_encode()
    numbers = np.array([id_number(name) for name in encoded.dictionary.to_pylist()], np.int64)
    of_rows: Int64Array = numbers[encoded.indices.to_numpy()]
    return of_rows


def check_planless(table: pa.Table, runs: Collection[str] = ()) -> Iterator[Mismatch]:
    """What is wrong with rows of a dataset without a plan, of these `runs` if it is a merged one."""
    of_runs = table["run"] if runs and "run" in table.column_names else None
    if of_runs is not None:
        known = pc.is_in(of_runs, pa.array(list(runs), pa.string())).to_numpy(zero_copy_only=False)
        if not known.all():
            name = of_runs[int(known.argmin())].as_py()
            yield Mismatch("unplanned", ~known, f"run {name[:80]!r} is not one of those that the manifest names")
    bad = table["prompt_index"].to_numpy() != planless_numbers(table["prompt_id"], of_runs)
    if bad.any():
        yield Mismatch("mismatch", bad, f"prompt_index is not the number of its {'run and ' * bool(runs)}prompt_id")


def first_problem(mismatches: Iterator[Mismatch]) -> str | None:
    """In words, with its row; None when there is none."""
    return next((f"row {int(bad.argmax())}: {problem}" for _, bad, problem in mismatches), None)


def _check_seeds(table: pa.Table, seeds: Sequence[int]) -> Iterator[Mismatch]:
    rows = zip(seeds, table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    wanted = np.array([sample_seed(*row) for row in rows], np.int64)
    bad = table["seed"].to_numpy() != wanted
    if bad.any():
        yield Mismatch("seed", bad, f"the seed is not {wanted[bad.argmax()]}, the hash that the plan's seed gives")


def _differ(stored: pa.ChunkedArray, planned: pa.ChunkedArray, places: Int64Array) -> Bools:
    """bool [N]: which values, texts or lists of numbers, are not those of the plan at these places.

    Only where lengths are the same is any of it taken for each row: so that is no more than there is in the rows.
    """
    lengths = _lengths(stored)
    differ: Bools = lengths != _lengths(planned)[places]
    alike = np.flatnonzero(~differ)
    one, other = stored.take(pa.array(alike)), planned.take(pa.array(places[alike]))
    if one.equals(other):
        return differ
    if pa.types.is_list(stored.type):
        unequal = ragged(one).values != ragged(other).values
        differ[np.repeat(alike, np.maximum(lengths[alike], 0))[unequal]] = True
    else:
        differ[alike] = pc.fill_null(pc.not_equal(one, other), False).to_numpy()  # null only where both are
    return differ


def _lengths(column: pa.ChunkedArray) -> Int64Array:
    """int64 [N], of texts in bytes, of lists in values; -1 where it is null."""
    count = pc.list_value_length if pa.types.is_list(column.type) else pc.binary_length
    lengths: Int64Array = pc.fill_null(count(column), -1).to_numpy().astype(np.int64)
    return lengths
