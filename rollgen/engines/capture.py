"""Engine output to CSR supports: the two ways in which a support is read, as pure functions on plain values.

Nested Python lists cost about 350 bytes a token, so both turn what the engine returns into numpy at once, without a
loop over tokens.

native     the engine returns the ids that survived truncation.
logprobs   the engine returns the K most likely ids with *processed* logprobs; excluded ids come back as -inf. The ids
           with a finite one are the support, and it is complete if and only if fewer than K of the K are finite: an
           excluded id was seen. Otherwise a tie at the boundary may go past K and the sample must be asked for again.
           (A sum test alone misses tails below 1e-6.)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rollgen.errors import CaptureError

if TYPE_CHECKING:
    from rollgen.rollouts import Float32Array, Int32Array, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class CapturedSupport:
    """The support of each of T tokens, as in `rollouts.Completion`."""

    mask_ids: Int32Array
    mask_offsets: Int64Array
    logprobs: Float32Array
    """float32 [T] of the sampled tokens."""
    support_logprobs: Float32Array | None


class IncompleteSupport(Exception):
    """A tie at the truncation boundary went past the K logprobs that were asked for: ask again with a larger K."""


def first_num_logprobs(top_k: int) -> int:
    """K to ask for at first: `top_k + max(32, top_k / 4)`.

    The largest supports measured in bfloat16, where ties are common, were 62 ids at top_k 50 and 229 at top_k 200.
    """
    return top_k + max(32, top_k // 4)


def from_masks(masks: Sequence[Sequence[int]], logprobs: Float32Array) -> CapturedSupport:
    """Native capture: `masks` holds one list of ids a token, in any order. Raises CaptureError for an empty one."""
    sizes = np.fromiter(map(len, masks), np.int64, len(masks))
    offsets = _offsets(sizes)
    if len(sizes) and not sizes.all():
        raise CaptureError(f"token {int(sizes.argmin())}: the engine returned an empty sampling mask")
    ids = _packed(list(chain.from_iterable(masks)), np.int32)
    return CapturedSupport(_sorted_within_rows(ids, offsets), offsets, logprobs, None)


def from_processed_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], *, tokens: int, num_logprobs: int, vocab_size: int
) -> CapturedSupport:
    """Logprobs capture: for each token the sampled id, then the `num_logprobs` most likely ids, flattened.

    Raises IncompleteSupport when some token's support may reach past the ids returned, and CaptureError when the
    engine returned another number of entries than asked for.
    """
    width = num_logprobs + 1
    if len(ids) != tokens * width or len(logprobs) != len(ids):
        raise CaptureError(f"the engine returned {len(ids)} logprobs for {tokens} tokens, expected {width} a token")
    table_ids = _packed(ids, np.int32).reshape(tokens, width)
    table = _packed(logprobs, np.float32).reshape(tokens, width)
    kept = np.isfinite(table[:, 1:])
    sizes = np.count_nonzero(kept, axis=1).astype(np.int64)
    if num_logprobs < vocab_size and (sizes == num_logprobs).any():
        raise IncompleteSupport
    support_ids, support_logprobs = table_ids[:, 1:][kept], table[:, 1:][kept]
    order = _order_within_rows(support_ids, sizes)
    return CapturedSupport(support_ids[order], _offsets(sizes), table[:, 0].copy(), support_logprobs[order])


def sampled_logprobs(logprobs: Sequence[float], *, tokens: int, stride: int = 1) -> Float32Array:
    """Logprob of each sampled token out of flat engine logprobs whose first entry per token is the sampled one."""
    if len(logprobs) != tokens * stride:
        raise CaptureError(
            f"the engine returned {len(logprobs)} logprobs for {tokens} tokens, expected {stride} a token"
        )
    return _packed(logprobs, np.float32)[::stride].copy()


def attach_support_logprobs(native: CapturedSupport, processed: CapturedSupport) -> CapturedSupport:
    """Native masks with the logprobs of their ids, of the same output. Raises CaptureError when they disagree."""
    same = np.array_equal(native.mask_offsets, processed.mask_offsets) and np.array_equal(
        native.mask_ids, processed.mask_ids
    )
    if not same:
        raise CaptureError("the engine's sampling mask and its finite processed logprobs name different ids")
    return CapturedSupport(native.mask_ids, native.mask_offsets, native.logprobs, processed.support_logprobs)


def untruncated(tokens: int, logprobs: Float32Array) -> CapturedSupport:
    """Nothing truncates: every support is the full vocabulary, stored as an empty range."""
    return CapturedSupport(np.empty(0, np.int32), np.zeros(tokens + 1, np.int64), logprobs, np.empty(0, np.float32))


def _offsets(sizes: npt.NDArray[np.int64]) -> Int64Array:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _sorted_within_rows(ids: Int32Array, offsets: Int64Array) -> Int32Array:
    """Sort each support; engines return sets in orders of their own (vLLM >= 0.30 ascending, others by weight)."""
    rising = ids[1:] > ids[:-1]
    rising[offsets[1:-1] - 1] = True
    if rising.all():
        return ids
    ordered: Int32Array = ids[_order_within_rows(ids, np.diff(offsets))]
    return ordered


def _order_within_rows(ids: Int32Array, sizes: Int64Array) -> npt.NDArray[np.intp]:
    """Positions that sort the ids of each row: one stable sort of (row, id) packed into int64, 6x a lexsort."""
    rows = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    return np.argsort(rows << 32 | ids, kind="stable")


def _packed(values: Sequence[float], dtype: type[np.int32 | np.float32]) -> npt.NDArray[Any]:
    """A Python list as numpy. struct.pack is twice as fast as np.array, np.fromiter and array.array."""
    return np.frombuffer(struct.pack(f"{len(values)}{np.dtype(dtype).char}", *values), dtype)
