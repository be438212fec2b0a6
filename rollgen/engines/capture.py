"""Engine output to CSR supports: the two ways in which a support is read, as pure functions on numpy arrays.

native     the engine returns the ids that survived truncation, in any order.
logprobs   the engine returns the K most likely ids of each token with *processed* logprobs: excluded ids come back as
           -inf. The ids with a finite one are the support, and it is complete if and only if an excluded id was seen
           (or the whole vocabulary was returned). Otherwise a tie at the boundary may go past K and the sample must be
           asked for again. (A sum test alone misses tails below 1e-6.)

What an output tells twice must agree: by its masks, by its logprobs, and by the parameters of its request.

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
"""What vLLM's server puts in JSON in place of -inf and NaN. Others put less there, like the least number of float32."""
SUM_TOLERANCE: Final = 1e-3
"""Of the probabilities of a support; those of logprobs that are not normalised over it miss by far more."""
TIE_NATS: Final = 1e-3
"""Ids tie at a boundary when their logprobs differ by less: kernels find the boundary by approximate pivots."""
SAME_NATS: Final = 1e-3
"""What an engine returns twice, the logprob of one id of one token, differs by less."""


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
    def survived(self) -> npt.NDArray[np.bool_]:
        """bool [E], whether truncation left the id of an entry: its logprob is finite, and not one that was clamped."""
        return _survived(self.logprobs)

    @property
    def has_candidates(self) -> bool:
        """Whether it holds more than the sampled tokens."""
        return len(self.ids) >= len(self.offsets)

    def is_sampled_alone(self, token_ids: Int32Array) -> bool:
        """Whether each token has one entry, its sampled id."""
        return np.array_equal(self.ids, token_ids) and bool((np.diff(self.offsets) == 1).all())


