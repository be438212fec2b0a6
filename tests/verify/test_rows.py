"""`check_rows`: each thing that can be wrong with a row is found, at its place, as often as it is there, and alone."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.plain_rows import (
    FULL,
    HALF,
    INF,
    INT32_MAX,
    LAYOUTS,
    NAN,
    ROW,
    SINGLE,
    SUPPORTED,
    VOCAB_SIZE,
    Row,
    oracle,
    supported,
    table_of,
)

from rollgen.format.columns import build_table
from rollgen.format.invariants import find_problem
from rollgen.format.schema import shard_schema
from rollgen.rollouts import Completion, Sampling
from rollgen.verify.rows import Violation, check_rows

Expected = tuple[str, int | None, int, str]
"""Kind, token, count, and what the problem says."""

NEIGHBOURS = [SINGLE, FULL]


def found(table: pa.Table, vocab_size: int = VOCAB_SIZE) -> list[tuple[str, int, int | None, int]]:
    return sorted((_key(v) for v in check_rows(table, vocab_size)), key=str)  # None and numbers


def _key(violation: Violation) -> tuple[str, int, int | None, int]:
    return violation.kind, violation.row, violation.token, violation.count


CORRUPTIONS: dict[str, tuple[Row, list[Expected]]] = {
    # the values of a row
    "sample_index": ({"sample_index": -1}, [("sampling", None, 1, "sample_index is -1, not at least 0")]),
    "generation": ({"generation": -1}, [("sampling", None, 1, "generation is -1, not at least 0")]),
    "prompt_index": ({"prompt_index": -(2**63)}, [("sampling", None, 1, "prompt_index is -9223372036854775808, not")]),
    "temperature 0": ({"temperature": 0.0}, [("sampling", None, 1, "temperature is 0.0, not a finite number above 0")]),
    "temperature NaN": ({"temperature": NAN}, [("sampling", None, 1, "temperature is nan")]),
    "temperature inf": ({"temperature": INF}, [("sampling", None, 1, "temperature is inf")]),
    "temperature below 0": ({"temperature": -1.0}, [("sampling", None, 1, "temperature is -1.0")]),
    "top_p 0": ({"top_p": 0.0}, [("sampling", None, 1, "top_p is 0.0, not in (0, 1]")]),
    "top_p above 1": ({"top_p": 1.5}, [("sampling", None, 1, "top_p is 1.5")]),
    "top_p NaN": ({"top_p": NAN}, [("sampling", None, 1, "top_p is nan")]),
    "min_p below 0": ({"min_p": -0.5}, [("sampling", None, 1, "min_p is -0.5, not in [0, 1]")]),
    "min_p above 1": ({"min_p": 1.5}, [("sampling", None, 1, "min_p is 1.5")]),
    "min_p NaN": ({"min_p": NAN}, [("sampling", None, 1, "min_p is nan")]),
    "top_k": ({"top_k": -1}, [("sampling", None, 1, "top_k is -1, not at least 0")]),
    "seed": ({"seed": -1}, [("sampling", None, 1, "seed is -1, not at least 0")]),
    "aborted": ({"finish_reason": "abort"}, [("sampling", None, 1, "finish_reason is 'abort', not one of stop, len")]),
    "finish_reason": ({"finish_reason": ""}, [("sampling", None, 1, "finish_reason is '', not one of")]),
    "stop_reason": ({"stop_reason": "stop"}, [("sampling", None, 1, "stop_reason is 'stop', not a string or an")]),
    "stop_reason object": ({"stop_reason": "{}"}, [("sampling", None, 1, "stop_reason is '{}', not a string or an")]),
    "stop_reason NaN": ({"stop_reason": "NaN"}, [("sampling", None, 1, "stop_reason is 'NaN', not a string or an")]),
    "metadata": ({"metadata": '{"a": 1'}, [("sampling", None, 1, "not a JSON object")]),
    "metadata a list": ({"metadata": "[1]"}, [("sampling", None, 1, "metadata is '[1]', not a JSON object")]),
    "metadata NaN": ({"metadata": '{"a": NaN}'}, [("sampling", None, 1, "not a JSON object")]),
    "metadata deep": ({"metadata": '{"a":' + "[" * 10**5}, [("sampling", None, 1, "not a JSON object")]),
    # how many there are
    "prompt_length": ({"prompt_length": 3}, [("lengths", None, 1, "prompt_length is not the number of prompt tokens")]),
    "response_length": ({"response_length": 2}, [("lengths", None, 1, "response_length is not the number of tokens")]),
    "no token": (
        {"response_length": 0, "token_ids": [], "logprobs": [], "sampling_mask": []},
        [("lengths", None, 1, "no token was generated")],
    ),
    "longer than asked for": ({"max_tokens": 2}, [("lengths", None, 1, "more tokens than max_tokens")]),
    "max_tokens 0": (
        {"max_tokens": 0},
        [("sampling", None, 1, "max_tokens is 0, not at least 1"), ("lengths", None, 1, "more tokens than max_tokens")],
    ),
    "a logprob short": ({"logprobs": [HALF, 0.0]}, [("lengths", None, 1, "logprobs has another length than token_i")]),
    "a logprob more": ({"logprobs": [HALF, 0.0, HALF, 0.0]}, [("lengths", None, 1, "logprobs has another length")]),
    "no logprobs": ({"logprobs": []}, [("lengths", None, 1, "logprobs has another length")]),
    "a support short": (
        {"sampling_mask": [[7, 8], [30]]},
        [("lengths", None, 1, "sampling_mask has another length than token_ids")],
    ),
    "a support more": (
        {"sampling_mask": [[7, 8], [30], [98, 99], [1]]},
        [("lengths", None, 1, "sampling_mask has another length")],
    ),
    "no supports": ({"sampling_mask": []}, [("lengths", None, 1, "sampling_mask has another length")]),
    # ids
    "prompt ids negative": (
        {"prompt_token_ids": [-1, -2]},
        [("ids", None, 2, "prompt id -1 is outside")],
    ),
    "prompt id outside": ({"prompt_token_ids": [99, 100]}, [("ids", None, 1, "prompt id 100 is outside")]),
    "first token negative": (
        {"token_ids": [-1, 30, 99]},
        [
            ("ids", 0, 1, "id -1 is outside the model's vocabulary of 100"),
            ("support", 0, 1, "the sampled id -1"),
        ],
    ),
    "last token outside": (
        {"token_ids": [7, 30, 100]},
        [("ids", 2, 1, "id 100 is outside"), ("support", 2, 1, "the sampled id 100 is not in its support")],
    ),
    # log-probabilities
    "first NaN": ({"logprobs": [NAN, 0.0, HALF]}, [("logprobs", 0, 1, "logprob nan is not a finite number <= 0")]),
    "last -inf": ({"logprobs": [HALF, 0.0, -INF]}, [("logprobs", 2, 1, "logprob -inf is not a finite")]),
    "positive": ({"logprobs": [HALF, 0.0, 0.5]}, [("logprobs", 2, 1, "logprob 0.5 is not a finite")]),
    "all NaN": ({"logprobs": [NAN, NAN, NAN]}, [("logprobs", 0, 3, "logprob nan is not a finite")]),
    "singleton not certain": (
        {"logprobs": [HALF, -0.5, HALF]},
        [("logprobs", 1, 1, "logprob -0.5 of a support")],
    ),
    "singleton positive": ({"logprobs": [HALF, 0.5, HALF]}, [("logprobs", 1, 1, "logprob 0.5 is not a finite")]),
    # supports
    "first null": (
        {"sampling_mask": [None, [30], [98, 99]]},
        [("support", 0, 1, "no support (null), though")],
    ),
    "all null": ({"sampling_mask": [None, None, None]}, [("support", 0, 3, "no support (null)")]),
    "first empty": ({"sampling_mask": [[], [30], [98, 99]]}, [("support", 0, 1, "empty support")]),
    "last empty": ({"sampling_mask": [[7, 8], [30], []]}, [("support", 2, 1, "empty support")]),
    "all empty": ({"sampling_mask": [[], [], []]}, [("support", 0, 3, "empty support")]),
    "untruncated": (
        {"top_k": 0, "top_p": 1.0},
        [("support", 0, 3, "a support is listed, though the row's parameters do not truncate")],
    ),
    "first id negative": ({"sampling_mask": [[-1, 7], [30], [98, 99]]}, [("support", 0, 1, "ids outside the model's")]),
    "last id outside": ({"sampling_mask": [[7, 8], [30], [99, 100]]}, [("support", 2, 1, "vocabulary of 100")]),
    "a huge id": ({"sampling_mask": [[7, INT32_MAX], [30], [98, 99]]}, [("support", 0, 1, "ids outside the model's")]),
    "a repeated id": (
        {"sampling_mask": [[7, 7], [30], [98, 99]]},
        [("support", 0, 1, "not strictly increasing")],
    ),
    "falling ids": (
        {"sampling_mask": [[7, 8], [30], [99, 98]]},
        [("support", 2, 1, "not strictly increasing")],
    ),
    "token not inside": ({"token_ids": [7, 31, 99]}, [("support", 1, 1, "the sampled id 31 is not in its support")]),
    "tokens shifted": ({"token_ids": [30, 99, 7]}, [("support", 0, 3, "the sampled id 30 is not in its support")]),
    "twice here, nowhere there": (  # as many matches as supports
        {"token_ids": [7, 31, 99], "sampling_mask": [[7, 7], [30], [98, 99]]},
        [
            ("support", 0, 1, "not strictly increasing"),
            ("support", 1, 1, "the sampled id 31 is not"),
        ],
    ),
}
SUPPORT_CORRUPTIONS: dict[str, tuple[Row, list[Expected]]] = {
    "a row short": (
        {"support_logprobs": [[HALF, HALF], [0.0]]},
        [("lengths", None, 1, "support_logprobs has another length than sampling_mask")],
    ),
    "an id short": (
        {"support_logprobs": [[HALF, HALF], [0.0], [0.0]]},
        [("lengths", None, 1, "another length than")],
    ),
    "shifted by an id": (  # as many in all
        {"support_logprobs": [[HALF, HALF, 0.0], [0.0], [HALF]]},
        [("lengths", None, 1, "another length than sampling_mask")],
    ),
    "null": (
        {"support_logprobs": [[HALF, HALF], None, [HALF, HALF]]},
        [("lengths", None, 1, "another length than")],
    ),
    "empty": (
        {"support_logprobs": [[HALF, HALF], [], [HALF, HALF]]},
        [("lengths", None, 1, "another length than")],
    ),
    "NaN": (
        {"support_logprobs": [[HALF, NAN], [0.0], [HALF, HALF]]},
        [("logprobs", 0, 1, "a support logprob is not a finite number <= 0")],
    ),
    "-inf": (
        {"support_logprobs": [[HALF, HALF], [0.0], [-INF, HALF]]},
        [("logprobs", 2, 1, "a support logprob is")],
    ),
    "positive": (
        {"support_logprobs": [[HALF, HALF], [0.5], [HALF, HALF]]},
        [("logprobs", 1, 1, "is not a finite")],
    ),
    "mass missing": (  # 0.5 + 0.25
        {"support_logprobs": [[HALF, 2 * HALF], [0.0], [HALF, HALF]]},
        [("logprobs", 0, 1, "support probabilities sum to 0.750000, not 1")],
    ),
    "mass above 1": (  # 1 + 0.5
        {"support_logprobs": [[HALF, HALF], [0.0], [0.0, HALF]]},
        [("logprobs", 2, 1, "support probabilities sum to 1.500000, not 1")],
    ),
    "singleton not certain": (
        {"support_logprobs": [[HALF, HALF], [HALF], [HALF, HALF]]},
        [
            ("logprobs", 1, 1, "sum to 0.500000"),
            ("logprobs", 1, 1, "of the sampled id is not its"),
        ],
    ),
    "another logprob": (
        {"logprobs": [-0.5, 0.0, HALF]},
        [("logprobs", 0, 1, "the support logprob of the sampled id is not its logprob -0.5")],
    ),
    "logprob NaN": ({"logprobs": [NAN, 0.0, HALF]}, [("logprobs", 0, 1, "logprob nan is not a finite number")]),
    "logprob positive": ({"logprobs": [0.5, 0.0, HALF]}, [("logprobs", 0, 1, "logprob 0.5 is not a finite number")]),
}


def check_each_place(row: Row, expected: list[Expected], *, support_logprobs: bool) -> None:
    """The corrupt `row` first, in the middle and last, beside valid ones of other kinds, in every layout."""
    for place in range(len(NEIGHBOURS) + 1):
        rows = [*NEIGHBOURS[:place], row, *NEIGHBOURS[place:]]
        rows = [supported(each) for each in rows] if support_logprobs else rows
        table = table_of(rows, support_logprobs=support_logprobs)
        for name, layout in LAYOUTS.items():
            violations = list(check_rows(layout(table), VOCAB_SIZE))
            assert [(v.kind, v.row, v.token, v.count) for v in violations] == [
                (kind, place, token, count) for kind, token, count, _ in expected
            ], name
            for violation, (*_, text) in zip(violations, expected, strict=True):
                assert text in violation.problem


@pytest.mark.parametrize(("change", "expected"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_each_corruption_is_found_alone(change: Row, expected: list[Expected]) -> None:
    """Kind, row, token, count and words; of the rows beside it nothing is said."""
    check_each_place(ROW | change, expected, support_logprobs=False)


@pytest.mark.parametrize(("change", "expected"), SUPPORT_CORRUPTIONS.values(), ids=SUPPORT_CORRUPTIONS)
def test_each_corruption_of_support_logprobs_is_found_alone(change: Row, expected: list[Expected]) -> None:
    """The same where all log-probabilities of a support are stored."""
    check_each_place(SUPPORTED | change, expected, support_logprobs=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"sampling_mask": [[0], None]}, [("support", 0, 1, "a support is listed")], id="listed"),
        pytest.param(
            {"sampling_mask": [None, []]},
            [("support", 1, 1, "a support is listed"), ("support", 1, 1, "empty support")],
            id="empty",
        ),
        pytest.param({"min_p": 0.5}, [("support", 0, 2, "no support (null)")], id="min_p truncates"),
        pytest.param({"top_p": 0.5}, [("support", 0, 2, "no support (null)")], id="top_p truncates"),
        pytest.param({"top_k": 1}, [("support", 0, 2, "no support (null)")], id="top_k truncates"),
        pytest.param({"token_ids": [-1, 100]}, [("ids", 0, 2, "id -1 is outside the model's voc")], id="ids"),
        pytest.param({"logprobs": [-1.0, NAN]}, [("logprobs", 1, 1, "logprob nan")], id="logprob"),
    ],
)
def test_corruptions_of_an_untruncated_row(change: Row, expected: list[Expected]) -> None:
    """Ids and log-probabilities are bounded there too."""
    row = FULL | change
    if "sampling_mask" in change:
        row["logprobs"] = [0.0, 0.0]  # of one id
    check_each_place(row, expected, support_logprobs=False)


VALID: dict[str, Row] = {
    "minus zero": {"logprobs": [HALF, -0.0, HALF]},
    "integer of any size": {"metadata": '{"a": 1' + "0" * 5000 + "}"},
    "half of a surrogate pair": {"metadata": '{"a": "\\ud800"}'},
    "object after space": {"metadata": '\n {"a": {}}'},
    "token id that stopped it": {"stop_reason": "2"},
    "text that stopped it": {"stop_reason": '"2"'},
    "sampling at its ends": {"top_p": 1.0, "min_p": 1.0, "temperature": 1e-30, "max_tokens": INT32_MAX},
    "top_k off": {"top_k": 0},
    "larger than top_k": {"top_k": 1},
    "all ids": {"sampling_mask": [list(range(100)), [30], [98, 99]]},
}


@pytest.mark.parametrize("change", VALID.values(), ids=VALID)
def test_what_is_unusual_but_valid_passes(change: Row) -> None:
    """Alone and beside others."""
    check_each_place(ROW | change, [], support_logprobs=False)
    assert found(table_of([ROW | change])) == []


@pytest.mark.parametrize("rows", [[], [ROW], [FULL], [SINGLE], [SINGLE] * 3, [FULL] * 3], ids=len)
@pytest.mark.parametrize("support_logprobs", [False, True])
def test_small_tables_pass(rows: list[Row], support_logprobs: bool) -> None:
    """No rows, one row, one token, only supports of one id, no supports at all."""
    table = table_of([supported(row) for row in rows] if support_logprobs else rows, support_logprobs=support_logprobs)
    assert found(table) == []
    assert found(table.slice(0, 0)) == []
    assert found(pa.concat_tables([table.slice(0, 0)] * 2)) == []


def test_counts_are_of_all_rows_and_places_of_the_first() -> None:
    """Two of four rows are wrong in one way, three tokens of them in another."""
    wrong = ROW | {"temperature": 0.0, "logprobs": [NAN, 0.0, NAN]}
    wrong_once = ROW | {"temperature": -1.0, "logprobs": [HALF, 0.0, INF]}
    assert found(table_of([ROW, wrong, FULL, wrong_once])) == [("logprobs", 1, 0, 3), ("sampling", 1, None, 2)]


def test_rows_that_do_not_align_hide_nothing_of_the_others() -> None:
    """Nor do rows that are merely too long or miscounted; places are those of the whole table."""
    short = SUPPORTED | {"logprobs": [HALF]}
    inner = SUPPORTED | {"support_logprobs": [[HALF], [0.0], [HALF, HALF]]}
    outer = SUPPORTED | {"support_logprobs": [[HALF, HALF]]}
    wrong = SUPPORTED | {"token_ids": [8, 31, 99], "max_tokens": 2, "response_length": 9}
    rows = [short, outer, supported(FULL), inner, wrong, SUPPORTED]
    assert found(table_of(rows, support_logprobs=True)) == [
        ("lengths", 0, None, 1),  # logprobs and token_ids
        ("lengths", 1, None, 2),  # support_logprobs and sampling_mask: the outer lists of one row, the inner of another
        ("lengths", 4, None, 1),  # response_length
        ("lengths", 4, None, 1),  # max_tokens
        ("support", 4, 1, 1),
    ]


def test_only_rows_that_do_not_align() -> None:
    """Nothing is left to check."""
    assert found(table_of([ROW | {"logprobs": []}] * 2)) == [("lengths", 0, None, 2)]


def test_sum_tolerance_is_where_it_is_said_to_be() -> None:
    """A mass of 1 - 0.9e-4 is rounding, one of 1 - 1.2e-4 is a missing id."""
    for error, wrong in ((0.9e-4, False), (1.2e-4, True)):
        row = SUPPORTED | {"support_logprobs": [[HALF, math.log(0.5 - error)], [0.0], [HALF, HALF]]}
        assert bool(found(table_of([row], support_logprobs=True))) is wrong


def test_texts_are_cut() -> None:
    """A problem quotes at most 80 characters."""
    (violation,) = check_rows(table_of([ROW | {"finish_reason": "x" * 10**6}]), VOCAB_SIZE)
    assert len(violation.problem) < 160


SCALARS: dict[str, list[Any]] = {
    "sample_index": [-1, 0, INT32_MAX],
    "generation": [-1, 1],
    "prompt_index": [-1, 7],
    "prompt_length": [0, 1, 3],
    "response_length": [0, 1, 2],
    "temperature": [0.0, NAN, INF, -1.0, 2.0],
    "top_p": [0.0, 1.0, 1.5, NAN],
    "min_p": [0.0, 1.0, -0.5, NAN],
    "top_k": [-1, 0, 1],
    "max_tokens": [0, 2, 3],
    "seed": [-1, 5],
    "finish_reason": ["length", "abort"],
    "metadata": [None, "{}", "[]", "{"],
}
LOGPROBS = [0.0, -0.0, HALF, -0.5, -INF, NAN, 0.25, INF]
ELEMENTS: dict[str, list[Any]] = {
    "prompt_token_ids": [-1, 0, 99, 100],
    "token_ids": [-1, 5, 7, 8, 30, 98, 99, 100, INT32_MAX],
    "logprobs": LOGPROBS,
    "sampling_mask": [None, [], [7], [30], [7, 8], [8, 7], [7, 7], [98, 99], [99, 100], [-1, 7], [98, 99, INT32_MAX]],
    "support_logprobs": [None, [], [0.0], [-0.5], [HALF, HALF], [NAN, HALF], [HALF, -INF], [0.25, 0.0], [0.0, HALF]],
}


def corrupt(draw: st.DrawFn, row: Row) -> None:
    """Change one value of a row, one element of a list, or its length."""
    name = draw(st.sampled_from([*SCALARS, *(name for name in ELEMENTS if name in row)]))
    if name in SCALARS:
        row[name] = draw(st.sampled_from(SCALARS[name]))
        return
    values = row[name]
    if values and draw(st.booleans()):
        values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from(ELEMENTS[name]))
    elif values and draw(st.booleans()):
        values.pop(draw(st.integers(0, len(values) - 1)))
    else:
        values.insert(draw(st.integers(0, len(values))), draw(st.sampled_from(ELEMENTS[name])))


@st.composite
def corrupted_rows(draw: st.DrawFn) -> list[Row]:
    """Up to four rows with up to five corruptions, all with support logprobs or none."""
    rows = draw(st.lists(st.sampled_from([ROW, FULL, SINGLE]), max_size=4))
    if draw(st.booleans()):
        rows = [supported(row) for row in rows]
    rows = copy.deepcopy(rows)
    if rows:
        for _ in range(draw(st.integers(0, 5))):
            corrupt(draw, rows[draw(st.integers(0, len(rows) - 1))])
    return rows


@settings(max_examples=250, deadline=None)
@given(corrupted_rows(), st.sampled_from([*LAYOUTS]))
def test_agrees_with_plain_python(rows: list[Row], layout: str) -> None:
    """Kind, first place and count of every check, whatever is wrong together."""
    table = table_of(rows, support_logprobs=bool(rows) and "support_logprobs" in rows[0])
    assert found(LAYOUTS[layout](table) if rows else table) == oracle(rows, VOCAB_SIZE)


small_ids = st.integers(-1, 5)
logprobs = st.sampled_from([0.0, -0.0, HALF, HALF, HALF, -0.5, -INF, NAN, 0.25])


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Of a vocabulary of 5, most of them wrong in some way that a table can hold."""
    masks = draw(st.lists(st.lists(small_ids, max_size=4), max_size=4))
    masks = [sorted(set(mask)) if draw(st.integers(0, 4)) else mask for mask in masks]
    token_ids = [draw(st.sampled_from(mask)) if mask and draw(st.integers(0, 4)) else draw(small_ids) for mask in masks]
    sampling = Sampling(
        top_k=draw(st.sampled_from([0, 8])),
        top_p=draw(st.sampled_from([1.0, 0.5])),
        max_tokens=draw(st.sampled_from([2, 3, 8])),
    )
    stored = [0.0 if len(mask) == 1 else draw(logprobs) for mask in masks]
    ids = [member for mask in masks for member in mask]
    inside = [
        logprob if member == token or draw(st.booleans()) else HALF
        for mask, token, logprob in zip(masks, token_ids, stored, strict=True)
        for member in mask
    ]
    keep = sampling.truncates and draw(st.booleans())
    return Completion(
        prompt_id="p",
        sample_index=0,
        prompt_index=0,
        prompt_token_ids=np.array([1], np.int32),
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(stored, np.float32),
        mask_ids=np.array(ids, np.int32),
        mask_offsets=np.cumsum([0, *map(len, masks)], dtype=np.int64),
        finish_reason=draw(st.sampled_from(["stop", "stop", "stop", "abort"])),
        sampling=sampling,
        seed=0,
        support_logprobs=np.array(inside, np.float32) if keep else None,
        generation=draw(st.sampled_from([0, 0, 0, 1, -1])),
    )


