"""Engine output to supports: both ways of reading one agree with a plain oracle, and an incomplete one never passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.engines.capture import (
    CapturedSupport,
    IncompleteSupport,
    attach_support_logprobs,
    first_num_logprobs,
    from_masks,
    from_processed_logprobs,
    sampled_logprobs,
    untruncated,
)
from rollgen.errors import CaptureError

INF = math.inf
INT32_MAX = 2**31 - 1


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def rows(support: CapturedSupport) -> list[list[int]]:
    """The ids of each token."""
    return [ids.tolist() for ids in np.split(support.mask_ids, support.mask_offsets[1:-1])]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        (1, 33),  # 1 + 32
        (50, 82),  # 50 + 32: above the largest support measured, 62
        (128, 160),  # 128 / 4 = 32: from here a quarter counts
        (200, 250),  # 200 + 50: above the largest support measured, 229
        (131, 163),  # 131 // 4 = 32
        (132, 165),  # 132 // 4 = 33
    ],
)
def test_first_number_of_logprobs(top_k: int, expected: int) -> None:
    """`top_k + max(32, top_k // 4)`."""
    assert first_num_logprobs(top_k) == expected


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        pytest.param([[3, 1, 2]], [[1, 2, 3]], id="one token, unsorted"),
        pytest.param([[1, 2], [0, 5], [7]], [[1, 2], [0, 5], [7]], id="sorted already, falling between tokens"),
        pytest.param([[5, 4], [9], [8, 7, 6]], [[4, 5], [9], [6, 7, 8]], id="some unsorted"),
        pytest.param([[0], [0], [0]], [[0], [0], [0]], id="singletons"),
        pytest.param([[INT32_MAX, 0]], [[0, INT32_MAX]], id="ends of int32"),
        pytest.param([(2, 1), range(3, 5)], [[1, 2], [3, 4]], id="other sequences"),
    ],
)
def test_native_masks_are_sorted(masks: Sequence[Sequence[int]], expected: list[list[int]]) -> None:
    """Engines promise no order; the format does. Tokens stay in theirs."""
    logprobs = f32(*[-0.5] * len(masks))
    support = from_masks(masks, logprobs)
    assert rows(support) == expected
    assert support.mask_ids.dtype == np.int32
    assert support.mask_offsets.dtype == np.int64
    assert support.logprobs is logprobs
    assert support.support_logprobs is None


@given(st.lists(st.lists(st.integers(0, INT32_MAX), min_size=1, max_size=6, unique=True), min_size=1, max_size=8))
def test_native_masks_agree_with_sorted(masks: list[list[int]]) -> None:
    """Any ids in any order: the same sets, each sorted."""
    assert rows(from_masks(masks, f32(*[0.0] * len(masks)))) == [sorted(mask) for mask in masks]


@pytest.mark.parametrize(("masks", "token"), [([[]], 0), ([[1], [], [2], []], 1), ([[1], [2], []], 2)])
def test_an_empty_native_mask_is_refused(masks: list[list[int]], token: int) -> None:
    """It would be stored as null, which means the full vocabulary; the first one is named."""
    with pytest.raises(CaptureError, match=f"^token {token}: the engine returned an empty sampling mask$"):
        from_masks(masks, f32(*[0.0] * len(masks)))


def flat(table: list[list[tuple[int, float]]]) -> tuple[list[int], list[float]]:
    """Engine output as it comes: one flat list of ids and one of logprobs."""
    entries = [entry for row in table for entry in row]
    return [token_id for token_id, _ in entries], [logprob for _, logprob in entries]


def test_finite_logprobs_are_the_support() -> None:
    """K = 3, two tokens: the sampled entry first, then the three most likely; -inf was cut off. Ids come out sorted."""
    ids, logprobs = flat(
        [
            [(7, -1.5), (9, -0.25), (7, -1.5), (2, -INF)],
            [(4, 0.0), (4, 0.0), (0, -INF), (1, -INF)],
        ]
    )
    support = from_processed_logprobs(ids, logprobs, tokens=2, num_logprobs=3, vocab_size=10)
    assert rows(support) == [[7, 9], [4]]
    assert support.logprobs.tolist() == [-1.5, 0.0]
    assert support.support_logprobs is not None
    assert support.support_logprobs.tolist() == [-1.5, -0.25, 0.0]
    assert (support.mask_ids.dtype, support.mask_offsets.dtype) == (np.int32, np.int64)
    assert (support.logprobs.dtype, support.support_logprobs.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("token", [0, 1, 2])
def test_incomplete_when_no_excluded_id_was_seen(token: int) -> None:
    """All K = 2 finite at one token and more ids in the vocabulary: a third tied id may exist."""
    table = [[(0, -0.1), (0, -0.1), (1, -INF)] for _ in range(3)]
    table[token][2] = (1, -30.0)  # far below any sum test
    with pytest.raises(IncompleteSupport):
        from_processed_logprobs(*flat(table), tokens=3, num_logprobs=2, vocab_size=3)


def test_complete_when_k_is_the_vocabulary() -> None:
    """K = V = 2: nothing is left that could have been missed."""
    ids, logprobs = flat([[(0, -0.7), (0, -0.7), (1, -0.69)]])
    assert rows(from_processed_logprobs(ids, logprobs, tokens=1, num_logprobs=2, vocab_size=2)) == [[0, 1]]


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        pytest.param([1, 1, 2], [-1.0, -1.0, -INF], id="one token of two"),
        pytest.param([1] * 7, [-1.0] * 7, id="one entry too many"),
        pytest.param([1] * 6, [-1.0] * 5, id="a logprob short"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_wrong_widths_are_refused(ids: list[int], logprobs: list[float]) -> None:
    """K = 2 and two tokens make (2 + 1) * 2 = 6 entries; anything else would shift all that follows."""
    with pytest.raises(CaptureError, match="logprobs for 2 tokens, expected 3 a token"):
        from_processed_logprobs(ids, logprobs, tokens=2, num_logprobs=2, vocab_size=10)


def truncate(logits: list[int], top_k: int) -> list[float]:
    """Log-probabilities over the support, token by token in plain Python: ties at the boundary are kept, as in vLLM."""
    boundary = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
    total = sum(math.exp(logit) for logit in logits if logit >= boundary)
    return [logit - math.log(total) if logit >= boundary else -INF for logit in logits]


@settings(max_examples=300)
@given(st.data())
def test_agrees_with_a_plain_oracle(data: st.DataObject) -> None:
    """Integer logits over a small vocabulary, so that ties are common. Either the exact support, or IncompleteSupport.

    Incomplete is right exactly when some support has K ids or more while K < V: the K returned are then all finite.
    """
    vocab_size = data.draw(st.integers(1, 8))
    num_logprobs = data.draw(st.integers(1, vocab_size))
    top_k = data.draw(st.integers(1, vocab_size))
    row = st.lists(st.integers(-2, 2), min_size=vocab_size, max_size=vocab_size)
    processed = [truncate(logits, top_k) for logits in data.draw(st.lists(row, min_size=1, max_size=4))]
    supports = [[i for i, logprob in enumerate(logprobs) if logprob > -INF] for logprobs in processed]
    sampled = [data.draw(st.sampled_from(support)) for support in supports]
    table = []
    for logprobs, token in zip(processed, sampled, strict=True):
        ranked = sorted(range(vocab_size), key=lambda i: (-logprobs[i], data.draw(st.integers(0, 9))))
        table.append([(i, logprobs[i]) for i in [token, *ranked[:num_logprobs]]])
    ids, logprobs = flat(table)
    arguments = {"tokens": len(table), "num_logprobs": num_logprobs, "vocab_size": vocab_size}
    if num_logprobs < vocab_size and max(map(len, supports)) >= num_logprobs:
        with pytest.raises(IncompleteSupport):
            from_processed_logprobs(ids, logprobs, **arguments)
        return
    support = from_processed_logprobs(ids, logprobs, **arguments)
    assert rows(support) == supports
    expected = [np.float32(processed[t][i]) for t, ids_of_token in enumerate(supports) for i in ids_of_token]
    assert support.support_logprobs is not None
    assert support.support_logprobs.tolist() == expected
    assert support.logprobs.tolist() == [np.float32(processed[t][i]) for t, i in enumerate(sampled)]


def test_values_do_not_alias_the_table() -> None:
    """The engine's table is K + 1 times as large: nothing kept may hold it in memory."""
    ids, logprobs = flat([[(0, -0.5), (0, -0.5), (1, -INF)]])
    support = from_processed_logprobs(ids, logprobs, tokens=1, num_logprobs=2, vocab_size=5)
    assert support.logprobs.base is None
    assert sampled_logprobs(logprobs, tokens=1, stride=3).base is None