def first_num_logprobs(top_k: int) -> int:
    """K to ask for at first: `top_k + max(32, top_k / 4)`.

    The largest supports measured in bfloat16, where ties are common, were 62 ids at top_k 50 and 229 at top_k 200.
    """
    return top_k + max(32, top_k // 4)


def offsets_of(sizes: npt.NDArray[np.int64 | np.bool_]) -> Int64Array:
    """int64 [T + 1] out of T sizes, or flags."""
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
    _check_ids(ids, offsets, "the sampling mask", vocab_size)
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
    survived = table.survived
    _check_ids(table.ids, table.offsets, "the logprobs", vocab_size)
    _check_logprobs(table, survived)
    seen = _count(~survived, table.offsets) > 0
    support = _distinct(table, survived)
    sizes = np.diff(support.offsets)
    if not sizes.all():
        raise CaptureError(f"token {int(sizes.argmin())}: the engine returned no finite logprob")
    if sampling is not None:
        _refuse_impossible(support, seen, vocab_size, sampling)
    incomplete = ~seen & (sizes < vocab_size)
    if incomplete.any():
        raise _incomplete(int(incomplete.argmax()), int(sizes[incomplete].max()), vocab_size, sampling)
    if problem := _mass_problem(support):
        raise UnfitEngine(f"{problem}; start the engine with logprobs_mode=processed_logprobs")
    return CapturedSupport(support.ids, support.offsets, sampled_logprobs(support, token_ids), support.logprobs)


def sampled_logprobs(table: LogprobTable, token_ids: Int32Array) -> Float32Array:
    """float32 [T]: the logprob of each sampled id. Raises CaptureError when a token's entries lack it."""
    logprobs = table.logprobs
    if not table.is_sampled_alone(token_ids):
        positions = np.flatnonzero(table.ids == np.repeat(token_ids, np.diff(table.offsets)))
        tokens = np.searchsorted(table.offsets, positions, side="right") - 1
        first = np.diff(tokens, prepend=-1) > 0  # the sampled id may be there twice
        if np.count_nonzero(first) != len(token_ids):
            missing = int(np.setdiff1d(np.arange(len(token_ids)), tokens)[0])
            raise CaptureError(
                f"token {missing}: the engine returned no logprob of the sampled id {token_ids[missing]}"
            )
        logprobs = logprobs[positions[first]]
    wrong = ~_survived(logprobs)
    if wrong.any():
        token = int(wrong.argmax())
        raise CaptureError(f"token {token}: logprob {logprobs[token]} of the sampled id is none of a sampled token")
    return logprobs


def attach_support_logprobs(native: CapturedSupport, table: LogprobTable) -> CapturedSupport:
    """Native masks with the logprobs of their ids: their own, else those in `table`, of the same output, if all are.

    Raises CaptureError when the table contradicts the masks or their own logprobs, however few ids it has.
    """
    survived = table.survived
    entries = np.flatnonzero(survived)
    logprobs, masks = table.logprobs[entries], _keys(native.mask_ids, native.mask_offsets)
    wanted = _keys(table.ids, table.offsets)[entries]
    positions = np.minimum(np.searchsorted(masks, wanted), len(masks) - 1)
    outside = masks[positions] != wanted
    if outside.any():
        worst = entries[outside.argmax()]
        raise CaptureError(
            f"{_entry(table, worst)} is not in the sampling mask but has logprob {table.logprobs[worst]}: masks and "
            "logprobs name different ids"
        )
    told = np.full(len(masks), np.nan, np.float32)
    told[positions] = logprobs
    own = told if native.support_logprobs is None else native.support_logprobs
    differs = np.abs(own[positions] - logprobs) > SAME_NATS
    if differs.any():
        worst = entries[differs.argmax()]
        raise CaptureError(
            f"{_entry(table, worst)} has two logprobs, {table.logprobs[worst]} and {own[positions[differs.argmax()]]}"
        )
    untold = _count(np.isnan(told), native.mask_offsets) > 0
    cut = untold & (_count(~survived, table.offsets) > 0)
    if cut.any():
        raise CaptureError(
            f"token {int(cut.argmax())}: an id of the sampling mask has no finite logprob though excluded ids were "
            "returned: masks and logprobs name different ids"
        )
    return native if untold.any() else replace(native, support_logprobs=own)


def check_support_logprobs(support: CapturedSupport, *, vocab_size: int, sampling: Sampling | None) -> None:
    """Raise CaptureError when native masks, or their logprobs if known, are not what the request's sampling leaves."""
    if support.support_logprobs is None:
        if sampling is not None:
            _refuse_too_large(support, vocab_size, sampling)
        return
    table = LogprobTable(support.mask_ids, support.support_logprobs, support.mask_offsets)
    wrong = ~table.survived
    if wrong.any():
        worst = wrong.argmax()
        raise CaptureError(f"{_entry(table, worst)} of its support has logprob {table.logprobs[worst]}")
    if problem := _mass_problem(table):
        raise CaptureError(problem)
    if sampling is not None:
        _refuse_impossible(table, np.ones(len(table.offsets) - 1, np.bool_), vocab_size, sampling)


def refuse_truncated(table: LogprobTable, mask_offsets: Int64Array | None, vocab_size: int) -> None:
    """Raise CaptureError when ids were excluded from the sampling of some token, for a request that truncates nothing.

    Shown by a mask of fewer ids than the vocabulary (an empty one says nothing), or by an excluded id among fewer
    candidates than that (with all of them returned, there are those that the model itself excludes).
    """
    truncated = (_count(~table.survived, table.offsets) > 0) & (np.diff(table.offsets) < vocab_size)
    if mask_offsets is not None:
        sizes = np.diff(mask_offsets)
        truncated |= (sizes > 0) & (sizes < vocab_size)
    if truncated.any():
        raise CaptureError(
            f"token {int(truncated.argmax())}: ids were excluded although the request truncates nothing: it was "
            "sampled with other parameters than the request's"
        )


def untruncated(tokens: int, logprobs: Float32Array) -> CapturedSupport:
    """Nothing truncates: every support is the full vocabulary, stored as an empty range."""
    return CapturedSupport(np.empty(0, np.int32), np.zeros(tokens + 1, np.int64), logprobs, np.empty(0, np.float32))


def _check_ids(ids: Int32Array, offsets: Int64Array, what: str, vocab_size: int) -> None:
    if not ids.size or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    worst = int(((ids < 0) | (ids >= vocab_size)).argmax())
    raise CaptureError(
        f"token {_token_at(offsets, worst)}: id {ids[worst]} of {what} is outside the model's vocabulary of "
        f"{vocab_size}"
    )


def _survived(logprobs: Float32Array) -> npt.NDArray[np.bool_]:
    return (logprobs > CLAMPED_LOGPROB) & (logprobs < np.inf)


def _check_logprobs(table: LogprobTable, survived: npt.NDArray[np.bool_]) -> None:
    """Raise CaptureError for a logprob of which nobody can say whether its id was excluded."""
    wrong = ~survived & (table.logprobs != -np.inf)
    if wrong.any():
        token, value = _token_at(table.offsets, wrong.argmax()), table.logprobs[wrong.argmax()]
        raise CaptureError(f"token {token}: the engine returned a logprob of {value}{_hint(value)}")


def _hint(logprob: np.float32) -> str:
    """What an impossible logprob may come from."""
    if np.isnan(logprob):
        return ", or null, which JSON servers put in place of -inf: read supports from masks"
    if logprob < 0:
        return ", which servers put in place of -inf and NaN: read supports from masks"
    return ""


def _mass_problem(support: LogprobTable) -> str | None:
    """What is wrong when the probabilities of some token's support do not sum to 1."""
    with np.errstate(over="ignore"):  # logits are no logprobs, and may be large
        mass = np.add.reduceat(np.exp(support.logprobs, dtype=np.float64), support.offsets[:-1])
    error = np.abs(mass - 1)
    if error.max() <= SUM_TOLERANCE:
        return None
    token = int(error.argmax())
    return (
        f"token {token}: the probabilities of its support sum to {mass[token]:.6g}, not 1: the logprobs are not "
        "normalised over the support"
    )


def _incomplete(token: int, num_logprobs: int, vocab_size: int, sampling: Sampling | None) -> IncompleteSupport:
    more = max(2 * num_logprobs, first_num_logprobs(sampling.top_k) if sampling else 0)
    return IncompleteSupport(
        f"token {token}: no excluded id is among the logprobs, so its support may be larger; "
        f"ask again with the same seed and logprobs={min(more, vocab_size)}"
    )


def _refuse_impossible(support: LogprobTable, seen: npt.NDArray[np.bool_], vocab_size: int, sampling: Sampling) -> None:
    """Raise when ids have a finite logprob that this sampling must have excluded.

    UnfitEngine at tokens of which no excluded id was `seen`: nothing truncated these logprobs. CaptureError at others.
    Sound also with ties, which are equal: top-k keeps no id that is less likely than the k-th, min-p none below its
    share of the most likely one, and top-p keeps the whole vocabulary only if the least likely id has more than
    1 - top_p.
    """
    starts, sizes = support.offsets[:-1], np.diff(support.offsets)
    least = np.minimum.reduceat(support.logprobs, starts) + TIE_NATS
    impossible = np.zeros(len(sizes), np.bool_)
    if sampling.top_k:
        impossible |= _count(support.logprobs > np.repeat(least, sizes), support.offsets) >= sampling.top_k
    if sampling.min_p:
        impossible |= least < np.maximum.reduceat(support.logprobs, starts) + math.log(sampling.min_p)
    if sampling.top_p < 1:
        impossible |= (sizes == vocab_size) & (least < math.log1p(-sampling.top_p))
    if not impossible.any():
        return
    raw = impossible & ~seen
    token = int((raw if raw.any() else impossible).argmax())
    ids = f"token {token}: ids that top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p} must have "
    if raw.any():
        raise UnfitEngine(
            f"{ids}excluded come back with a finite logprob: start the engine with logprobs_mode=processed_logprobs, "
            "and sample with the request's parameters"
        )
    raise CaptureError(
        f"{ids}excluded are in its support: it was sampled with other parameters than the request's, or the logprobs "
        "are from before truncation"
    )


def _refuse_too_large(support: CapturedSupport, vocab_size: int, sampling: Sampling) -> None:
    """Raise CaptureError for masks with more ids than this sampling can leave beside the sampled one.

    Sound whatever the logprobs of the others are. Under min-p each has its share of the sampled id's probability at
    least, and all sum to 1. Under top-p the whole vocabulary is left only if the least likely id has more than
    1 - top_p, and it has no more than the others' average.
    """
    sizes, sampled = np.diff(support.mask_offsets), np.exp(support.logprobs, dtype=np.float64)
    impossible = np.zeros(len(sizes), np.bool_)
    if sampling.min_p:
        impossible |= sampled * (1 + (sizes - 1) * sampling.min_p) > 1 + TIE_NATS
    if sampling.top_p < 1 and vocab_size > 1:
        impossible |= (sizes == vocab_size) & ((1 - sampled) / (vocab_size - 1) + TIE_NATS < 1 - sampling.top_p)
    if impossible.any():
        token = int(impossible.argmax())
        raise CaptureError(
            f"token {token}: its mask has {sizes[token]} ids, more than top_k={sampling.top_k}, "
            f"top_p={sampling.top_p}, min_p={sampling.min_p} can leave: it was sampled with other parameters than the "
            "request's"
        )


def _distinct(table: LogprobTable, chosen: npt.NDArray[np.bool_]) -> LogprobTable:
    """The chosen entries sorted by token and id, each id once."""
    entries = np.flatnonzero(chosen)
    keys = _keys(table.ids, table.offsets)[entries]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    kept = entries[order[first]]
    sizes = np.bincount(keys[first] >> 32, minlength=len(table.offsets) - 1)
    return LogprobTable(table.ids[kept], table.logprobs[kept], offsets_of(sizes))


def _keys(ids: Int32Array, offsets: Int64Array) -> Int64Array:
    """int64 [K], row and id packed in one: one stable sort of it is 6x a lexsort of both."""
    return np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets)) << 32 | ids


