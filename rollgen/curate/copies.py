"""Samples that two of the datasets to be merged hold: those of copies, which are refused, and repeated ones, a note.

Two samples are the same when prompt id, number, seed and all tokens are, those of the prompt too, and besides

    digest and start of the run     so that one dataset is a copy of the other, whatever became of the two since
    model                           so that one run has drawn again what the other had drawn already

Ranks of a job may have one digest and one start: they differ in their seeds, or in their tokens. Those are read only of
shards that hold samples which have all the rest in common.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollgen.errors import UsageError
from rollgen.format.ragged import ragged
from rollgen.format.reader import StoredShard, read_row_groups
from rollgen.format.rewards import token_checksums

if TYPE_CHECKING:
    import numpy.typing as npt

    from rollgen.curate.layout import Index
    from rollgen.curate.sources import Source, SourceRows
    from rollgen.rollouts import Int64Array


def find_copies(sources: Sequence[Source], rows: SourceRows) -> tuple[str, ...]:
    """Notes on runs that repeat samples of others. Raises UsageError for copies of one dataset."""
    names = [name for source in sources for name in source.runs]
    said = [run for source in sources for run in source.manifest.runs or (source.manifest,)]
    copies = _repeats(rows, [(run.config_digest, run.created_at) for run in said])
    if copies.size:
        one, other = (names[rows.run[row]] for row in copies[:, 0].tolist())
        raise UsageError(f"runs {one!r} and {other!r} are copies of one dataset: its samples would be there twice")
    return tuple(_notes(names, rows, _repeats(rows, [run.model.fingerprint for run in said])))


def _repeats(rows: SourceRows, alike: Sequence[Hashable]) -> Int64Array:
    """int64 [2, N]: current rows that repeat one of another run which is `alike` (one value a run); that one first.

    Of several that are the same each but the first is there once, so that memory is that of the rows.
    """
    kinds = {what: number for number, what in enumerate(dict.fromkeys(alike))}
    kind_of_run = np.array([kinds[what] for what in alike])
    kind = kind_of_run[rows.run]
    keys = (rows.index.rows.sample_index, rows.told.id_number, rows.told.seed, kind)
    chosen = np.flatnonzero(rows.current & (np.bincount(kind_of_run) > 1)[kind])
    candidates = np.unique(_neighbours(chosen, rows.run, keys))
    return _neighbours(candidates, rows.run, (_checksums(rows.index, candidates), *keys))


def _neighbours(
    chosen: Int64Array, run: npt.NDArray[np.integer], keys: tuple[npt.NDArray[np.integer], ...]
) -> Int64Array:
    """int64 [2, N]: of the chosen rows those with the same `keys`, each with the next one, of another run."""
    order = chosen[np.lexsort([column[chosen] for column in (run, *keys)])]
    one, other = order[:-1], order[1:]
    same = run[one] != run[other]
    for key in keys:
        same &= key[one] == key[other]
    return np.stack([one[same], other[same]])


def _checksums(index: Index, rows: Int64Array) -> Int64Array:
    """int64 [R]: of each row's tokens, where its shard has one of these rows; else 0."""
    checksums = np.zeros(len(index.rows.generation), np.int64)
    starts = index.shard_starts
    for number in np.unique(index.shard_of(rows)).tolist():
        checksums[starts[number] : starts[number + 1]] = _checksums_of(index.shards[number])
    return checksums


def _checksums_of(stored: StoredShard) -> Int64Array:
    """int64 [N]: a checksum of each row's tokens, of the prompt and of the response. One row group in memory."""
    checksums = [np.zeros(0, np.int64)]
    with stored.open() as shard:
        for table in read_row_groups(shard, ["prompt_token_ids", "token_ids"]):
            prompt, response = (token_checksums(ragged(column)) for column in table.columns)
            checksums.append((prompt << 32) ^ response)
    return np.concatenate(checksums)


def _notes(names: Sequence[str], rows: SourceRows, pairs: Int64Array) -> list[str]:
    """One for each run that has samples which one before it has."""
    earlier, later = rows.run[pairs]
    notes = []
    for number in np.unique(later).tolist():
        others = " or ".join(repr(names[other]) for other in np.unique(earlier[later == number]).tolist())
        count = len(np.unique(pairs[1][later == number]))
        notes.append(
            f"samples of {names[number]!r} that {others} has too, token by token: {count:,}; they were drawn with the "
            "same seeds, and training would count them twice: give each run a --seed of its own"
        )
    return notes