@pytest.mark.parametrize(
    ("stride", "logprobs", "expected"),
    [(1, [-1.0, -2.0], [-1.0, -2.0]), (3, [-1.0, 0.0, 0.0, -2.0, 0.0, 0.0], [-1.0, -2.0])],
)
def test_sampled_logprobs_stride(stride: int, logprobs: list[float], expected: list[float]) -> None:
    """The first entry of each token, whatever follows it."""
    found = sampled_logprobs(logprobs, tokens=2, stride=stride)
    assert found.tolist() == expected
    assert found.dtype == np.float32


@pytest.mark.parametrize("count", [0, 3, 5, 6])
def test_sampled_logprobs_of_another_length_are_refused(count: int) -> None:
    """Two tokens at a stride of 2 make 4 entries."""
    with pytest.raises(CaptureError, match=f"{count} logprobs for 2 tokens, expected 2 a token"):
        sampled_logprobs([-1.0] * count, tokens=2, stride=2)


def captured(masks: list[list[int]], support_logprobs: np.ndarray | None = None) -> CapturedSupport:
    support = from_masks(masks, f32(*[-0.5] * len(masks)))
    return CapturedSupport(support.mask_ids, support.mask_offsets, support.logprobs, support_logprobs)


def test_native_masks_get_the_logprobs_of_their_ids() -> None:
    """Ids and sampled logprobs stay the native ones."""
    native, processed = captured([[1, 2], [3]]), captured([[1, 2], [3]], f32(-0.5, -1, 0))
    both = attach_support_logprobs(native, processed)
    assert both.mask_ids is native.mask_ids
    assert both.logprobs is native.logprobs
    assert both.support_logprobs is processed.support_logprobs


@pytest.mark.parametrize(
    "other", [[[1, 2], [4]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [3, 4]]], ids=["id", "cut", "tokens", "size"]
)
def test_masks_that_disagree_are_refused(other: list[list[int]]) -> None:
    """The same ids cut differently are different supports."""
    with pytest.raises(CaptureError, match="name different ids"):
        attach_support_logprobs(captured([[1, 2], [3]]), captured(other, f32(0)))


def test_untruncated_supports_are_empty_ranges() -> None:
    """Three tokens, no ids; the support logprobs are as empty."""
    support = untruncated(3, f32(-1, -2, -3))
    assert rows(support) == [[], [], []]
    assert support.support_logprobs is not None
    assert len(support.support_logprobs) == 0
    assert support.logprobs.tolist() == [-1, -2, -3]