def _count(flags: npt.NDArray[np.bool_], offsets: Int64Array) -> Int64Array:
    """int64 [T], how many flags of each row are set. (reduceat is wrong for empty rows.)"""
    return np.diff(offsets_of(flags)[offsets])


def _rising(ids: Int32Array, offsets: Int64Array) -> npt.NDArray[np.bool_]:
    """bool [K]: whether each id is above the one before it in its row; a row's first always is."""
    rising = np.ones(len(ids), np.bool_)
    rising[1:] = ids[1:] > ids[:-1]
    rising[offsets[:-1]] = True
    return rising


def _order_within_rows(ids: Int32Array, offsets: Int64Array) -> npt.NDArray[np.intp] | None:
    """Positions that sort the ids of each row, or None when they are sorted and distinct, as from most engines."""
    if _rising(ids, offsets).all():
        return None
    return np.argsort(_keys(ids, offsets), kind="stable")


def _entry(table: LogprobTable, position: np.intp) -> str:
    """Token and id of an entry, for a message."""
    return f"token {_token_at(table.offsets, position)}: id {table.ids[position]}"


def _token_at(offsets: Int64Array, position: int | np.intp) -> int:
    """The token whose entries hold `position`."""
    return int(np.searchsorted(offsets, position, side="right")) - 1
