"""Samples that two of the datasets to be merged hold: those of copies, which are refused, and repeated ones, a note.

Two samples are the same when prompt id, number and all tokens are, those of the prompt too, and besides

    digest and start of the run     so that one dataset is a copy of the other, whatever became of the two since
    model and seed                  so that one run has drawn again what the other had drawn already

Ranks of a job may have one digest and one start: they differ in their tokens. Those are read only of shards that hold
samples which have all the rest in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollgen.errors import UsageError
from rollgen.format.ragged import ragged
from rollgen.format.reader import StoredShard, read_columns
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
    keys = (rows.index.rows.sample_index, rows.told.id_number)
    copies = _same_tokens(rows.index, _pairs(rows, [(run.config_digest, run.created_at) for run in said], keys))
    if copies.size:
        one, other = (names[rows.run[row]] for row in copies[:, 0].tolist())
        raise UsageError(f"runs {one!r} and {other!r} are copies of one dataset: its samples would be there twice")
    by_seed = _pairs(rows, [run.model.fingerprint for run in said], (*keys, rows.told.seed))
    return tuple(_notes(names, rows, _same_tokens(rows.index, by_seed)))


def _pairs(rows: SourceRows, alike: Sequence[Hashable], keys: tuple[npt.NDArray[np.integer], ...]) -> Int64Array:
    """int64 [2, pairs]: current rows, the earlier one first, of two runs that are `alike`, with the same `keys`."""
    runs_of = defaultdict(list)
    for number, what in enumerate(alike):
        runs_of[what].append(number)
    pairs = [np.zeros((2, 0), np.int64)]
    for runs in runs_of.values():
        if len(runs) < 2:
            continue
        chosen = np.flatnonzero(rows.current & np.isin(rows.run, runs))
        order = chosen[np.lexsort([key[chosen] for key in keys])]
        for step in range(1, len(runs)):  # as many may have the same sample
            one, other = order[:-step], order[step:]
            same = rows.run[one] != rows.run[other]
            for key in keys:
                same &= key[one] == key[other]
            pairs.append(np.stack([one[same], other[same]]))
    return np.concatenate(pairs, axis=1)


def _same_tokens(index: Index, pairs: Int64Array) -> Int64Array:
    """int64 [2, pairs]: those of them whose tokens are the same."""
    checksums = np.zeros(len(index.rows.generation), np.int64)
    starts = index.shard_starts
    for number in np.unique(index.shard_of(pairs.ravel())).tolist():
        checksums[starts[number] : starts[number + 1]] = _checksums(index.shards[number])
    one, other = checksums[pairs]
    return pairs[:, one == other]


def _checksums(stored: StoredShard) -> Int64Array:
    """int64 [N]: a checksum of each row's tokens, of the prompt and of the response."""
    with stored.open() as shard:
        table = read_columns(shard, ["prompt_token_ids", "token_ids"])
    prompt, response = (token_checksums(ragged(column)) for column in table.columns)
    return (prompt << 32) ^ response


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
