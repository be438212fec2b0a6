"""Finding stored rows by prompt id, reading key columns only, and only of row groups that may hold them.

The plan turns an id into a prompt_index; rows of a shard are sorted by it, so that the statistics of a row group
exclude nearly all others. A dataset without a plan is searched by the statistics of prompt_id, which exclude less.
Cost: a footer a shard (1 ms), and three narrow columns of each row group that is left.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import UsageError
from rollgen.format.reader import read_row_group, read_row_groups
from rollgen.format.schema import PLAN_FILE
from rollgen.prompts.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from rollgen.format.reader import ShardReader, StoredDataset, StoredShard

_KEY: Final = ("prompt_id", "sample_index", "generation")
_SUFFIX: Final = re.compile(r"(?P<id>.*):(?P<sample>[0-9]{1,9})(?:@(?P<generation>[0-9]{1,9}))?", re.DOTALL | re.ASCII)
_COMPARED_IDS: Final = 20_000
"""Ids that a mistyped one is compared with at most: about a second."""
_SUGGESTIONS: Final = 3


class Reading(NamedTuple):
    """One way to read a reference `ID`, `ID:K`, `ID:K@G`, or `RUN/` and one of these; what is None was not given."""

    prompt_id: str
    sample_index: int | None = None
    generation: int | None = None
    run: str | None = None

    def fits(self, location: Location) -> bool:
        """Whether a stored row is of this prompt."""
        return location.prompt_id == self.prompt_id and self.run in (None, location.run)

    @property
    def prompt(self) -> str:
        """In words."""
        return repr(self.prompt_id) if self.run is None else f"{self.prompt_id!r} of run {self.run!r}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where the row of one sample is."""

    shard: StoredShard
    row_group: int
    row: int
    """Inside the row group."""
    prompt_id: str
    sample_index: int
    generation: int
    run: str | None = None
    """Of a merged dataset."""


class Found(NamedTuple):
    """A stored sample, and what else is stored of its prompt."""

    location: Location
    samples: tuple[int, ...]
    """sample_index of every stored sample of the prompt, ascending."""
    generations: tuple[int, ...]
    """Of this sample, ascending; the last one is current."""


def readings(reference: str, runs: Collection[str] = ()) -> tuple[Reading, ...]:
    """How `reference` may be meant, the literal way first: an id may have colons and digits of its own.

    Where there are `runs`, one of their names in front of a slash is meant as such before all else.
    """
    run, slash, rest = reference.partition("/")
    of_run = [way._replace(run=run) for way in readings(rest)] if slash and run in runs else []
    match = _SUFFIX.fullmatch(reference)
    if match is None:
        return (*of_run, Reading(reference))
    generation = match["generation"]
    return (
        *of_run,
        Reading(reference),
        Reading(match["id"], int(match["sample"]), None if generation is None else int(generation)),
    )


def find_sample(dataset: StoredDataset, reference: str) -> Found:
    """The sample that `reference` names; the first stored one and the current generation where it names none.

    Raises UsageError, saying what is stored instead, when there is no such sample, or one in several runs.
    """
    runs = dataset.manifest.run_names
    ways = readings(reference, runs)
    planned = _planned_ids(dataset.directory / PLAN_FILE)
    ids = [way.prompt_id for way in ways]
    indices = None if planned is None else np.flatnonzero(_is_in(planned, ids)).tolist()
    stored = list(stored_rows(dataset.shards, ids, indices))
    for way in ways:
        if rows := [location for location in stored if way.fits(location)]:
            if runs:
                _check_run(way, rows)
            return _choose(way, rows)
    known = _some_ids(dataset.shards) if planned is None else planned
    raise UsageError(_unknown(ways, known, is_planned=bool(indices)))


def _check_run(way: Reading, stored: Sequence[Location]) -> None:
    """Raise UsageError for a prompt of several runs, unless the reference names one."""
    homes = sorted({location.run for location in stored if location.run is not None})
    if len(homes) > 1:
        raise UsageError(
            f"--sample: prompt {way.prompt_id!r} is in several runs ({', '.join(homes)}); name one of them, like "
            f"{homes[0]}/{way.prompt_id}"
        )


def stored_rows(
    shards: Sequence[StoredShard], prompt_ids: Collection[str], prompt_indices: Collection[int] | None
) -> Iterator[Location]:
    """Every stored row of these prompts, superseded ones included. `prompt_indices`, where known, are their places.

    Raises DatasetError, naming file and row group, for damage in what has to be read.
    """
    by_index = prompt_indices is not None
    column, values = ("prompt_index", sorted(prompt_indices or ())) if by_index else ("prompt_id", sorted(prompt_ids))
    for shard in shards if values else ():
        with shard.open() as reader:
            for index in range(len(reader.row_group_rows)):
                if may_hold(reader.parquet.bounds(index, column), values):
                    yield from _matching(shard, reader, index, prompt_ids)


