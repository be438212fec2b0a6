"""Engine output to supports: both ways of reading one agree with a plain oracle, and an incomplete one never passes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.engines.capture import (
    CapturedSupport,
    LogprobTable,
    attach_support_logprobs,
    check_support_logprobs,
    first_num_logprobs,
    from_masks,
    from_processed_logprobs,
    offsets_of,
    refuse_truncated,
    sampled_logprobs,
    untruncated,
)
from rollgen.errors import CaptureError, IncompleteSupport, UnfitEngine
from rollgen.rollouts import Sampling

INF = math.inf
INT32_MAX = 2**31 - 1
FLOAT32_MIN = float(np.finfo(np.float32).min)


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


def native(masks: list[list[int]], *, vocab_size: int = INT32_MAX, **changes: np.ndarray) -> CapturedSupport:
    """`from_masks` of plain lists, with a logprob of -0.5 for every token."""
    ids, offsets = np.array(list(chain(*masks)), np.int32), offsets_of(np.array([len(mask) for mask in masks]))
    return from_masks(ids, offsets, f32(*[-0.5] * len(masks)), vocab_size=vocab_size, **changes)


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        pytest.param([[3, 1, 2]], [[1, 2, 3]], id="one token, unsorted"),
        pytest.param([[1, 2], [0, 5], [7]], [[1, 2], [0, 5], [7]], id="sorted already, falling between tokens"),
        pytest.param([[5, 4], [9], [8, 7, 6]], [[4, 5], [9], [6, 7, 8]], id="some unsorted"),
        pytest.param([[0], [0], [0]], [[0], [0], [0]], id="singletons"),
        pytest.param([[INT32_MAX - 1, 0]], [[0, INT32_MAX - 1]], id="ends of a vocabulary as large as int32"),
    ],
)
def test_native_masks_are_sorted(masks: list[list[int]], expected: list[list[int]]) -> None:
    """Engines promise no order; the format does. Tokens stay in theirs."""
    support = native(masks)
    assert rows(support) == expected
    assert support.mask_ids.dtype == np.int32
    assert support.mask_offsets.dtype == np.int64
    assert support.logprobs.tolist() == [-0.5] * len(masks)
    assert support.support_logprobs is None


@given(st.lists(st.lists(st.integers(0, INT32_MAX - 1), min_size=1, max_size=6, unique=True), min_size=1, max_size=8))
def test_native_masks_agree_with_sorted(masks: list[list[int]]) -> None:
    """Any ids in any order: the same sets, each sorted, and each id keeps the logprob that came with it."""
    logprobs = f32(*[-(token_id % 97) for mask in masks for token_id in mask])
    support = native(masks, support_logprobs=logprobs)
    assert rows(support) == [sorted(mask) for mask in masks]
    assert support.support_logprobs is not None
    assert support.support_logprobs.tolist() == [-(token_id % 97) for mask in masks for token_id in sorted(mask)]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([[]], "token 0: the engine returned an empty sampling mask"),
        ([[1], [], [2], []], "token 1: the engine returned an empty sampling mask"),
        ([[1], [2], []], "token 2: the engine returned an empty sampling mask"),
        ([[1], [3, 2, 3]], "token 1: the sampling mask has id 3 twice"),
        ([[1], [2], [4, 4]], "token 2: the sampling mask has id 4 twice"),
        ([[1], [2, 10]], "token 1: id 10 of the sampling mask is outside the model's vocabulary of 10"),
        ([[-1]], "token 0: id -1 of the sampling mask is outside the model's vocabulary of 10"),
    ],
)
def test_a_mask_that_is_no_set_of_ids_is_refused(masks: list[list[int]], message: str) -> None:
    """An empty one would be stored as null, which means the full vocabulary; the first such token is named."""
    with pytest.raises(CaptureError, match=f"^{message}$"):
        native(masks, vocab_size=10)


Entries = list[tuple[int, float]]
LOG_QUARTER, LOG_HALF, LOG_REST = (math.log(share) for share in (0.25, 0.5, 0.75))


def table_of(entries: list[Entries]) -> LogprobTable:
    """The entries of each token as an engine returns them."""
    flat = [entry for row in entries for entry in row]
    sizes = np.array([len(row) for row in entries])
    return LogprobTable(
        np.array([token_id for token_id, _ in flat], np.int32), f32(*[value for _, value in flat]), offsets_of(sizes)
    )


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param(
            [
                [(7, LOG_QUARTER), (9, LOG_REST), (7, LOG_QUARTER), (2, -INF)],
                [(4, 0.0), (4, 0.0), (0, -INF), (1, -INF)],
            ],
            id="the sampled id, then the K = 3 most likely",
        ),
        pytest.param(
            [[(9, LOG_REST), (7, LOG_QUARTER), (2, -INF)], [(4, 0.0), (0, -INF)]], id="the most likely alone, ragged"
        ),
        pytest.param([[(2, -INF), (7, LOG_QUARTER), (9, LOG_REST)], [(0, -INF), (4, 0.0)]], id="in no order"),
    ],
)
def test_finite_logprobs_are_the_support(entries: list[Entries]) -> None:
    """-inf was cut off. Ids come out sorted, once each, and the sampled one has its logprob."""
    support = from_processed_logprobs(table_of(entries), ids(7, 4), vocab_size=10)
    assert rows(support) == [[7, 9], [4]]
    assert support.logprobs.tolist() == f32(LOG_QUARTER, 0).tolist()
    assert support.support_logprobs is not None
    assert support.support_logprobs.tolist() == f32(LOG_QUARTER, LOG_REST, 0).tolist()
    assert (support.mask_ids.dtype, support.mask_offsets.dtype) == (np.int32, np.int64)
    assert (support.logprobs.dtype, support.support_logprobs.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("token", [0, 1, 2])
def test_incomplete_when_no_excluded_id_was_seen(token: int) -> None:
    """Both of K = 2 finite at one token and more ids in the vocabulary: a third tied id may exist."""
    entries = [[(0, 0.0), (0, 0.0), (1, -INF)] for _ in range(3)]
    entries[token][2] = (1, -30.0)  # far below any sum test
    with pytest.raises(IncompleteSupport, match=f"^token {token}: .* ask again with the same seed and logprobs=3$"):
        from_processed_logprobs(table_of(entries), ids(0, 0, 0), vocab_size=3)


@pytest.mark.parametrize(("sampling", "advised"), [(None, 4), (Sampling(top_k=8), 40)])
def test_incomplete_says_how_many_to_ask_for(sampling: Sampling | None, advised: int) -> None:
    """Twice what came back, 2, and no less than is asked for at first: 8 + 32."""
    entries = [[(0, LOG_HALF), (1, LOG_HALF)]]
    with pytest.raises(IncompleteSupport, match=f"logprobs={advised}$"):
        from_processed_logprobs(table_of(entries), ids(0), vocab_size=100, sampling=sampling)


def test_complete_when_k_is_the_vocabulary() -> None:
    """K = V = 2: nothing is left that could have been missed."""
    entries = [[(0, LOG_HALF), (0, LOG_HALF), (1, LOG_HALF)]]
    assert rows(from_processed_logprobs(table_of(entries), ids(0), vocab_size=2)) == [[0, 1]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [[(0, 0.0), (1, -INF)], [(0, math.nan), (1, 0.0)]],
            "token 1: the engine returned a logprob of nan, or null, ",
        ),
        ([[(0, 0.0), (-1, -INF)]], "token 0: id -1 of the logprobs is outside the model's vocabulary of 5"),
        ([[(0, 0.0), (5, -INF)]], "token 0: id 5 of the logprobs is outside the model's vocabulary of 5"),
        ([[(0, INF), (1, -INF)]], "token 0: the engine returned a logprob of inf"),
        ([[(0, 0.0), (1, -9999.0)]], "token 0: the engine returned a logprob of -9999.0, which servers put in place"),
        ([[(0, 0.0), (1, FLOAT32_MIN)]], "token 0: the engine returned a logprob of -3.4028.*e.38, which servers put"),
        ([[(0, 0.0), (1, -INF)], [(0, -INF), (1, -INF)]], "token 1: the engine returned no finite logprob"),
        ([[(0, 0.0), (1, -INF)], []], "token 1: the engine returned no finite logprob"),
        ([[(0, 0.0), (1, -INF)], [(1, 0.0), (0, -INF)]], "token 1: the engine returned no logprob of the sampled id 0"),
    ],
)
def test_impossible_logprobs_are_refused(entries: list[Entries], message: str) -> None:
    """Each would shift, shrink or poison a support; the token is named."""
    with pytest.raises(CaptureError, match=f"^{message}"):
        from_processed_logprobs(table_of(entries), ids(*[0] * len(entries)), vocab_size=5)


def test_logprobs_that_are_not_normalised_over_the_support_are_refused() -> None:
    """0.5 + 0.25 = 0.75: what was cut off is still in the denominator, or these are logits."""
    entries = [[(0, LOG_HALF), (1, 2 * LOG_HALF), (2, -INF)]]
    with pytest.raises(UnfitEngine, match=r"^token 0: .* sum to 0.75, not 1: .*logprobs_mode=processed_logprobs$"):
        from_processed_logprobs(table_of(entries), ids(0), vocab_size=5)


def test_logits_are_no_logprobs() -> None:
    """e^1000 is beyond every float, which is no reason for a warning."""
    with pytest.raises(UnfitEngine, match="sum to inf, not 1"):
        from_processed_logprobs(table_of([[(0, 1000.0), (1, -INF)]]), ids(0), vocab_size=5)


RAW = [[(i, math.log(weight / 26)) for i, weight in enumerate((16, 4, 3, 2, 1))]]
"""A full vocabulary of 5 ids, all finite; the probabilities sum to 1."""


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        pytest.param(Sampling(top_k=3), 5, id="the least likely id is below the third"),
        pytest.param(Sampling(top_k=3), 4, id="seen before all of the vocabulary is asked for"),
        pytest.param(Sampling(top_k=50, min_p=0.1), 5, id="1 < 0.1 * 16"),
        pytest.param(Sampling(top_k=50, top_p=0.95), 5, id="1 / 26 < 1 - 0.95"),
    ],
)
def test_logprobs_of_before_truncation_are_told_from_ties(sampling: Sampling, kept: int) -> None:
    """All of them are finite, though top_k, top_p or min_p must have excluded some: asking for more would not help."""
    with pytest.raises(UnfitEngine, match=r"^token 0: ids that .* start the engine with logprobs_mode="):
        from_processed_logprobs(table_of([RAW[0][:kept]]), ids(0), vocab_size=5, sampling=sampling)


@pytest.mark.parametrize(
    ("weights", "sampling"),
    [
        pytest.param((16, 4, 4, 4, 4), Sampling(top_k=2), id="all tie with the second"),
        pytest.param((4, 4, 4, 4, 4), Sampling(top_k=1), id="all tie"),
        pytest.param((16, 4, 3, 2, 1), Sampling(top_k=5), id="top_k cuts nothing"),
        pytest.param((16, 4, 3, 2, 1), Sampling(top_k=50), id="top_k exceeds the vocabulary"),
        pytest.param((16, 4, 3, 2, 2), Sampling(top_k=50, min_p=0.125), id="2 = 0.125 * 16"),
        pytest.param((16, 4, 3, 2, 2), Sampling(top_k=50, top_p=0.95), id="2 / 27 > 1 - 0.95"),
    ],
)
def test_ties_are_never_taken_for_raw_logprobs(weights: tuple[int, ...], sampling: Sampling) -> None:
    """The whole vocabulary survived, exactly: it is the support."""
    entries = [[(i, math.log(weight / sum(weights))) for i, weight in enumerate(weights)]]
    support = from_processed_logprobs(table_of(entries), ids(0), vocab_size=5, sampling=sampling)
    assert rows(support) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(top_k=3), id="the least likely id is below the third"),
        pytest.param(Sampling(top_k=50, min_p=0.1), id="1 < 0.1 * 16"),
    ],
)
def test_a_support_that_this_sampling_cannot_leave_is_refused(sampling: Sampling) -> None:
    """One id is excluded, so this is no tie that goes too far: the logprobs are raw, or of other parameters."""
    entries = [[(0, 0.0), (1, -INF)], [*RAW[0], (5, -INF)]]
    with pytest.raises(CaptureError, match=r"^token 1: ids that .* with other parameters than the request's, or the"):
        from_processed_logprobs(table_of(entries), ids(0, 0), vocab_size=6, sampling=sampling)


@pytest.mark.parametrize(
    ("weights", "top_k"), [((16, 4, 4, 4, 4), 2), ((16, 4, 3, 2, 1), 5), ((4, 4, 4, 3.9998, 3.9998), 1)]
)
def test_ties_beside_an_excluded_id_are_kept(weights: tuple[float, ...], top_k: int) -> None:
    """More ids than top_k, all as likely as the last of those, or within the 0.001 nats of approximate pivots."""
    entries = [[*((i, math.log(weight / sum(weights))) for i, weight in enumerate(weights)), (5, -INF)]]
    support = from_processed_logprobs(table_of(entries), ids(0), vocab_size=9, sampling=Sampling(top_k=top_k))
    assert rows(support) == [[0, 1, 2, 3, 4]]


def truncate(logits: list[int], top_k: int) -> list[float]:
    """Log-probabilities over the support, token by token in plain Python: ties at the boundary are kept, as in vLLM."""
    boundary = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
    total = sum(math.exp(logit) for logit in logits if logit >= boundary)
    return [logit - math.log(total) if logit >= boundary else -INF for logit in logits]


@settings(max_examples=300)
@given(st.data())
def test_agrees_with_a_plain_oracle(data: st.DataObject) -> None:
    """Integer logits over a small vocabulary, so that ties are common. Either the exact support, or IncompleteSupport.

    Incomplete is right exactly when, for some token, less than the vocabulary came back and all of it is finite.
    """
    vocab_size = data.draw(st.integers(1, 8))
    num_logprobs = data.draw(st.integers(1, vocab_size))
    top_k = data.draw(st.integers(1, vocab_size))
    row = st.lists(st.integers(-2, 2), min_size=vocab_size, max_size=vocab_size)
    processed = [truncate(logits, top_k) for logits in data.draw(st.lists(row, min_size=1, max_size=4))]
    supports = [[i for i, logprob in enumerate(logprobs) if logprob > -INF] for logprobs in processed]
    sampled = [data.draw(st.sampled_from(support)) for support in supports]
    entries = []
    for logprobs, token in zip(processed, sampled, strict=True):
        ranked = sorted(range(vocab_size), key=lambda i: (-logprobs[i], data.draw(st.integers(0, 9))))
        entries.append([(i, logprobs[i]) for i in [token, *ranked[:num_logprobs]]])
    arguments = {"vocab_size": vocab_size, "sampling": Sampling(top_k=top_k)}
    returned = [{token_id for token_id, _ in row} for row in entries]
    if any(len(seen) < vocab_size and seen <= set(ids_of) for seen, ids_of in zip(returned, supports, strict=True)):
        with pytest.raises(IncompleteSupport):
            from_processed_logprobs(table_of(entries), ids(*sampled), **arguments)
        return
    support = from_processed_logprobs(table_of(entries), ids(*sampled), **arguments)
    assert rows(support) == supports
    expected = [np.float32(processed[t][i]) for t, ids_of_token in enumerate(supports) for i in ids_of_token]
    assert support.support_logprobs is not None
    assert support.support_logprobs.tolist() == expected
    assert support.logprobs.tolist() == [np.float32(processed[t][i]) for t, i in enumerate(sampled)]


def test_values_do_not_alias_the_table() -> None:
    """The engine's table is K + 1 times as large: nothing kept may hold it in memory."""
    table = table_of([[(0, 0.0), (0, 0.0), (1, -INF)]])
    support = from_processed_logprobs(table, ids(0), vocab_size=5)
    for kept in (support.mask_ids, support.logprobs, support.support_logprobs, sampled_logprobs(table, ids(0))):
        assert kept is not None
        assert not np.shares_memory(kept, table.logprobs)
        assert not np.shares_memory(kept, table.ids)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([[(5, -1.0)], [(6, -2.0)]], id="the sampled ids alone"),
        pytest.param([[(5, -1.0), (9, -0.5), (5, -1.0)], [(6, -2.0), (6, -2.0), (9, -3.0)]], id="in front, and again"),
        pytest.param([[(9, -0.5), (5, -1.0)], [(9, -3.0), (8, -INF), (6, -2.0)]], id="anywhere"),
    ],
)
def test_sampled_logprobs(entries: list[Entries]) -> None:
    """Those of the sampled ids, wherever they are."""
    found = sampled_logprobs(table_of(entries), ids(5, 6))
    assert found.tolist() == [-1.0, -2.0]
    assert found.dtype == np.float32


