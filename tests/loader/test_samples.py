"""Samples: rows of many row groups, gathered in any order, hold what they held before."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import pytest

from rollgen.format.ragged import Ragged
from rollgen.loader.samples import Samples, empty_samples, gather, offsets_of


def some_samples(rng: np.random.Generator, rows: int, *, support_logprobs: bool = True) -> Samples:
    """Random rows, some prompts and supports empty: gathering knows nothing of what is allowed."""
    prompt_offsets, token_offsets = (offsets_of(rng.integers(low, 5, rows)) for low in (0, 1))
    mask_lengths = rng.integers(0, 4, token_offsets[-1]).astype(np.int32)
    ids = int(mask_lengths.sum())
    return Samples(
        prompt_ids=Ragged(rng.integers(0, 99, prompt_offsets[-1]).astype(np.int32), prompt_offsets),
        token_ids=Ragged(rng.integers(0, 99, token_offsets[-1]).astype(np.int32), token_offsets),
        logprobs=-rng.random(token_offsets[-1]).astype(np.float32),
        mask_ids=rng.integers(0, 99, ids).astype(np.int32),
        mask_lengths=mask_lengths,
        mask_offsets=offsets_of(mask_lengths)[token_offsets],
        support_logprobs=-rng.random(ids).astype(np.float32) if support_logprobs else None,
        scalars={"seed": rng.integers(0, 99, rows), "text": np.array([None, "x"] * rows, np.object_)[:rows]},
        vocab_size=99,
    )


def row_of(samples: Samples, row: int) -> list[object]:
    """Everything about one row, as Python lists: the slow way to look at it."""
    tokens = slice(*samples.token_ids.offsets[row : row + 2])
    ids = slice(*samples.mask_offsets[row : row + 2])
    return [
        samples.prompt_ids.values[slice(*samples.prompt_ids.offsets[row : row + 2])].tolist(),
        samples.token_ids.values[tokens].tolist(),
        samples.logprobs[tokens].tolist(),
        samples.mask_lengths[tokens].tolist(),
        samples.mask_ids[ids].tolist(),
        None if samples.support_logprobs is None else samples.support_logprobs[ids].tolist(),
        {name: values[row] for name, values in samples.scalars.items()},
    ]


@pytest.mark.parametrize("support_logprobs", [False, True])
def test_gathered_rows_are_the_rows_asked_for(support_logprobs: bool) -> None:
    """Of several sources, forwards, backwards and repeated: each row as it was, in the order given."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    sources = [some_samples(rng, rows, support_logprobs=support_logprobs) for rows in (4, 1, 7)]
    for count in (1, 2, 30):
        source = np.sort(rng.integers(0, 3, count)) if count == 30 else rng.integers(0, 3, count)
        row = rng.integers(0, [len(sources[number]) for number in source])
        gathered = gather(sources, source, row)
        assert [row_of(gathered, place) for place in range(count)] == [
            row_of(sources[one], other) for one, other in zip(source.tolist(), row.tolist(), strict=True)
        ]


def test_neighbours_of_two_sources_are_not_one_stretch() -> None:
    """The last row of one source and the next row number of another do not follow each other in memory."""
    rng = np.random.default_rng(0)
    sources = [some_samples(rng, 2), some_samples(rng, 3)]
    gathered = gather(sources, np.array([0, 0, 1, 1]), np.array([0, 1, 2, 0]))
    assert [row_of(gathered, place) for place in range(4)] == [
        row_of(sources[source], row) for source, row in ((0, 0), (0, 1), (1, 2), (1, 0))
    ]


def test_gathered_arrays_are_copies() -> None:
    """What a source holds may be a read-only view of a file: a batch must not write into it."""
    source = some_samples(np.random.default_rng(1), 3)
    before = row_of(source, 1)
    gathered = gather([source], np.zeros(3, np.int64), np.arange(3))
    for array in (gathered.token_ids.values, gathered.logprobs, gathered.mask_ids, gathered.prompt_ids.values):
        array[:] = 7
    assert row_of(source, 1) == before


def test_support_logprobs_only_when_every_source_has_them() -> None:
    """A dataset that stores them beside one that does not: nothing could stand for the missing ones."""
    rng = np.random.default_rng(2)
    sources = [some_samples(rng, 2), replace(some_samples(rng, 2), support_logprobs=None)]
    assert gather(sources, np.array([0, 1]), np.array([0, 0])).support_logprobs is None


def test_no_rows() -> None:
    """An empty batch has every array, all of length 0."""
    nothing = empty_samples(99, ["seed", "text"])
    assert (len(nothing), nothing.vocab_size, set(nothing.scalars)) == (0, 99, {"seed", "text"})
    assert nothing.mask_offsets.tolist() == nothing.token_ids.offsets.tolist() == [0]


def test_nbytes_counts_every_array() -> None:
    """2 rows of 1 prompt token, 2 tokens and 3 ids: 8 + 16 (tokens) + 16 (logprobs) + 24 (ids) + 16 (lengths) ..."""
    offsets = np.array([0, 2, 4])
    samples = Samples(
        prompt_ids=Ragged(np.zeros(2, np.int32), np.arange(3)),  # 8 + 24
        token_ids=Ragged(np.zeros(4, np.int32), offsets),  # 16 + 24
        logprobs=np.zeros(4, np.float32),  # 16
        mask_ids=np.zeros(6, np.int32),  # 24
        mask_lengths=np.zeros(4, np.int32),  # 16
        mask_offsets=np.array([0, 3, 6]),  # 24
        support_logprobs=np.zeros(6, np.float32),  # 24
        scalars={"seed": np.zeros(2, np.int64)},  # 16
        vocab_size=9,
    )
    assert samples.nbytes == 8 + 24 + 16 + 24 + 16 + 24 + 16 + 24 + 24 + 16
    assert replace(samples, support_logprobs=None).nbytes == samples.nbytes - 24


def test_offsets_do_not_overflow() -> None:
    """Lengths are int32, their sum need not be."""
    offsets = offsets_of(np.full(3, 2**30, np.int32))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 2**30, 2**31, 3 * 2**30]
    assert offsets_of([]).tolist() == [0]
