"""`rollgen merge`: datasets of several models or runs become one, whose rows say in `run` where they come from.

    look      what the datasets are, whether they go together, the keys of all rows, every byte (`sources.py`)
    copy      each new shard, on a stage beside what `out` holds, compared with the rows it is made of (`copying.py`)
    rewards   those that all have, by the same scorer (`merged_rewards.py`); the tokenizer (`tokenizer.py`)
    publish   what `clean` replaces goes, the rest takes its place, the manifest comes last: no signal that can be held
              back comes in between (`uninterrupted.py`)

Until it publishes, `out` stays as it is, and whatever goes wrong leaves it so. Without a manifest nothing counts. The
same command removes what a kill leaves. The sources are only read, and nothing of them may lie in `out`.

Current rows are taken, as they are but for three columns: `run` is added, `prompt_index` derives from run and id, and
`generation` is 0. A merged dataset has no plan and owes nothing (section 15 of `schema/SPEC.md`).

Rows of a shard are sorted by a hash, and lie anywhere in the old row groups. It is therefore closed once it fills the
cache, if not at `shard_tokens`, so that each of these is decoded twice for it: to copy and to compare. Memory is that
of copying, beside some 100 bytes a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from rollgen.arguments import check_numbers, list_of
from rollgen.curate.compact import MAX_SHARD_TOKENS, SHARD_TOKENS
from rollgen.curate.copies import find_copies
from rollgen.curate.copying import Change, copy_rows
from rollgen.curate.layout import deal
from rollgen.curate.merged_manifest import check_size, merged_manifest
from rollgen.curate.merged_rewards import Carried, common_rewards, write_rewards
from rollgen.curate.sources import Source, SourceRows, common_columns, open_sources, read_sources
from rollgen.curate.tokenizer import Chosen, choose_tokenizer, copy_tokenizer
from rollgen.curate.uninterrupted import uninterrupted
from rollgen.directory import Holds, check_clean, clean_directory, inspect_directory, remove_frame
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.files import STAGE, link, remove_leftover
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import Manifest, create_manifest, fsync_directory
from rollgen.format.row_groups import CACHE_BYTES
from rollgen.format.schema import DATA_DIR, MANIFEST_FILE, REWARDS_DIR, TOKENIZER_DIR
from rollgen.format.writer import manifest_schema
from rollgen.remote.objects import is_url, local_path

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

MERGER: Final = "merge"
"""The writer whose shards a merged dataset has."""


@dataclass(frozen=True, slots=True)
class MergedRun:
    """One run of the merged dataset."""

    name: str
    model: str
    samples: int
    tokens: int
    """Generated ones."""
    superseded: int
    """Rows that were left out, because a retry had made their samples again."""
    owed: int | None
    """Samples that it wanted and did not have; None without a plan."""
    lost: int
    """Samples that were merged with it before, and were lost since."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was done, or would be."""

    runs: tuple[MergedRun, ...]
    samples: int
    tokens: int
    """Generated ones."""
    superseded: int
    owed: int
    """Over the runs that have a plan."""
    dropped: tuple[str, ...]
    """Columns that were left out."""
    shards: int
    bytes: int | None
    """Of the shards; None when nothing was written."""
    rewards: tuple[str, ...]
    """Names of those that were carried over."""
    rewards_left: tuple[str, ...]
    """Names of those that were not: not all datasets have them by the same scorer, or they have too many columns."""
    notes: tuple[str, ...]
    """What is worth knowing besides."""