@pytest.mark.parametrize("value", [math.nan, INF, -INF, -9999.0, FLOAT32_MIN])
def test_a_sampled_logprob_must_be_finite(value: float) -> None:
    """Engines return NaN for broken logits, and servers -9999 for those."""
    with pytest.raises(CaptureError, match=r"^token 1: logprob .* of the sampled id is none of a sampled token$"):
        sampled_logprobs(table_of([[(5, -1.0)], [(6, value)]]), ids(5, 6))


TWO = [[(1, LOG_QUARTER), (2, LOG_REST), (9, -INF)], [(3, 0.0), (9, -INF)]]
"""Processed logprobs of two tokens; the supports are {1, 2} and {3}."""


def test_native_masks_get_the_logprobs_of_their_ids() -> None:
    """Ids and sampled logprobs stay the native ones."""
    masks = native([[1, 2], [3]])
    both = attach_support_logprobs(masks, table_of(TWO))
    assert both.mask_ids is masks.mask_ids
    assert both.logprobs is masks.logprobs
    assert both.support_logprobs is not None
    assert both.support_logprobs.tolist() == f32(LOG_QUARTER, LOG_REST, 0).tolist()
    assert both.support_logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("entries", "known"),
    [
        pytest.param([[(1, LOG_QUARTER), (2, LOG_REST)], TWO[1]], True, id="no excluded id, but all of the mask"),
        pytest.param([[(2, LOG_REST)], TWO[1]], False, id="less than the mask"),
        pytest.param([[], TWO[1]], False, id="nothing of a token"),
        pytest.param([TWO[0], [(3, 0.0), (9, -9999.0)]], True, id="a clamped one is excluded: the masks say so"),
        pytest.param([TWO[0], [(3, 0.0), (9, math.nan)]], True, id="and so is null"),
    ],
)
def test_masks_tell_whether_the_logprobs_are_all_there(entries: list[Entries], known: bool) -> None:
    """Without masks an excluded id must have been seen; with them it is enough that each of their ids has a logprob."""
    assert (attach_support_logprobs(native([[1, 2], [3]]), table_of(entries)).support_logprobs is not None) is known


