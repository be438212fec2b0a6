"""Engine output to CSR supports: the two ways in which a support is read, as pure functions on numpy arrays.

native     the engine returns the ids that survived truncation, in any order.
logprobs   the engine returns the K most likely ids of each token with *processed* logprobs: excluded ids come back as
           -inf. The ids with a finite one are the support, and it is complete if and only if an excluded id was seen
           (or the whole vocabulary was returned). Otherwise a tie at the boundary may go past K and the sample must be
           asked for again. (A sum test alone misses tails below 1e-6.)

Nothing here loops over tokens. Axis names are those of `rollouts`; E is the number of entries of a logprob table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from rollgen.errors import CaptureError, IncompleteSupport, UnfitEngine

if TYPE_CHECKING:
    from rollgen.rollouts import Float32Array, Int32Array, Int64Array, Sampling

CLAMPED_LOGPROB: Final = -9999.0
"""What vLLM's and other servers put in JSON in place of -inf and NaN."""
SUM_TOLERANCE: Final = 1e-3
"""Of the probabilities of a support; those of logprobs that are not normalised over it miss by far more."""
TIE_NATS: Final = 1e-3
"""Ids tie at a boundary when their logprobs differ by less: kernels find the boundary by approximate pivots."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedSupport:
    """The support of each of T tokens, as in `rollouts.Completion`."""

    mask_ids: Int32Array
    mask_offsets: Int64Array
    logprobs: Float32Array
    """float32 [T] of the sampled tokens."""
    support_logprobs: Float32Array | None


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTable:
    """What an engine returned for each of T tokens: the sampled id, and the most likely ids if asked for.

    In any order; the sampled id may be there twice, as in vLLM, which puts it in front of the most likely ones.
    """

    ids: Int32Array
    """int32 [E]"""
    logprobs: Float32Array
    """float32 [E]"""
    offsets: Int64Array
    """int64 [T + 1]: the entries of token t are `offsets[t] .. offsets[t + 1] - 1`."""

    @property
    def rows(self) -> Int64Array:
        """int64 [E], the token of each entry."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @property
    def has_candidates(self) -> bool:
        """Whether it holds more than the sampled tokens."""
        return len(self.ids) >= len(self.offsets)