def merge(
    datasets: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    clean: bool = False,
    dry_run: bool = False,
) -> Merged:
    """Make one dataset, in the new directory `out`, of the current rows of several.

    `names` are what their runs are called, by default as their directories are; `drop` are optional columns to be left
    out. `clean` replaces the dataset that `out` holds. A `dry_run` reads keys, and tokens of samples that runs may have
    in common; it writes nothing.

    Raises UsageError for datasets that do not go together, names that are not unique, or an `out` that holds something;
    ResumeRefused while a writer of one of them is alive; and DatasetError for damage or when the disk is full.
    """
    check_numbers(1, shard_tokens=shard_tokens)
    if shard_tokens > MAX_SHARD_TOKENS:
        raise UsageError(f"shard_tokens: {shard_tokens} is not from 1 to {MAX_SHARD_TOKENS}")
    given = list_of((str, os.PathLike), datasets, "datasets: give a list of paths, two or more")
    drop = list_of(str, drop, "drop: give a list of names of columns")
    directories, target = [_directory(dataset) for dataset in given], _directory(out)
    sources = open_sources(directories, names)
    columns = common_columns(sources, drop)
    inspect_directory(target)
    _check_place(target, sources)
    _check_holds(target, clean=clean)
    carried, others = common_rewards(sources)
    rows = read_sources(sources, hashed=not dry_run)
    taken = rows.taken
    if not len(taken):
        raise UsageError(f"{sources[0].place}: holds no sample, nor do the others: there is nothing to merge")
    repeated = find_copies(sources, rows)
    manifest = merged_manifest(sources, rows, columns)
    check_size(target, manifest)
    shards = tuple(deal(rows.index.rows, taken, _tokens_of_a_shard(rows, shard_tokens), planned=False))
    tokenizer = choose_tokenizer(sources)
    writing = _Writing(target, manifest, rows, carried, tokenizer)
    lines = None if dry_run else writing.write(shards, clean=clean)
    runs = _merged_runs(manifest, rows, taken)
    return Merged(
        runs=runs,
        samples=len(taken),
        tokens=sum(run.tokens for run in runs),
        superseded=sum(run.superseded for run in runs),
        owed=sum(run.owed or 0 for run in runs),
        dropped=tuple(dict.fromkeys(drop)),
        shards=len(shards),
        bytes=None if lines is None else sum(line.bytes for line in lines),
        rewards=tuple(each.name for each in carried),
        rewards_left=others,
        notes=(*repeated, *([tokenizer.note] if tokenizer.note else [])),
    )


def _directory(place: str | os.PathLike[str]) -> Path:
    """Raises UsageError for what is in object storage."""
    if is_url(place):
        raise UsageError(
            f"{place}: merge reads and writes directories: copy the dataset here, or the merged one to the storage"
        )
    return local_path(place)


def _check_place(out: Path, sources: Sequence[Source]) -> None:
    """Raise UsageError where a source would be written into, or removed: itself or what its links lead to."""
    place = out.resolve()
    for source in sources:
        if place.is_relative_to(source.place.resolve()):
            raise UsageError(f"--out {out}: is, or is inside, a dataset to be merged; choose another directory")
        for path in (source.place, *(stored.path for stored in source.dataset.shards), *source.place.rglob("*")):
            if Path(os.path.realpath(path)).is_relative_to(place):  # `resolve` raises for a link to itself
                raise UsageError(
                    f"--out {out}: {path}, of a dataset to be merged, lies there; choose another directory"
                )


def _check_holds(out: Path, *, clean: bool) -> None:
    holds = inspect_directory(out)
    if holds is Holds.FOREIGN:
        raise UsageError(f"--out {out}: holds files that are not rollgen's; choose another directory")
    if holds is not Holds.NOTHING and not clean:
        raise UsageError(f"--out {out}: holds {holds.value} already; replace it with --clean, or choose another --out")
    check_clean(out)


