"""What is merged: datasets whose ids mean the same, the runs they bring, and which of their rows are taken.

Everything is checked before anything is written, of the rows their keys and what they were asked for (`asked.py`), of
the shards every byte. Sources are only read. A shard never changes, so what is committed to a source meanwhile changes
nothing either: it is not in the merge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.arguments import list_of
from rollgen.curate.asked import Asked, check_shards
from rollgen.curate.layout import Index, read_index
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import live_writers
from rollgen.format.journal import file_sha256
from rollgen.format.keys import Keys
from rollgen.format.manifest import RUN_NAME, Manifest
from rollgen.format.reader import StoredDataset, open_dataset, read_columns, read_row_group
from rollgen.inert import brief
from rollgen.prompts.planned import planless_numbers

if TYPE_CHECKING:
    import numpy.typing as npt

    from rollgen.rollouts import Int32Array, Int64Array

    Bools = npt.NDArray[np.bool_]

_OTHER: Final = re.compile(r"[^A-Za-z0-9_.-]+")
"""What the name of a directory may have and that of a run may not."""
_LONGEST_NAME: Final = 100
"""Characters of RUN_NAME."""
_SAME: Final = ("vocab_size", "tokenizer_vocab_size", "tokenizer_sha256")
"""Keys of the manifest by which ids mean the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A dataset to be merged."""

    dataset: StoredDataset
    runs: tuple[str, ...]
    """Names that its runs will have: of a merged dataset all those it has, in their order, of any other one."""

    @property
    def place(self) -> Path:
        """Its directory."""
        return self.dataset.directory

    @property
    def manifest(self) -> Manifest:
        """Its own."""
        return self.dataset.manifest


class Told(NamedTuple):
    """What N rows say of themselves beside their keys."""

    run: Int32Array
    """int32 [N], number of the run, over the runs of all sources."""
    number: Int64Array
    """int64 [N], the `prompt_index` that they will have."""
    id_number: Int64Array
    """int64 [N], the number of the prompt's id alone."""
    seed: Int64Array
    """int64 [N]"""

    @classmethod
    def joined(cls, parts: Sequence[Told]) -> Told:
        """One after the other."""
        none = cls(np.zeros(0, np.int32), *(np.zeros(0, np.int64) for _ in range(3)))
        return cls(*map(np.concatenate, zip(none, *parts, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class SourceRows:
    """All R stored rows of all sources, and which of them are taken."""

    index: Index
    """With the keys that they will have."""
    told: Told
    current: Bools
    """bool [R]: not superseded."""
    owed: tuple[int | None, ...]
    """Of each source, samples that it wants and does not have; None without a plan."""
    stored: Keys
    """As they are in the sources."""
    ends: list[int]
    """Of the rows of each source, after a 0: [sources + 1]."""

    @property
    def run(self) -> Int32Array:
        """int32 [R], number of the run, over the runs of all sources."""
        return self.told.run

    @property
    def taken(self) -> Int64Array:
        """int64, the current rows in rising order of their new keys."""
        rows = np.flatnonzero(self.current)
        keys = self.index.rows
        taken: Int64Array = rows[np.lexsort((keys.sample_index[rows], keys.prompt_index[rows]))]
        return taken


def open_sources(directories: Sequence[Path], names: Sequence[str] | None) -> tuple[Source, ...]:
    """Open datasets that can be one. `names` are those of their runs; default: those of the directories.

    A merged dataset brings its own runs, called NAME.RUN where it has been given a name. Raises UsageError for fewer
    than two, one twice, names that are wrong or not unique, and datasets whose ids do not mean the same; ResumeRefused
    while a writer is alive; DatasetError for what is no sound dataset.
    """
    if len(directories) < 2:
        raise UsageError("merge: give two datasets or more")
    if names is not None:
        names = list_of(str, names, "names: give a list of texts, one for each dataset, in their order")
        if len(names) != len(directories):
            raise UsageError(f"--as: {len(names)} for {len(directories)} datasets; give one for each, in their order")
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory}: not a directory; name one that holds rollgen.json")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise UsageError("the same dataset directory was given twice: its samples would be, too")
    given: Sequence[str | None] = names if names is not None else [None] * len(directories)
    sources = []
    for directory, name in zip(directories, given, strict=True):
        if alive := live_writers(directory):
            raise ResumeRefused(f"{directory}: writer {min(alive)!r} is alive; wait for it, or stop it")
        dataset = open_dataset(directory)
        sources.append(Source(dataset, _runs_of(dataset, name)))
    _check_names(sources)
    _check_vocabularies(sources)
    return tuple(sources)


def _runs_of(dataset: StoredDataset, name: str | None) -> tuple[str, ...]:
    own = dataset.manifest.run_names
    if own:
        return own if name is None else tuple(f"{name}.{run}" for run in own)
    return (_OTHER.sub("-", dataset.directory.resolve().name)[:_LONGEST_NAME] if name is None else name,)


def _check_names(sources: Sequence[Source]) -> None:
    homes: dict[str, Path] = {}
    for source in sources:
        for name in source.runs:
            if not RUN_NAME.fullmatch(name):
                raise UsageError(
                    f"{source.place}: {brief(name)!r} is no name for a run; give one of at most {_LONGEST_NAME} "
                    "letters, digits, `.`, `_` and `-` with --as"
                )
            if name in homes:
                raise UsageError(
                    f"{source.place}: its run would be called {name!r}, like that of {homes[name]}; call them by --as, "
                    "once for each dataset"
                )
            homes[name] = source.place


def _check_vocabularies(sources: Sequence[Source]) -> None:
    first = sources[0]
    for other, key in ((other, key) for other in sources[1:] for key in _SAME):
        one, two = (getattr(source.manifest, key) for source in (first, other))
        if one != two:
            raise UsageError(
                f"{other.place}: its {key} is {two}, that of {first.place} is {one}: ids would not mean the same in "
                "both; merge datasets of one tokenizer and vocabulary"
            )


def common_columns(sources: Sequence[Source], drop: Sequence[str]) -> frozenset[str]:
    """The optional columns that the merged dataset has.

    Raises UsageError for one that not all sources have alike, unless it is in `drop`, and for one there that none has.
    """
    stored = {
        name: [source for source in sources if source.manifest.optional_columns[name]]
        for name in sources[0].manifest.optional_columns
        if name != "run"
    }
    for name in drop:
        if not stored.get(name):
            known = ", ".join(name for name, having in stored.items() if having) or "none"
            raise UsageError(f"--drop {name}: no optional column of these datasets; they have: {known}")
    kept = {name: having for name, having in stored.items() if having and name not in drop}
    for name, having in kept.items():
        if without := [source for source in sources if source not in having]:
            raise UsageError(
                f"{without[0].place}: does not store {name}, which {having[0].place} stores; leave it out with "
                f"--drop {name}"
            )
    if "routed_experts" in kept:
        _check_experts(sources)
    return frozenset(kept)


def _check_experts(sources: Sequence[Source]) -> None:
    shapes = [(it.layers, it.top_k) for source in sources if (it := source.manifest.routed_experts) is not None]
    for source, shape in zip(sources, shapes, strict=True):
        if shape != shapes[0]:
            raise UsageError(
                f"{source.place}: its routed_experts are of {shape[0]} layers and {shape[1]} experts a token, those of "
                f"{sources[0].place} of {shapes[0][0]} and {shapes[0][1]}; leave them out with --drop routed_experts"
            )


def read_sources(sources: Sequence[Source], *, hashed: bool) -> SourceRows:
    """Read the keys of all rows, verified, and with `hashed` every byte of the shards.

    Raises DatasetError, naming the file, for one that is damaged, and for samples that would have one key.
    """
    indexes = [read_index(source.dataset.shards, source.manifest.optional_columns) for source in sources]
    for source, index in zip(sources, indexes, strict=True):
        check_shards(source.dataset, index)
    current = [index.current() for index in indexes]
    index = Index.joined(indexes)
    if hashed:
        _check_bytes(index)
    first_runs = np.cumsum([0, *(len(source.runs) for source in sources)]).tolist()
    asked = [Asked.of(source.dataset) for source in sources]
    told = Told.joined(
        [
            part
            for source, each, first in zip(sources, asked, first_runs, strict=False)
            for part in _read_told(source, each, first)
        ]
    )
    counts = [len(each.rows.generation) for each in indexes]
    rows = SourceRows(
        _with_keys(index, told.number),
        told,
        np.concatenate(current),
        tuple(each.owed(count) for each, count in zip(asked, counts, strict=True)),
        index.keys,
        np.cumsum([0, *counts]).tolist(),
    )
    _refuse_twins(rows)
    return rows


def _with_keys(index: Index, prompt_index: Int64Array) -> Index:
    rows = index.rows._replace(prompt_index=prompt_index, generation=np.zeros_like(index.rows.generation))
    return replace(index, rows=rows)


def _check_bytes(index: Index) -> None:
    for stored, line in zip(index.shards, index.lines, strict=True):
        if file_sha256(stored.path) != line.sha256:
            raise DatasetError(
                f"{stored.path}: damaged: not the bytes that were committed; `rollgen repair "
                f"{stored.path.parents[1]}` sets it aside"
            )


def _read_told(source: Source, asked: Asked, first_run: int) -> Iterator[Told]:
    """Of each row group, whose rows are checked."""
    runs = pa.array(source.runs, pa.string())
    columns = list(dict.fromkeys([*asked.columns, "seed"]))
    for stored in source.dataset.shards:
        with stored.open() as shard:
            for group in range(len(shard.row_group_rows)):
                place = f"{shard.place}: row group {group}"
                table = read_row_group(shard, group, columns)
                run, ids = _run_numbers(table, source.manifest, place), table["prompt_id"]
                asked.check(table, place)
                names = pa.chunked_array([runs.take(pa.array(run))])
                yield Told(
                    run + first_run, planless_numbers(ids, names), planless_numbers(ids), table["seed"].to_numpy()
                )


def _run_numbers(table: pa.Table, manifest: Manifest, place: str) -> Int32Array:
    """int32 [N], the number of each row's run in its source. Raises DatasetError for a run that is not there."""
    if not manifest.runs:
        return np.zeros(len(table), np.int32)
    numbers = pc.index_in(table["run"], pa.array(manifest.run_names, pa.string()))
    if numbers.null_count:
        raise DatasetError(f"{place}: holds rows of a run that the manifest does not name; see `rollgen verify`")
    result: Int32Array = numbers.to_numpy().astype(np.int32)
    return result


def _refuse_twins(rows: SourceRows) -> None:
    """Raise DatasetError for two samples that would have one key: of prompts that a dataset told apart by number alone.

    (A plan does not have an id twice.)
    """
    taken, keys = rows.taken, rows.index.rows
    prompt, sample = keys.prompt_index[taken], keys.sample_index[taken]
    twins = np.flatnonzero((prompt[1:] == prompt[:-1]) & (sample[1:] == sample[:-1]))
    if not twins.size:
        return
    row = int(taken[twins[0] + 1])
    stored, place = rows.index.locate(row)
    with stored.open() as shard:
        prompt_id = read_columns(shard, ["prompt_id"])["prompt_id"][place].as_py()
    raise DatasetError(
        f"{stored.path}: row {place}: the prompt {brief(prompt_id)!r} has a sample {keys.sample_index[row]} already, "
        f"under another number; see `rollgen verify {stored.path.parents[1]}`"
    )