@settings(max_examples=250, deadline=None)
@given(completions())
def test_agrees_with_what_a_writer_checks(completion: Completion) -> None:
    """What `find_problem` lets through has no violation, what it refuses has one, at the token that it names."""
    schema = shard_schema(support_logprobs=completion.support_logprobs is not None)
    violations = list(check_rows(build_table([completion], schema), 5))
    problem = find_problem(completion, 5)
    assert (problem is None) is (violations == [])
    token = re.match(r"token (\d+): (?!support probabilities)", problem or "")  # of those the worst is named
    assert token is None or int(token[1]) in {violation.token for violation in violations}


def test_a_real_completion_passes(make_completion: Callable[..., Completion]) -> None:
    """Random supports of 1 to 400 ids; the same once one of 400 tokens is not in its support."""
    completion = make_completion(3, 1, tokens=400, largest=400, support_logprobs=True)
    completion = replace(completion, sampling=replace(completion.sampling, max_tokens=400))
    schema = shard_schema(support_logprobs=True)
    assert found(build_table([completion, completion], schema), 512) == []
    tokens = completion.token_ids.copy()
    tokens[399] = next(
        token for token in range(512) if token not in completion.mask_ids[completion.mask_offsets[399] :]
    )
    assert found(build_table([completion, replace(completion, token_ids=tokens)], schema), 512) == [
        ("support", 1, 399, 1)
    ]