def _tokens_of_a_shard(rows: SourceRows, shard_tokens: int) -> int:
    """As many as fit into the cache, so that each of its old row groups is decoded once to copy: see `copying.py`."""
    tokens = int(rows.index.rows.response_length.sum(dtype=np.int64))
    return min(shard_tokens, max(1, CACHE_BYTES * tokens // max(1, int(rows.index.sizes.sum()))))


class _Writing:
    """The output while it comes to be."""

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        rows: SourceRows,
        carried: Sequence[Carried],
        tokenizer: Chosen,
    ) -> None:
        self._out = out
        self._stage = out / STAGE
        self._manifest = manifest
        self._rows = rows
        self._carried = carried
        self._tokenizer = tokenizer
        self._schema = manifest_schema(manifest)
        self._left = "nothing was merged, and --out is as it was"
        """When something goes wrong."""

    def write(self, shards: Sequence[Int64Array], *, clean: bool) -> tuple[JournalLine, ...]:
        """All of it, or nothing. Raises DatasetError when it cannot be written."""
        is_new = not self._out.exists()
        with WriterSlot(self._out, MERGER, afresh=clean) as slot, ExitStack() as on_error:
            if is_new:
                on_error.callback(remove_frame, slot)
            on_error.callback(self._remove_stage)
            with slot.section():
                _check_holds(self._out, clean=clean)  # again: another run may have begun there meanwhile
                self._remove_stage()
            try:
                (self._stage / DATA_DIR).mkdir(parents=True)
                copied = [self._copy(slot, rows) for rows in shards]
                write_rewards(self._stage, self._manifest.config_digest, self._carried, self._rows)
                copy_tokenizer(self._tokenizer, self._stage / TOKENIZER_DIR)
                with slot.section():
                    on_error.callback(self._take_away)
                    with uninterrupted():
                        self._publish(slot, copied)
            except OSError as error:
                raise self._failed(Path(error.filename or self._out), error) from error
            on_error.pop_all()
        return tuple(line for _, line in copied)

    def _remove_stage(self) -> None:
        if self._stage.exists():
            remove_leftover(self._stage)

    def _take_away(self) -> None:
        """What was published, unless that is the dataset by now, or still what was there before."""
        if not (self._out / MANIFEST_FILE).exists():
            clean_directory(self._out)

    def _publish(self, slot: WriterSlot, copied: Sequence[tuple[Path, JournalLine]]) -> None:
        self._left = "nothing was merged; what --out held before has been removed, at least in part"
        clean_directory(self._out)
        for temporary, line in copied:
            link(temporary, self._out / DATA_DIR / line.file)
            slot.append(line)
        self._move(REWARDS_DIR, "*.parquet")
        self._move(TOKENIZER_DIR, "*")
        if not create_manifest(self._out, self._manifest):
            raise DatasetError(f"{self._out / MANIFEST_FILE}: another one appeared meanwhile; {self._left}")
        self._left = "but the merged dataset is whole"
        for leftover in self._out.glob(".tmp-*"):  # the stage, and what others did not finish
            remove_leftover(leftover)

    def _move(self, name: str, pattern: str) -> None:
        """Files of a directory on the stage into that of the dataset."""
        files = sorted((self._stage / name).glob(pattern))
        if files:
            place = self._out / name
            place.mkdir(exist_ok=True)
            for path in files:
                path.rename(place / path.name)
            fsync_directory(place)

    def _copy(self, slot: WriterSlot, rows: Int64Array) -> tuple[Path, JournalLine]:
        """A shard under its temporary name, and the line that it is to have."""
        temporary = self._stage / DATA_DIR / slot.temporary().name
        try:
            return temporary, copy_rows(slot, temporary, self._rows.index, rows, self._manifest, self._change())
        except OSError as error:  # from Arrow it does not name the file
            raise self._failed(temporary, error) from error

    def _change(self) -> Change:
        """What becomes of the columns of a row group."""
        rows, schema = self._rows, self._schema
        names = pa.array(self._manifest.run_names, pa.string())

        def change(row_group: int, table: pa.Table) -> pa.Table:
            first, end = rows.index.starts[row_group : row_group + 2].tolist()
            keys = rows.index.rows
            changed: dict[str, Any] = {
                "run": names.take(pa.array(rows.run[first:end])),
                "prompt_index": pa.array(keys.prompt_index[first:end]),
                "generation": pa.array(keys.generation[first:end]),
            }
            columns = [changed[name] if name in changed else table[name] for name in schema.names]
            return pa.Table.from_arrays(columns, schema=schema)

        return change

    def _failed(self, path: Path, error: OSError) -> DatasetError:
        return DatasetError(f"{path}: cannot be read or written: {error.strerror or error}; {self._left}")


def _merged_runs(manifest: Manifest, rows: SourceRows, taken: Int64Array) -> tuple[MergedRun, ...]:
    """The counts of what is taken."""
    lengths = rows.index.rows.response_length[taken]
    samples = np.bincount(rows.run[taken], minlength=len(manifest.runs)).tolist()
    tokens = np.bincount(rows.run[taken], lengths, len(manifest.runs)).astype(np.int64).tolist()
    return tuple(
        MergedRun(run.name, run.model.name, count, length, run.superseded, run.owed, run.samples - count)
        for run, count, length in zip(manifest.runs, samples, tokens, strict=True)
    )
