"""`Samples`: decoded rows as numpy CSR arrays, and how rows of many row groups become one of them.

Everything a row holds is one contiguous stretch of each array, so gathering rows copies stretches: no loop and no
index over tokens or ids. Neighbouring rows are copied at once; reading in file order is a plain copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rollgen.format.ragged import Ragged

if TYPE_CHECKING:
    from rollgen.rollouts import Float32Array, Int32Array, Int64Array


SCALARS: Final = (
    "prompt_id",
    "sample_index",
    "generation",
    "prompt_index",
    "finish_reason",
    "stop_reason",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "max_tokens",
    "seed",
    "replayable",
    "text",
    "prompt",
    "metadata",
)
"""Columns of one value a row that every dataset has."""
VERSIONS: Final = "weight_versions"
"""Of the scalars, the one that is a WeightVersions a row."""
RUN: Final = "run"
"""The one that only merged datasets have."""


class Experts(NamedTuple):
    """The experts of the tokens of rows, P + T - 1 of each row: the last one never went through the model."""

    numbers: Ragged
    """int16 values, row-major [P + T - 1, layers, top_k] of each row"""
    layers: int
    top_k: int

    @classmethod
    def none(cls, layers: int, top_k: int) -> Experts:
        """Of no rows."""
        return cls(Ragged(np.zeros(0, np.int16), np.zeros(1, np.int64)), layers, top_k)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """R rows, T generated tokens and K support ids in all."""

    prompt_ids: Ragged
    """int32 values"""
    token_ids: Ragged
    """int32 values, T of them"""
    logprobs: Float32Array
    """float32 [T]"""
    mask_ids: Int32Array
    """int32 [K]"""
    mask_lengths: Int32Array
    """int32 [T], ids of each token's support; 0 for one that is not truncated."""
    mask_offsets: Int64Array
    """int64 [R + 1], where each row's ids start in `mask_ids`."""
    support_logprobs: Float32Array | None
    """float32 [K], parallel to `mask_ids`; None when not stored."""
    scalars: Mapping[str, npt.NDArray[Any]]
    """Columns of one value a row, [R]: numbers, or objects (str, None) for texts."""
    vocab_size: int
    text_bytes: int = 0
    """Of the texts in `scalars`, where that is known."""
    experts: Experts | None = None
    """None when not asked for."""
    rewards: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """float64 [R] by name, those that were asked for; NaN for rows that are not handed out."""

    def __len__(self) -> int:
        return len(self.token_ids.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Memory of the arrays and texts."""
        arrays = (*self.prompt_ids, *self.token_ids, self.logprobs, self.mask_ids, self.mask_lengths, self.mask_offsets)
        stored = () if self.support_logprobs is None else (self.support_logprobs,)
        experts = () if self.experts is None else self.experts.numbers
        held = sum(
            array.nbytes for array in (*arrays, *stored, *experts, *self.scalars.values(), *self.rewards.values())
        )
        return int(held) + self.text_bytes


def gather(sources: Sequence[Samples], source: Int64Array, row: Int64Array) -> Samples:
    """Rows `row[i]` of `sources[source[i]]`, in the order given, copied into samples of their own; one row at least."""
    rows = offsets_of([len(samples) for samples in sources])[source] + row
    # Neighbours are copied at once: from the first to the last row of each stretch.
    edges = np.flatnonzero((np.diff(source) != 0) | (np.diff(row) != 1)) + 1
    stretches = _Stretches(rows, np.append(0, edges), np.append(edges, len(rows)) - 1)
    of = source[stretches.first].tolist()
    prompts, prompt_offsets = stretches.slices([samples.prompt_ids.offsets for samples in sources])
    tokens, token_offsets = stretches.slices([samples.token_ids.offsets for samples in sources])
    ids, mask_offsets = stretches.slices([samples.mask_offsets for samples in sources])
    stored = [samples.support_logprobs for samples in sources if samples.support_logprobs is not None]
    experts = [samples.experts for samples in sources if samples.experts is not None]

    def copied(arrays: Sequence[npt.NDArray[Any]], slices: Sequence[slice]) -> npt.NDArray[Any]:
        return np.concatenate([arrays[number][part] for number, part in zip(of, slices, strict=True)])

    def copied_experts() -> Experts:
        slices, offsets = stretches.slices([each.numbers.offsets for each in experts])
        return experts[0]._replace(numbers=Ragged(copied([each.numbers.values for each in experts], slices), offsets))

    return Samples(
        prompt_ids=Ragged(copied([samples.prompt_ids.values for samples in sources], prompts), prompt_offsets),
        token_ids=Ragged(copied([samples.token_ids.values for samples in sources], tokens), token_offsets),
        logprobs=copied([samples.logprobs for samples in sources], tokens),
        mask_ids=copied([samples.mask_ids for samples in sources], ids),
        mask_lengths=copied([samples.mask_lengths for samples in sources], tokens),
        mask_offsets=mask_offsets,
        support_logprobs=copied(stored, ids) if len(stored) == len(sources) else None,
        scalars={
            name: np.concatenate([samples.scalars[name] for samples in sources])[rows] for name in sources[0].scalars
        },
        vocab_size=sources[0].vocab_size,
        experts=copied_experts() if len(experts) == len(sources) else None,
        rewards={
            name: np.concatenate([samples.rewards[name] for samples in sources])[rows] for name in sources[0].rewards
        },
    )


class _Stretches(NamedTuple):
    """Runs of neighbouring rows."""

    rows: Int64Array
    """int64 [B], places in the rows of all sources, one source after the other."""
    first: Int64Array
    """int64 [runs], places in `rows`."""
    last: Int64Array
    """int64 [runs], places in `rows`."""

    def slices(self, offsets: Sequence[Int64Array]) -> tuple[list[slice], Int64Array]:
        """Where the values of each run are in its source, and the offsets of all rows once these are joined."""
        starts = np.concatenate([part[:-1] for part in offsets])[self.rows]
        stops = np.concatenate([part[1:] for part in offsets])[self.rows]
        runs = zip(starts[self.first].tolist(), stops[self.last].tolist(), strict=True)
        return [slice(start, stop) for start, stop in runs], offsets_of(stops - starts)


def empty_samples(
    vocab_size: int,
    scalars: Sequence[str],
    *,
    support_logprobs: bool = False,
    experts: tuple[int, int] | None = None,
    rewards: Iterable[str] = (),
) -> Samples:
    """No rows."""
    ids, offsets = np.zeros(0, np.int32), np.zeros(1, np.int64)
    return Samples(
        prompt_ids=Ragged(ids, offsets),
        token_ids=Ragged(ids, offsets),
        logprobs=np.zeros(0, np.float32),
        mask_ids=ids,
        mask_lengths=ids,
        mask_offsets=offsets,
        support_logprobs=np.zeros(0, np.float32) if support_logprobs else None,
        scalars={name: np.zeros(0, np.object_) for name in scalars},
        vocab_size=vocab_size,
        experts=None if experts is None else Experts.none(*experts),
        rewards={name: np.zeros(0) for name in rewards},
    )


def offsets_of(lengths: npt.ArrayLike) -> Int64Array:
    """int64 [N + 1]: the running sum of lengths [N], from 0."""
    sizes = np.asarray(lengths)
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