def first_num_logprobs(top_k: int) -> int:
    """K to ask for at first: `top_k + max(32, top_k / 4)`.

    The largest supports measured in bfloat16, where ties are common, were 62 ids at top_k 50 and 229 at top_k 200.
    """
    return top_k + max(32, top_k // 4)


def offsets_of(sizes: npt.NDArray[np.int64]) -> Int64Array:
    """int64 [T + 1] out of T sizes."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def from_masks(
    ids: Int32Array,
    offsets: Int64Array,
    logprobs: Float32Array,
    *,
    vocab_size: int,
    support_logprobs: Float32Array | None = None,
) -> CapturedSupport:
    """Native capture: the ids of each token's mask, and with them their logprobs if the engine returned those.

    Raises CaptureError for an empty mask, an id given twice or one outside the vocabulary; the token is named.
    """
    sizes = np.diff(offsets)
    if not sizes.all():
        raise CaptureError(f"token {int(sizes.argmin())}: the engine returned an empty sampling mask")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        worst = int(outside.argmax())
        raise CaptureError(
            f"token {_token_at(offsets, worst)}: id {ids[worst]} of the sampling mask is outside the model's "
            f"vocabulary of {vocab_size}"
        )
    order = _order_within_rows(ids, offsets)
    if order is not None:
        ids = ids[order]
        support_logprobs = None if support_logprobs is None else support_logprobs[order]
        twice = ~_rising(ids, offsets)
        if twice.any():
            worst = int(twice.argmax())
            raise CaptureError(f"token {_token_at(offsets, worst)}: the sampling mask has id {ids[worst]} twice")
    return CapturedSupport(ids, offsets, logprobs, support_logprobs)


def from_processed_logprobs(
    table: LogprobTable, token_ids: Int32Array, *, vocab_size: int, sampling: Sampling | None = None
) -> CapturedSupport:
    """Logprobs capture. `sampling` is the request's; with it, logprobs from before truncation are told from ties.

    Raises IncompleteSupport when some token's support may reach past the ids returned, UnfitEngine for logprobs that
    cannot be processed ones, and CaptureError for values no support can have.
    """
    _check_logprobs(table)
    finite = np.isfinite(table.logprobs)
    rows = table.rows
    seen = np.bincount(rows[~finite], minlength=len(token_ids)) > 0
    support = _distinct(rows[finite], table.ids[finite], table.logprobs[finite], len(token_ids))
    sizes = np.diff(support.offsets)
    if not sizes.all():
        raise CaptureError(f"token {int(sizes.argmin())}: the engine returned no finite logprob")
    if sampling is not None and not seen.all():
        _refuse_unprocessed(support, ~seen, vocab_size, sampling)
    incomplete = ~seen & (sizes < vocab_size)
    if incomplete.any():
        raise _incomplete(int(incomplete.argmax()), int(sizes[incomplete].max()), vocab_size, sampling)
    _check_sums(support)
    return CapturedSupport(support.ids, support.offsets, sampled_logprobs(support, token_ids), support.logprobs)


def sampled_logprobs(table: LogprobTable, token_ids: Int32Array) -> Float32Array:
    """float32 [T]: the logprob of each sampled id. Raises CaptureError when a token's entries lack it."""
    positions = np.flatnonzero(table.ids == np.repeat(token_ids, np.diff(table.offsets)))
    tokens, first = np.unique(table.rows[positions], return_index=True)
    if len(tokens) != len(token_ids):
        missing = int(np.setdiff1d(np.arange(len(token_ids)), tokens)[0])
        raise CaptureError(f"token {missing}: the engine returned no logprob of the sampled id {token_ids[missing]}")
    logprobs = table.logprobs[positions[first]]
    unusable = ~np.isfinite(logprobs) | (logprobs == CLAMPED_LOGPROB)
    if unusable.any():
        token = int(unusable.argmax())
        raise CaptureError(f"token {token}: logprob {logprobs[token]} of the sampled id is not a finite number")
    return logprobs


def attach_support_logprobs(native: CapturedSupport, processed: CapturedSupport) -> CapturedSupport:
    """Native masks with the logprobs of their ids, of the same output. Raises CaptureError when they disagree."""
    same = np.array_equal(native.mask_offsets, processed.mask_offsets) and np.array_equal(
        native.mask_ids, processed.mask_ids
    )
    if not same:
        raise CaptureError("the engine's sampling mask and its finite processed logprobs name different ids")
    return replace(native, support_logprobs=processed.support_logprobs)


def untruncated(tokens: int, logprobs: Float32Array) -> CapturedSupport:
    """Nothing truncates: every support is the full vocabulary, stored as an empty range."""
    return CapturedSupport(np.empty(0, np.int32), np.zeros(tokens + 1, np.int64), logprobs, np.empty(0, np.float32))


def _check_logprobs(table: LogprobTable) -> None:
    wrong = np.isnan(table.logprobs) | (table.logprobs == np.inf) | (table.logprobs == CLAMPED_LOGPROB)
    if wrong.any():
        worst = int(wrong.argmax())
        value = table.logprobs[worst]
        hint = (
            ", which servers put in place of -inf and NaN: read supports from masks" if value == CLAMPED_LOGPROB else ""
        )
        raise CaptureError(f"token {_token_at(table.offsets, worst)}: the engine returned a logprob of {value}{hint}")


def _check_sums(support: LogprobTable) -> None:
    mass = np.add.reduceat(np.exp(support.logprobs, dtype=np.float64), support.offsets[:-1])
    error = np.abs(mass - 1)
    if error.max() > SUM_TOLERANCE:
        token = int(error.argmax())
        raise UnfitEngine(
            f"token {token}: the probabilities of its support sum to {mass[token]:.6g}, not 1: the logprobs are not "
            "normalised over the support; start it with logprobs_mode=processed_logprobs"
        )


def _incomplete(token: int, num_logprobs: int, vocab_size: int, sampling: Sampling | None) -> IncompleteSupport:
    more = max(2 * num_logprobs, first_num_logprobs(sampling.top_k) if sampling else 0)
    return IncompleteSupport(
        f"token {token}: no excluded id is among the logprobs, so its support may be larger; "
        f"ask again with the same seed and logprobs={min(more, vocab_size)}"
    )


def _refuse_unprocessed(
    support: LogprobTable, unseen: npt.NDArray[np.bool_], vocab_size: int, sampling: Sampling
) -> None:
    """Raise UnfitEngine when ids have a finite logprob that this sampling must have excluded.

    Looked at: tokens without an excluded id (`unseen`). Sound also with ties, which are equal: top-k keeps no id
    that is less likely than the k-th, min-p none below its share of the most likely one, and top-p keeps the whole
    vocabulary only if the least likely id has more than 1 - top_p.
    """
    starts, ends = support.offsets[:-1][unseen], support.offsets[1:][unseen]
    falling = support.logprobs[np.lexsort((-support.logprobs, support.rows))]
    best, least = falling[starts], falling[ends - 1]
    bound = np.full(len(starts), -np.inf)
    if sampling.top_k:
        beyond = ends - starts > sampling.top_k
        bound[beyond] = falling[starts[beyond] + sampling.top_k - 1]
    if sampling.min_p:
        bound = np.maximum(bound, best + math.log(sampling.min_p))
    if sampling.top_p < 1:
        bound[ends - starts == vocab_size] = math.log1p(-sampling.top_p)
    excluded = least < bound - TIE_NATS
    if excluded.any():
        token = int(np.flatnonzero(unseen)[excluded.argmax()])
        raise UnfitEngine(
            f"token {token}: ids that top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} must have "
            "excluded come back with a finite logprob: start the engine with logprobs_mode=processed_logprobs"
        )


def _distinct(rows: Int64Array, ids: Int32Array, logprobs: Float32Array, tokens: int) -> LogprobTable:
    """Entries sorted by token and id, each id once."""
    keys = rows << 32 | ids
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    kept = order[first]
    sizes = np.bincount(rows[kept], minlength=tokens)
    return LogprobTable(ids[kept], logprobs[kept], offsets_of(sizes))


def _rising(ids: Int32Array, offsets: Int64Array) -> npt.NDArray[np.bool_]:
    """bool [K]: whether each id is above the one before it in its row; a row's first always is."""
    rising = np.ones(len(ids), np.bool_)
    rising[1:] = ids[1:] > ids[:-1]
    rising[offsets[:-1]] = True
    return rising


def _order_within_rows(ids: Int32Array, offsets: Int64Array) -> npt.NDArray[np.intp] | None:
    """Positions that sort the ids of each row, or None when they are sorted and distinct: most engines return them so.

    One stable sort of (row, id) packed into int64, 6x a lexsort.
    """
    if _rising(ids, offsets).all():
        return None
    rows = np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))
    return np.argsort(rows << 32 | ids, kind="stable")


def _token_at(offsets: Int64Array, position: int) -> int:
    """The token whose entries hold `position`."""
    return int(np.searchsorted(offsets, position, side="right")) - 1