@pytest.mark.parametrize(
    ("masks", "entries", "message"),
    [
        pytest.param(
            [[1, 2], [4]], TWO, "token 1: id 3 is not in the sampling mask but has logprob 0.0", id="another id"
        ),
        pytest.param([[1], [2, 3]], TWO, "token 0: id 2 is not in the sampling mask", id="cut elsewhere"),
        pytest.param([[1, 2], [3, 4]], TWO, "token 1: an id of the sampling mask has no finite logprob", id="too many"),
        pytest.param([[1, 2, 9], [3]], TWO, "token 0: an id of the sampling mask has no finite", id="an excluded one"),
        pytest.param(
            [[1], [3]], [[(1, LOG_QUARTER), (2, LOG_REST)], []], "token 0: id 2 is not in", id="however few are there"
        ),
        pytest.param(
            [[1, 2], [3]],
            [[(1, LOG_HALF), (1, LOG_QUARTER)], []],
            "token 0: id 1 has two logprobs, -0.693.* and -1.38",
            id="the sampled id in front, and again",
        ),
    ],
)
def test_masks_that_contradict_the_logprobs_are_refused(
    masks: list[list[int]], entries: list[Entries], message: str
) -> None:
    """The first such token is named."""
    with pytest.raises(CaptureError, match=f"^{message}"):
        attach_support_logprobs(native(masks), table_of(entries))