def may_hold(bounds: tuple[bytes, bytes] | None, values: Sequence[Any]) -> bool:
    """Whether a column with these bounds (Parquet statistics) may hold one of the sorted `values`, text or int64.

    Without bounds it may: pyarrow writes none for very long ids.
    """
    if bounds is None or not values:
        return bounds is None
    low, high = (_like(bound, values[0]) for bound in bounds)
    place = bisect_left(values, low)
    return place < len(values) and bool(values[place] <= high)


def _like(bound: bytes, value: Any) -> Any:
    """A bound as a value of this type. Text that is none, in a hostile file, is as good as any other."""
    return bound.decode(errors="replace") if isinstance(value, str) else int.from_bytes(bound, "little", signed=True)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending integers as text: `0-3, 7`."""
    parts: list[list[int]] = []
    for value in numbers:
        if parts and value == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _planned_ids(path: Path) -> Any:
    """The ids of all rows of the plan, in order; None without a plan."""
    if not path.exists():
        return None
    plan = Plan(path)
    return plan.prompt_ids(np.arange(plan.prompts))


def _matching(shard: StoredShard, reader: ShardReader, index: int, prompt_ids: Collection[str]) -> Iterator[Location]:
    names = [name for name in (*_KEY, "run") if name in reader.schema.names]
    table = read_row_group(reader, index, names)
    rows = np.flatnonzero(_is_in(table["prompt_id"], prompt_ids))
    for row, key in zip(rows.tolist(), table.take(pa.array(rows)).to_pylist(), strict=True):
        yield Location(shard, index, row, **key)


def _is_in(column: Any, prompt_ids: Collection[str]) -> Any:
    return pc.is_in(column, pa.array(list(prompt_ids), pa.string())).to_numpy(zero_copy_only=False)


def _choose(way: Reading, stored: Sequence[Location]) -> Found:
    """The row that `way` means among all rows of its prompt."""
    samples = sorted({location.sample_index for location in stored})
    wanted = samples[0] if way.sample_index is None else way.sample_index
    if wanted not in samples:
        raise UsageError(f"--sample: sample {wanted} of {way.prompt} is not stored; stored: {ranges(samples)}")
    by_generation = {location.generation: location for location in stored if location.sample_index == wanted}
    generations = sorted(by_generation)
    generation = generations[-1] if way.generation is None else way.generation
    if generation not in by_generation:
        raise UsageError(
            f"--sample: generation {generation} of sample {wanted} of {way.prompt} is not stored; "
            f"stored: {ranges(generations)}"
        )
    return Found(by_generation[generation], tuple(samples), tuple(generations))


def _unknown(ways: Sequence[Reading], known: Any, *, is_planned: bool) -> str:
    way = next((way for way in reversed(ways) if way.run is not None), ways[-1])
    if is_planned:
        return f"--sample: nothing of prompt {way.prompt} is stored yet; see `rollgen status` for what is owed"
    close = _close_matches(way.prompt_id, known)
    if close:
        hint = f"did you mean {', '.join(map(repr, close))}?"
    else:
        some = ", ".join(map(repr, known[:_SUGGESTIONS].to_pylist()))
        hint = f"ids are those of the prompt rows{f', like {some}' if some else ''}"
    return f"--sample: no prompt {way.prompt} in this dataset; {hint}"


def _close_matches(asked: str, known: Any) -> list[str]:
    """Ids that contain what was asked for, then similar ones of the first many."""
    containing = known.filter(pc.match_substring(known, asked, ignore_case=True))[:_SUGGESTIONS].to_pylist()
    similar = difflib.get_close_matches(asked, known[:_COMPARED_IDS].to_pylist(), _SUGGESTIONS)
    return list(dict.fromkeys([*containing, *similar]))[:_SUGGESTIONS]


def _some_ids(shards: Sequence[StoredShard]) -> pa.Array:
    """Ids of a dataset without a plan, as many as a mistyped one is compared with."""
    return pa.array(list(islice(dict.fromkeys(_each_id(shards)), _COMPARED_IDS)), pa.string())


def _each_id(shards: Sequence[StoredShard]) -> Iterator[str]:
    for shard in shards:
        with shard.open() as reader:
            for table in read_row_groups(reader, ["prompt_id"]):
                yield from table["prompt_id"].unique().to_pylist()
