"""`find_problem` passes every valid completion, and finds and names each single thing that can be wrong with one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.format.invariants import SUM_TOLERANCE, find_problem
from rollgen.rollouts import FINISH_REASONS, Completion, Sampling, WeightVersions

MakeCompletion = Callable[..., Completion]
VOCAB_SIZE = 100
INT32_MAX = 2**31 - 1


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


HALF = math.log(0.5)
VALID = Completion(
    prompt_id="p",
    sample_index=0,
    prompt_index=0,
    prompt_token_ids=i32(1),
    token_ids=i32(7, 30, 99),
    logprobs=f32(HALF, 0.0, HALF),
    mask_ids=i32(7, 8, 30, 98, 99),
    mask_offsets=i64(0, 2, 3, 5),
    finish_reason="stop",
    sampling=Sampling(),
    seed=0,
    support_logprobs=f32(HALF, HALF, 0.0, HALF, HALF),
)
"""Three tokens with supports {7, 8}, {30} and {98, 99}; the vocabulary ends at 99."""
FULL = replace(
    VALID,
    sampling=Sampling(top_k=0),
    logprobs=f32(-1.0, -2.0, 0.0),
    mask_ids=i32(),
    mask_offsets=i64(0, 0, 0, 0),
    support_logprobs=None,
)


WITH_EXTRAS = replace(
    VALID,
    weight_versions=WeightVersions(("a", "b"), (0, 2)),
    routed_experts=np.array([[[0, 0], [1, 0]]] * 3, np.int16),  # a layer without experts, and one with
)


@pytest.mark.parametrize("reason", FINISH_REASONS)
@pytest.mark.parametrize(
    "completion",
    [VALID, replace(VALID, support_logprobs=None), FULL, WITH_EXTRAS],
    ids=["all", "no", "full", "extras"],
)
def test_a_valid_completion_passes(completion: Completion, reason: str) -> None:
    """With support logprobs, without, and without supports at all; whatever the finish reason."""
    assert find_problem(replace(completion, finish_reason=reason), VOCAB_SIZE) is None


@pytest.mark.parametrize("seed", range(20))
def test_random_completions_pass(make_completion: MakeCompletion, seed: int) -> None:
    """Supports of many sizes, 1 to 400 tokens."""
    tokens, largest = 1 + 21 * seed, 1 + 3 * seed
    for full in (False, True):
        completion = make_completion(seed, 0, tokens=tokens, largest=largest, full=full, support_logprobs=True)
        longest = replace(completion, sampling=replace(completion.sampling, max_tokens=tokens))
        assert find_problem(longest, 512) is None


CORRUPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    # 1: lengths and finish reason
    "no token": (
        {"token_ids": i32(), "logprobs": f32(), "mask_ids": i32(), "mask_offsets": i64(0)},
        "no token was generated",
    ),
    "longer than asked for": ({"sampling": Sampling(max_tokens=2)}, "3 tokens, more than max_tokens 2"),
    "a logprob short": ({"logprobs": f32(HALF, 0)}, "2 logprobs for 3 tokens"),
    "a logprob too many": ({"logprobs": f32(HALF, 0, HALF, 0)}, "4 logprobs for 3 tokens"),
    "a support short": ({"mask_offsets": i64(0, 2, 5)}, "2 supports for 3 tokens"),
    "a support too many": ({"mask_offsets": i64(0, 2, 3, 5, 5)}, "4 supports for 3 tokens"),
    "offsets start late": ({"mask_offsets": i64(1, 2, 3, 5)}, "do not span"),
    "offsets end early": ({"mask_offsets": i64(0, 2, 3, 4)}, "do not span"),
    "offsets end late": ({"mask_offsets": i64(0, 2, 3, 6)}, "do not span"),
    "aborted": ({"finish_reason": "abort"}, "finish reason 'abort'"),
    "failed": ({"finish_reason": "error"}, "finish reason 'error'"),
    "no finish reason": ({"finish_reason": ""}, "finish reason ''"),
    "before the plan": ({"generation": -1}, "generation -1 is negative"),
    # 2: supports exactly where sampling truncates
    "first support empty": ({"mask_ids": i32(30, 98, 99), "mask_offsets": i64(0, 0, 1, 3)}, "token 0: empty support"),
    "middle support empty": (
        {"mask_ids": i32(7, 8, 98, 99), "mask_offsets": i64(0, 2, 2, 4)},
        "token 1: empty support",
    ),
    "last support empty": ({"mask_ids": i32(7, 8, 30), "mask_offsets": i64(0, 2, 3, 3)}, "token 2: empty support"),
    "offsets fall": ({"mask_offsets": i64(0, 3, 2, 5)}, "token 1: empty support"),
    "supports though nothing truncates": (
        {"sampling": Sampling(top_k=0)},
        "a support is listed although nothing truncates",
    ),
    # 3: order and range
    "first id negative": ({"mask_ids": i32(-1, 7, 30, 98, 99)}, "support id is outside the model's vocabulary of 100"),
    "last id outside": ({"mask_ids": i32(7, 8, 30, 99, 100)}, "support id is outside the model's vocabulary of 100"),
    "a huge id": ({"mask_ids": i32(7, INT32_MAX, 30, 98, 99)}, "support id is outside the model's vocabulary of 100"),
    "a repeated id": ({"mask_ids": i32(7, 7, 30, 98, 99)}, "token 0: support ids are not strictly increasing"),
    "falling ids": ({"mask_ids": i32(7, 8, 30, 99, 98)}, "token 2: support ids are not strictly increasing"),
    # 4: the sampled id
    "first token not inside": ({"token_ids": i32(9, 30, 99)}, "token 0: the sampled id 9 is not in its support"),
    "middle token not inside": ({"token_ids": i32(7, 31, 99)}, "token 1: the sampled id 31 is not in its support"),
    "last token not inside": ({"token_ids": i32(7, 30, 97)}, "token 2: the sampled id 97 is not in its support"),
    "tokens shifted by one": ({"token_ids": i32(30, 99, 7)}, "token 0: the sampled id 30 is not in its support"),
    "token negative": ({"token_ids": i32(-1, 30, 99)}, "sampled id is outside the model's vocabulary of 100"),
    "token outside": ({"token_ids": i32(7, 30, 100)}, "sampled id is outside the model's vocabulary of 100"),
    # 5: logprobs
    "first logprob NaN": ({"logprobs": f32(math.nan, 0, HALF)}, "token 0: logprob nan is not a finite number <= 0"),
    "last logprob -inf": ({"logprobs": f32(HALF, 0, -math.inf)}, "token 2: logprob -inf is not a finite number <= 0"),
    "logprob +inf": ({"logprobs": f32(HALF, math.inf, HALF)}, "token 1: logprob inf is not a finite number <= 0"),
    "logprob positive": ({"logprobs": f32(HALF, 0, 1e-7)}, "token 2: logprob 1.0000000116860974e-07 is not a finite"),
    "singleton not certain": ({"logprobs": f32(HALF, -1e-7, HALF)}, "token 1: logprob -1.0000000116860974e-07 of a si"),
    # 6: support logprobs
    "a support logprob short": ({"support_logprobs": f32(HALF, HALF, 0, HALF)}, "4 support logprobs for 5 support ids"),
    "support logprob NaN": (
        {"support_logprobs": f32(HALF, math.nan, 0, HALF, HALF)},
        "token 0: a support logprob is not a finite number <= 0",
    ),
    "support logprob -inf": (
        {"support_logprobs": f32(HALF, HALF, 0, -math.inf, HALF)},
        "token 2: a support logprob is not a finite number <= 0",
    ),
    "support logprob positive": (
        {"support_logprobs": f32(HALF, HALF, 1e-7, HALF, HALF)},
        "token 1: a support logprob is not a finite number <= 0",
    ),
    "mass missing": (  # 0.5 + 0.4 = 0.9
        {"support_logprobs": f32(HALF, math.log(0.4), 0, HALF, HALF)},
        "token 0: support probabilities do not sum to 1",
    ),
    "mass above 1": (  # 0.6 + 0.5 = 1.1
        {"support_logprobs": f32(HALF, HALF, 0, math.log(0.6), HALF)},
        "token 2: support probabilities do not sum to 1",
    ),
    "another logprob than the sampled one": (
        {"support_logprobs": f32(math.log(0.25), math.log(0.75), 0, HALF, HALF)},
        "support_logprobs disagree",
    ),
    "a version too few": ({"weight_versions": WeightVersions(("a",), (0, 1))}, "1 weight versions and 2 starts"),
    "no version": ({"weight_versions": WeightVersions((), ())}, "do not start at 0"),
    "a late version": ({"weight_versions": WeightVersions(("a",), (1,))}, "do not start at 0"),
    "versions of no tokens": ({"weight_versions": WeightVersions(("a", "b"), (0, 0))}, "do not start at 0 and rise"),
    "a version of no token": ({"weight_versions": WeightVersions(("a", "b"), (0, 3))}, "rise below 3 tokens"),
    "an empty version": ({"weight_versions": WeightVersions(("a", ""), (0, 2))}, "a weight version is empty"),
    "experts of the last token": ({"routed_experts": np.ones((4, 2, 2), np.int16)}, "[4, 2, 2], not those of 3 tokens"),
    "experts without layers": ({"routed_experts": np.ones((3, 4), np.int16)}, "[3, 4], not those of 3 tokens"),
    "a negative expert": ({"routed_experts": np.full((3, 2, 2), -1, np.int16)}, "number of an expert is negative"),
    "experts left out": (
        {"routed_experts": np.array([[[0, 1]], [[0, 0]], [[1, 0]]], np.int16)},
        "position 1: expert 0 alone in all layers",
    ),
}


@pytest.mark.parametrize(("change", "expected"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_each_corruption_is_found_and_named(change: dict[str, Any], expected: str) -> None:
    """One change to a valid completion; the message says what is wrong and at which token."""
    problem = find_problem(replace(VALID, **change), VOCAB_SIZE)
    assert problem is not None
    assert expected in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": i32(7, 30, 100)}, "sampled id is outside"),
        ({"token_ids": i32(7, -1, 99)}, "sampled id is outside"),
        ({"logprobs": f32(0, math.nan, 0)}, "token 1: logprob nan"),
        ({"logprobs": f32(0, 0, -math.inf)}, "token 2: logprob -inf"),
        ({"mask_offsets": i64(0, 0, 0)}, "2 supports for 3 tokens"),
    ],
)
def test_corruptions_of_an_untruncated_completion(change: dict[str, Any], expected: str) -> None:
    """Without supports, ids are still bounded by the vocabulary and logprobs by 0."""
    problem = find_problem(replace(FULL, **change), VOCAB_SIZE)
    assert problem is not None
    assert expected in problem


def test_minus_zero_is_the_logprob_of_a_singleton() -> None:
    """-0.0 equals 0 and is not positive: engines return either."""
    minus_zero = replace(VALID, logprobs=f32(HALF, -0.0, HALF), support_logprobs=f32(HALF, HALF, -0.0, HALF, HALF))
    assert find_problem(minus_zero, VOCAB_SIZE) is None


def test_sum_tolerance_is_where_it_is_said_to_be() -> None:
    """A mass of 1 - 0.9e-4 is rounding, one of 1 - 1.2e-4 is a missing id."""
    for error, wrong in ((0.9e-4, False), (1.2e-4, True)):
        support = f32(HALF, math.log(0.5 - error), 0, HALF, HALF)
        assert (find_problem(replace(VALID, support_logprobs=support), VOCAB_SIZE) is not None) is wrong
    assert SUM_TOLERANCE == 1e-4


def test_ids_reach_to_the_end_of_int32() -> None:
    """The largest vocabulary of int32 ids: 2^31 - 1 ids, of which the last is 2^31 - 2."""
    top = INT32_MAX - 1
    edge = replace(VALID, token_ids=i32(0, 30, top), mask_ids=i32(0, top, 30, 0, top))
    assert find_problem(edge, INT32_MAX) is None
    assert find_problem(edge, top) == f"a sampled id is outside the model's vocabulary of {top}"


def test_one_token_has_no_neighbours() -> None:
    """The shortest completion: its only token is first and last."""
    single = replace(
        VALID,
        token_ids=i32(7),
        logprobs=f32(HALF),
        mask_ids=i32(7, 8),
        mask_offsets=i64(0, 2),
        support_logprobs=f32(HALF, HALF),
    )
    assert find_problem(single, VOCAB_SIZE) is None
    assert find_problem(replace(single, mask_ids=i32(8, 7)), VOCAB_SIZE) is not None


def is_valid(completion: Completion, vocab_size: int) -> bool:
    """The invariants over supports and logprobs once more, token by token in plain Python."""
    if not completion.sampling.truncates:
        return len(completion.mask_ids) == 0
    for token_id, logprob, (start, stop) in zip(
        completion.token_ids.tolist(),
        completion.logprobs.tolist(),
        itertools.pairwise(completion.mask_offsets.tolist()),
        strict=True,
    ):
        support = completion.mask_ids[start:stop].tolist()
        if support != sorted(set(support)) or token_id not in support:
            return False
        if not all(0 <= member < vocab_size for member in support):
            return False
        if not -math.inf < logprob <= 0 or (len(support) == 1 and logprob != 0):
            return False
    return True


small_ids = st.integers(-1, 5)
supports = st.lists(st.lists(small_ids, max_size=4), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(supports, st.data())
def test_agrees_with_a_plain_loop(masks: list[list[int]], data: st.DataObject) -> None:
    """Random supports over a vocabulary of 5, most of them wrong in some way: the same verdict as the plain loop."""
    sorted_masks = [sorted(set(mask)) if data.draw(st.booleans()) else mask for mask in masks]
    token_ids = [data.draw(st.sampled_from(mask) if mask else small_ids) for mask in sorted_masks]
    logprob = st.sampled_from([0.0, -0.0, -0.5, -1e30, 1e-3, math.nan, -math.inf])
    logprobs = [0.0 if len(mask) == 1 else data.draw(logprob) for mask in sorted_masks]
    completion = replace(
        VALID,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        mask_ids=np.array(list(itertools.chain.from_iterable(sorted_masks)), np.int32),
        mask_offsets=np.cumsum([0, *map(len, sorted_masks)], dtype=np.int64),
        support_logprobs=None,
    )
    assert (find_problem(completion, 5) is None) is is_valid(completion, 5)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("MAX_IDS", "5 support ids, more than the 4 of a row"),
        ("MAX_CHARACTERS", "7 characters of text, more than the 4"),
    ],
)
def test_more_than_a_row_may_hold(monkeypatch: pytest.MonkeyPatch, limit: str, expected: str) -> None:
    """It could be written, and no reader would take it."""
    row = replace(VALID, text="ab", prompt="cd", metadata="{}")
    assert find_problem(row, VOCAB_SIZE) is None
    monkeypatch.setattr(f"rollgen.format.invariants.{limit}", 4)
    assert (find_problem(row, VOCAB_SIZE) or "").startswith(expected)