def test_logprobs_that_came_with_the_masks_must_be_those_of_the_table() -> None:
    """The engine returns the sampled token's logprob twice."""
    given = native([[1, 2], [3]], support_logprobs=f32(LOG_QUARTER, LOG_REST, 0))
    assert attach_support_logprobs(given, table_of([[(2, LOG_REST)], [(3, 0.0)]])).support_logprobs is not None
    with pytest.raises(CaptureError, match=r"^token 0: id 2 has two logprobs, -0.69.* and -0.28"):
        attach_support_logprobs(given, table_of([[(2, LOG_HALF)], [(3, 0.0)]]))


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        pytest.param((LOG_QUARTER, math.nan, 0), "token 0: id 2 of its support has logprob nan", id="NaN"),
        pytest.param((LOG_QUARTER, LOG_REST, -INF), "token 1: id 3 of its support has logprob -inf", id="-inf"),
        pytest.param((LOG_QUARTER, LOG_REST, -9999), "token 1: id 3 of its support has logprob -9999", id="clamped"),
        pytest.param((LOG_HALF, LOG_QUARTER, 0), "token 0: .* sum to 0.75, not 1", id="0.5 + 0.25"),
        pytest.param((LOG_REST, LOG_QUARTER, 1), "token 1: .* sum to 2.718", id="e"),
        pytest.param((LOG_REST, LOG_QUARTER, 0), "token 0: ids that top_k=1, .* other parameters", id="2 of top_k 1"),
    ],
)
def test_logprobs_that_masks_bring_are_checked(logprobs: tuple[float, ...], message: str) -> None:
    """Also when nobody stores them: they are evidence."""
    given = native([[1, 2], [3]], support_logprobs=f32(*logprobs))
    with pytest.raises(CaptureError, match=f"^{message}") as caught:
        check_support_logprobs(given, vocab_size=10, sampling=Sampling(top_k=1))
    assert type(caught.value) is CaptureError


