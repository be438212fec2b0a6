"""`rollgen merge`: datasets of several models or runs become one, whose rows say in `run` where they come from.

    look      what the datasets are, whether they go together, the keys of all rows, every byte (`sources.py`)
    copy      each new shard, on a stage beside what `out` holds, compared with the rows it is made of (`copying.py`)
    rewards   those that all have, by the same scorer (`merged_rewards.py`); the tokenizer (`tokenizer.py`)
    publish   what `clean` replaces goes; the rest takes its place, the shards with their lines; the manifest comes
              last, and makes a dataset of them

Until it publishes, `out` stays as it is, and whatever goes wrong leaves it so. Until the manifest is there nothing
counts: readers refuse the directory. A kill leaves the stage, which the same command removes before it begins again;
only one that comes while it publishes, a matter of milliseconds, leaves shards without a manifest, or nothing, where
`clean` replaces something. The sources are only read, and nothing of them may lie in `out`.

Current rows are taken, as they are but for three columns: `run` is added, `prompt_index` derives from run and id, and
`generation` is 0. A merged dataset has no plan and owes nothing. Its manifest holds, for each run, all that the run's
own said (section 15 of `schema/SPEC.md`).

Rows of a shard are sorted by a hash, so those of a new one lie anywhere in the old row groups it is made of. It is
therefore closed once it fills the cache, if not at `shard_tokens`, so that each of these is decoded twice for it: to
copy and to compare. Where the samples of a prompt lie near each other, that is about twice in all; where they were made
in passes, each in an order of its own, up to twice for each new shard. Memory is that of copying, beside some 100 bytes
a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa

from rollgen.config import digest
from rollgen.curate.compact import MAX_SHARD_TOKENS, SHARD_TOKENS
from rollgen.curate.copying import Change, copy_rows
from rollgen.curate.layout import deal
from rollgen.curate.merged_rewards import Carried, common_rewards, write_rewards
from rollgen.curate.sources import Rows, Source, common_columns, open_sources, read_sources
from rollgen.curate.tokenizer import Chosen, choose_tokenizer, copy_tokenizer
from rollgen.directory import Holds, check_clean, clean_directory, inspect_directory, remove_frame
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.files import STAGE, remove_leftover
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ModelRecord,
    RoutedExperts,
    Run,
    create_manifest,
    fsync_directory,
    manifest_bytes,
    merged_identity,
)
from rollgen.format.row_groups import CACHE_BYTES
from rollgen.format.schema import DATA_DIR, FOOTER_ENGINE, MANIFEST_FILE, REWARDS_DIR, TOKENIZER_DIR
from rollgen.format.writer import footer_metadata, manifest_schema
from rollgen.inert import brief

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

MERGER: Final = "merge"
"""The writer whose shards a merged dataset has."""
_SHARED: Final = frozenset("format vocab_size tokenizer_vocab_size tokenizer_sha256 page_checksums runs".split())
"""Keys of a source's manifest that a run does not have: they are the merged dataset's too, or say nothing of it."""


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
    lost: int = 0
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
    dropped: tuple[str, ...] = ()
    """Columns that were left out."""
    shards: int = 0
    bytes: int | None = None
    """Of the shards; None when nothing was written."""
    rewards: tuple[str, ...] = ()
    """Names of those that were carried over."""
    rewards_left: tuple[str, ...] = ()
    """Names of those that were not: not all datasets have them, by the same scorer."""
    notes: tuple[str, ...] = ()
    """What is worth knowing besides."""


def merge(
    directories: Sequence[Path],
    out: Path,
    *,
    names: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    shard_tokens: int = SHARD_TOKENS,
    clean: bool = False,
    dry_run: bool = False,
) -> Merged:
    """Make one dataset, in the new directory `out`, of the current rows of several.

    `names` are what their runs are called, by default as their directories are; `drop` are optional columns to be left
    out. `clean` replaces the dataset that `out` holds. A `dry_run` reads keys and writes nothing.

    Raises UsageError for datasets that do not go together, names that are not unique, or an `out` that holds something;
    ResumeRefused while a writer of one of them is alive; and DatasetError for damage or when the disk is full.
    """
    if not 0 < shard_tokens <= MAX_SHARD_TOKENS:
        raise UsageError(f"shard_tokens: {shard_tokens} is not from 1 to {MAX_SHARD_TOKENS}")
    sources = open_sources(directories, names)
    columns = common_columns(sources, drop)
    inspect_directory(out)
    _check_place(out, sources)
    _check_holds(out, clean=clean)
    carried, others = common_rewards(sources)
    rows = read_sources(sources, hashed=not dry_run)
    taken = rows.taken
    if not len(taken):
        raise UsageError(f"{sources[0].place}: holds no sample, nor do the others: there is nothing to merge")
    manifest = _manifest(sources, rows, columns)
    _check_size(out, manifest)
    shards = tuple(deal(rows.index.rows, taken, _tokens_of_a_shard(rows, shard_tokens), planned=False))
    tokenizer = choose_tokenizer(sources)
    lines = None if dry_run else _Writing(out, manifest, sources, rows, carried, tokenizer).write(shards, clean=clean)
    return replace(
        _report(manifest, rows, taken),
        dropped=tuple(dict.fromkeys(drop)),
        shards=len(shards),
        bytes=None if lines is None else sum(line.bytes for line in lines),
        rewards=tuple(each.name for each in carried),
        rewards_left=others,
        notes=(tokenizer.note,) if tokenizer.note else (),
    )


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


def _check_size(out: Path, manifest: Manifest) -> None:
    """Raise UsageError for a manifest that no reader would take: each attempt of each run is in it."""
    if (size := len(manifest_bytes(manifest))) > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"--out {out}: the manifest of {len(manifest.runs)} runs would have {size >> 20} MiB; readers take "
            f"{MAX_MANIFEST_BYTES >> 20} MiB: merge fewer of them"
        )


def _tokens_of_a_shard(rows: Rows, shard_tokens: int) -> int:
    """As many as fit into the cache, so that each of its old row groups is decoded once to copy: see `copying.py`."""
    tokens = int(rows.index.rows.response_length.sum(dtype=np.int64))
    return min(shard_tokens, max(1, CACHE_BYTES * tokens // max(1, int(rows.index.sizes.sum()))))


def _manifest(sources: Sequence[Source], rows: Rows, columns: frozenset[str]) -> Manifest:
    runs = _runs(sources, rows)
    identity = merged_identity(runs)
    first = sources[0].manifest
    return Manifest(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config_digest=digest(identity),
        identity=identity,
        capture=_capture(runs),
        support_logprobs="support_logprobs" in columns,
        vocab_size=first.vocab_size,
        tokenizer_vocab_size=first.tokenizer_vocab_size,
        model=_model([run.model for run in runs]),
        tokenizer_sha256=first.tokenizer_sha256,
        attempts=[],
        weight_versions="weight_versions" in columns,
        routed_experts=_experts(sources) if "routed_experts" in columns else None,
        runs=runs,
    )


def _runs(sources: Sequence[Source], rows: Rows) -> list[Run]:
    samples = np.bincount(rows.run[rows.current], minlength=sum(len(source.runs) for source in sources))
    stored = np.bincount(rows.run, minlength=len(samples))
    runs: list[Run] = []
    for source, owed in zip(sources, rows.owed, strict=True):
        for place, name in enumerate(source.runs):
            number = len(runs)
            if source.manifest.runs:
                runs.append(_again(source, source.manifest.runs[place], name, int(samples[number])))
            else:
                figures = {"name": name, "samples": int(samples[number]), "owed": owed}
                figures |= {"superseded": int(stored[number] - samples[number])}
                runs.append(Run.model_validate(source.manifest.model_dump(exclude=set(_SHARED)) | figures))
    return runs


def _again(source: Source, run: Run, name: str, samples: int) -> Run:
    """A run that was merged before: it keeps its figures, by which what was lost since is still known.

    Raises DatasetError for more samples than were merged.
    """
    if samples > run.samples:
        raise DatasetError(
            f"{source.place}: holds {samples} samples of the run {brief(run.name)!r}, of which {run.samples} were "
            f"merged; see `rollgen verify {source.place}`"
        )
    return run.model_copy(update={"name": name})


def _capture(runs: Sequence[Run]) -> Literal["native", "logprobs", "none"]:
    """Of those that truncate; `logprobs` where some were read from logprobs and some natively."""
    ways = {run.capture for run in runs} - {"none"}
    if not ways:
        return "none"
    return ways.pop() if len(ways) == 1 else "logprobs"


def _model(models: Sequence[ModelRecord]) -> ModelRecord:
    """One record for all; that of the model itself where there is one, but for what its runs set differently."""
    different: dict[str, ModelRecord] = {}
    for model in models:
        different.setdefault(model.fingerprint, model)
    dtypes = {model.dtype for model in models}
    only = models[0] if len(different) == 1 else None
    return ModelRecord(
        name=" + ".join(model.name for model in different.values()),
        revision=only.revision if only else None,
        fingerprint=only.fingerprint if only else digest(list(different)),
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        context_length=max(model.context_length for model in models),
    )


def _experts(sources: Sequence[Source]) -> RoutedExperts | None:
    """Layers and top_k are the same in all; of different numbers of experts the largest bounds them all."""
    stored = [source.manifest.routed_experts for source in sources]
    told = [each.experts for each in stored if each is not None and each.experts is not None]
    return stored[0] and stored[0].model_copy(update={"experts": max(told) if len(told) == len(stored) else None})


class _Writing:
    """The output while it comes to be."""

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        sources: Sequence[Source],
        rows: Rows,
        carried: Sequence[Carried],
        tokenizer: Chosen,
    ) -> None:
        self._out = out
        self._stage = out / STAGE
        self._manifest = manifest
        self._sources = sources
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
                write_rewards(self._stage, self._manifest.config_digest, self._carried, self._sources, self._rows)
                copy_tokenizer(self._tokenizer, self._stage / TOKENIZER_DIR)
                with slot.section():
                    on_error.callback(self._take_away)
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
            os.link(temporary, self._out / DATA_DIR / line.file)
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
        index = self._rows.index
        engines = (index.engines[shard].split(b", ") for shard in np.unique(index.shard_of(rows)).tolist())
        named = b", ".join(dict.fromkeys(engine for several in engines for engine in several))
        schema = self._schema.with_metadata(footer_metadata(self._manifest) | {FOOTER_ENGINE: named})
        temporary = self._stage / DATA_DIR / slot.temporary().name
        try:
            return temporary, copy_rows(slot, temporary, index, rows, schema, self._change())
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


def _report(manifest: Manifest, rows: Rows, taken: Int64Array) -> Merged:
    """The counts of what is taken."""
    lengths = rows.index.rows.response_length[taken]
    samples = np.bincount(rows.run[taken], minlength=len(manifest.runs)).tolist()
    tokens = np.bincount(rows.run[taken], lengths, len(manifest.runs)).astype(np.int64).tolist()
    runs = tuple(
        MergedRun(run.name, run.model.name, count, length, run.superseded, run.owed, run.samples - count)
        for run, count, length in zip(manifest.runs, samples, tokens, strict=True)
    )
    return Merged(
        runs=runs,
        samples=len(taken),
        tokens=sum(tokens),
        superseded=sum(run.superseded for run in runs),
        owed=sum(run.owed or 0 for run in runs),
    )
