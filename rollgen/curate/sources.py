"""What is merged: datasets whose ids mean the same, the runs they bring, and which of their rows are taken.

Everything is checked before anything is written, of the rows their keys and of the shards every byte. Sources are read
only. A shard never changes, so what is committed to a source meanwhile changes nothing either: it is not in the merge.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.curate.layout import Index, read_index, sorted_rows
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import live_writers
from rollgen.format.journal import file_sha256
from rollgen.format.keys import Keys
from rollgen.format.manifest import PLANLESS, RUN_NAME, Manifest
from rollgen.format.reader import ShardReader, StoredDataset, StoredShard, open_dataset, read_row_group
from rollgen.format.schema import PLAN_FILE
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import planless_numbers

if TYPE_CHECKING:
    import numpy.typing as npt

    from rollgen.rollouts import Int32Array, Int64Array

    Bools = npt.NDArray[np.bool_]

_OTHER: Final = re.compile(r"[^A-Za-z0-9_.-]+")
"""What the name of a directory may have and that of a run may not."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """All R stored rows of all sources, and which of them are taken."""

    index: Index
    """With the keys that they will have."""
    run: Int32Array
    """int32 [R], number of the run, over the runs of all sources."""
    current: Bools
    """bool [R]: not superseded."""
    owed: tuple[int | None, ...]
    """Of each source, samples that it wants and does not have; None without a plan."""
    decoded_bytes: int
    """Of all row groups."""
    stored: Keys
    """As they are in the sources."""
    ends: list[int]
    """Of the rows of each source, after a 0: [sources + 1]."""

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
    if names is not None and len(names) != len(directories):
        raise UsageError(f"--as: {len(names)} for {len(directories)} datasets; give one for each, in their order")
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
    return (_OTHER.sub("-", dataset.directory.resolve().name) if name is None else name,)


def _check_names(sources: Sequence[Source]) -> None:
    homes: dict[str, Path] = {}
    for source in sources:
        for name in source.runs:
            if not RUN_NAME.fullmatch(name):
                raise UsageError(
                    f"{source.place}: {name!r} is no name for a run; give one of letters, digits, `.`, `_` and `-` "
                    "with --as"
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


def read_sources(sources: Sequence[Source], *, hashed: bool) -> Rows:
    """Read the keys of all rows, verified, and with `hashed` every byte of the shards.

    Raises DatasetError, naming the file, for one that is damaged, and UsageError for samples that are there twice.
    """
    indexes = [read_index(source.dataset.shards, source.manifest.optional_columns) for source in sources]
    orders = [sorted_rows(index) for index in indexes]
    current = [_current(index, order) for index, order in zip(indexes, orders, strict=True)]
    if hashed:
        for stored in chain.from_iterable(source.dataset.shards for source in sources):
            _check_bytes(stored)
    first_runs = np.cumsum([0, *(len(source.runs) for source in sources)]).tolist()
    names = [_Names.joined([*_read_names(source, first)]) for source, first in zip(sources, first_runs, strict=False)]
    index, found = Index.joined(indexes), _Names.joined(names)
    rows = Rows(
        _with_keys(index, found.number),
        found.run,
        np.concatenate(current),
        tuple(_owed(source, index) for source, index in zip(sources, indexes, strict=True)),
        found.decoded_bytes,
        Keys(*index.rows[:3]),
        np.cumsum([0, *(len(each.rows.generation) for each in indexes)]).tolist(),
    )
    _refuse_copies(sources, rows, found.id_number)
    return rows


def _current(index: Index, order: Int64Array) -> Bools:
    """bool [R]: which rows have the highest generation of their sample."""
    prompt, sample = index.rows.prompt_index[order], index.rows.sample_index[order]
    current = np.ones(len(order), np.bool_)
    current[order[:-1][(prompt[1:] == prompt[:-1]) & (sample[1:] == sample[:-1])]] = False  # a later one follows
    return current


def _with_keys(index: Index, prompt_index: Int64Array) -> Index:
    rows = index.rows._replace(prompt_index=prompt_index, generation=np.zeros_like(index.rows.generation))
    return Index(index.shards, index.engines, rows, index.row_groups, index.starts)


def _check_bytes(stored: StoredShard) -> None:
    assert stored.line is not None  # `read_index` refuses such a shard
    if file_sha256(stored.path) != stored.line.sha256:
        raise DatasetError(
            f"{stored.path}: damaged: not the bytes that were committed; `rollgen repair {stored.path.parents[1]}` "
            "sets it aside"
        )


class _Names(NamedTuple):
    """What the names of N rows say."""

    run: Int32Array
    """int32 [N]"""
    number: Int64Array
    """int64 [N], their new prompt_index."""
    id_number: Int64Array
    """int64 [N], the number of the prompt's id alone."""
    decoded_bytes: int

    @classmethod
    def joined(cls, parts: Sequence[_Names]) -> _Names:
        """One after the other."""
        none = cls(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
        run, number, id_number, sizes = zip(none, *parts, strict=True)
        return cls(np.concatenate(run), np.concatenate(number), np.concatenate(id_number), sum(sizes))


def _read_names(source: Source, first_run: int) -> Iterator[_Names]:
    """Of each row group."""
    runs = pa.array(source.runs, pa.string())
    for stored in source.dataset.shards:
        with stored.open() as shard:
            for group in range(len(shard.row_group_rows)):
                run, ids = _read_group(shard, group, source.manifest)
                names = pa.chunked_array([runs.take(pa.array(run))])
                yield _Names(run + first_run, planless_numbers(ids, names), planless_numbers(ids), _size(shard, group))


def _read_group(shard: ShardReader, group: int, manifest: Manifest) -> tuple[Int32Array, pa.ChunkedArray]:
    """The number of the run in its source, int32 [N], and the prompt's id, of each row of a row group."""
    if not manifest.runs:
        ids = read_row_group(shard, group, ["prompt_id"])["prompt_id"]
        return np.zeros(len(ids), np.int32), ids
    table = read_row_group(shard, group, ["run", "prompt_id"])
    return _run_numbers(table["run"], manifest.run_names, f"{shard.place}: row group {group}"), table["prompt_id"]


def _run_numbers(column: pa.ChunkedArray, names: Sequence[str], place: str) -> Int32Array:
    """int32 [N], the places in `names`. Raises DatasetError for a run that is not there."""
    numbers = pc.index_in(column, pa.array(names, pa.string()))
    if numbers.null_count:
        raise DatasetError(f"{place}: holds rows of a run that the manifest does not name; see `rollgen verify`")
    result: Int32Array = numbers.to_numpy().astype(np.int32)
    return result


def _size(shard: ShardReader, group: int) -> int:
    """Bytes of a row group, decompressed."""
    chunks = shard.parquet.groups[group]
    return sum(chunks.chunk(leaf).uncompressed for leaf in range(chunks.columns))


def _owed(source: Source, index: Index) -> int | None:
    """All that its plan and retries ask for, without the prompts that were skipped, less what is stored."""
    if source.manifest.identity.get(PLANLESS):
        return None
    plan = Plan(source.place / PLAN_FILE)
    skipped = int(plan.n[plan.tombstone].sum())
    wanted = plan.samples - skipped + sum(retry.samples for retry in source.manifest.retries)
    return max(0, wanted - len(index.rows.generation))


def _refuse_copies(sources: Sequence[Source], rows: Rows, id_number: Int64Array) -> None:
    """Raise UsageError for runs that hold the same samples: copies of one dataset, whatever became of them since."""
    names = [name for source in sources for name in source.runs]
    said = [run for source in sources for run in source.manifest.runs or (source.manifest,)]
    born = defaultdict(list)
    for number, run in enumerate(said):
        born[run.config_digest, run.created_at].append(number)
    for relatives in born.values():
        if len(relatives) < 2:
            continue
        chosen = np.flatnonzero(rows.current & np.isin(rows.run, relatives))
        keys = (rows.index.rows.sample_index[chosen], id_number[chosen])
        order = np.lexsort(keys)
        same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
        if same.any():
            one, other = (names[rows.run[chosen[order[int(same.argmax()) + step]]]] for step in (0, 1))
            raise UsageError(f"runs {one!r} and {other!r} are copies of one dataset: its samples would be there twice")