def test_logprobs_that_masks_do_not_bring_are_not_checked() -> None:
    """Two ids of equal likelihood pass top_k 1; so does a mask of which nothing else is known."""
    tied = native([[1, 2], [3]], support_logprobs=f32(LOG_HALF, LOG_HALF, 0))
    for support in (tied, native([[1, 2], [3]])):
        check_support_logprobs(support, vocab_size=10, sampling=Sampling(top_k=1))


@pytest.mark.parametrize(
    ("sampling", "logprob", "size", "is_possible"),
    [
        pytest.param(Sampling(top_k=2, min_p=0.5), LOG_HALF, 3, True, id="min_p: 1/2, 1/4 and 1/4"),
        pytest.param(Sampling(top_k=2, min_p=0.5), LOG_HALF, 4, False, id="min_p: 1/2 and three of 1/4"),
        pytest.param(Sampling(min_p=1), LOG_QUARTER, 4, True, id="min_p: four equals"),
        pytest.param(Sampling(min_p=1), LOG_QUARTER, 5, False, id="min_p: five of 1/4"),
        pytest.param(Sampling(top_p=0.9), LOG_QUARTER, 10, False, id="top_p: nine share 3/4, which is 1/12 each"),
        pytest.param(Sampling(top_p=0.9), LOG_QUARTER, 9, True, id="top_p: one was excluded"),
        pytest.param(Sampling(top_p=0.95), LOG_QUARTER, 10, True, id="top_p: 1/12 each, all wanted"),
        pytest.param(Sampling(top_k=1), LOG_QUARTER, 10, True, id="top_k: all may tie"),
    ],
)
def test_masks_larger_than_sampling_leaves(sampling: Sampling, logprob: float, size: int, is_possible: bool) -> None:
    """Of a vocabulary of 10, with nothing known but the sampled id's logprob."""
    support = replace(native([[*range(size)]]), logprobs=f32(logprob))
    if is_possible:
        check_support_logprobs(support, vocab_size=10, sampling=sampling)
        return
    with pytest.raises(CaptureError, match=f"^token 0: its mask has {size} ids, more than top_k=.* can leave"):
        check_support_logprobs(support, vocab_size=10, sampling=sampling)


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        pytest.param([[(0, -1.0), (1, -INF)], [(0, -1.0)]], None, id="an excluded candidate"),
        pytest.param([[(0, -1.0), (1, -9999.0)], [(0, -1.0)]], None, id="a clamped one"),
        pytest.param([[(0, -1.0)], [(0, -1.0)]], [2, 0], id="a mask of some ids"),
    ],
)
def test_signs_of_truncation_are_refused_where_nothing_truncates(entries: list[Entries], sizes: list[int]) -> None:
    """As of a loop that has the same parameters for all requests."""
    offsets = None if sizes is None else offsets_of(np.array(sizes))
    with pytest.raises(CaptureError, match=r"^token 0: ids were excluded .* with other parameters than the request's$"):
        refuse_truncated(table_of(entries), offsets, 3)


@pytest.mark.parametrize(
    ("entries", "sizes"),
    [
        pytest.param([[(0, -1.0), (1, -0.5)], [(2, -1.0)]], None, id="likely candidates"),
        pytest.param([[(0, -1.0), (1, -0.5), (2, -INF)], [(0, -1.0)]], None, id="an id that the model excludes"),
        pytest.param([[(0, -1.0)], [(0, -1.0)]], [0, 3], id="no mask, and one of all ids"),
    ],
)
def test_what_an_untruncated_output_may_hold(entries: list[Entries], sizes: list[int]) -> None:
    """Over a vocabulary of 3, none of it shows a truncation."""
    refuse_truncated(table_of(entries), None if sizes is None else offsets_of(np.array(sizes)), 3)


def test_untruncated_supports_are_empty_ranges() -> None:
    """Three tokens, no ids; the support logprobs are as empty."""
    support = untruncated(3, f32(-1, -2, -3))
    assert rows(support) == [[], [], []]
    assert support.support_logprobs is not None
    assert len(support.support_logprobs) == 0
    assert support.logprobs.tolist() == [-1, -2, -3]
