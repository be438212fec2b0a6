"""Rows against the plan: each way in which a row is not what was asked for, and that nothing else is said."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.memory import counted

from rollgen.format.columns import build_table
from rollgen.format.keys import Keys
from rollgen.format.retries import RetryList
from rollgen.format.row_groups import RowGroupCache
from rollgen.format.schema import TOKEN_LIST, shard_schema
from rollgen.prompts.plan import Plan, PlanWriter
from rollgen.prompts.planned import Planned, _differ, check_planless
from rollgen.rollouts import Completion, Prompt, Sampling, sample_seed
from rollgen.verify.rows import Violation

MakeCompletion = Callable[..., Completion]
MakePrompt = Callable[..., Prompt]
SCHEMA = shard_schema(support_logprobs=False)
TOMBSTONE = 3
RETRIED_TOKENS = 96


@pytest.fixture
def planned(tmp_path: Path, make_prompt: MakePrompt) -> Planned:
    """Seven prompts in row groups of 2, 3, 1 and 1; number 3 was skipped. n is 2, of number 5 it is 3.

    Retry 1 lists samples (0, 1) and (5, 2), retry 2 lists (5, 2).
    """
    prompts = [make_prompt(index, n=3 if index == 5 else 2) for index in range(7)]
    prompts[TOMBSTONE] = replace(prompts[TOMBSTONE], token_ids=np.zeros(0, np.int32), error="no prompt")
    prompts[6] = replace(prompts[6], seed=7, prompt=None, metadata=None)
    with PlanWriter(tmp_path / "plan.parquet") as writer:
        for rows in (prompts[:2], prompts[2:5], prompts[5:6], prompts[6:]):
            writer.write(rows)
    plan = Plan(tmp_path / "plan.parquet")
    return Planned(plan, [retry_of(1, [(0, 1), (5, 2)], RETRIED_TOKENS), retry_of(2, [(5, 2)], 2 * RETRIED_TOKENS)])


def retry_of(generation: int, keys: Sequence[tuple[int, int]], max_tokens: int) -> RetryList:
    prompts, samples = zip(*keys, strict=True)
    tokens = np.full(len(keys), max_tokens, np.int32)
    return RetryList(generation, np.array(prompts, np.int64), np.array(samples, np.int32), tokens)


@pytest.fixture
def row(make_completion: MakeCompletion) -> Callable[..., Completion]:
    """`row(prompt, sample, generation=0, **changes)`: a row as it was asked for, and what is changed in it.

    `max_tokens`, `temperature`, ... change its sampling.
    """

    def make(prompt: int, sample: int = 0, generation: int = 0, /, **changes: Any) -> Completion:
        completion = make_completion(prompt, sample, tokens=2, generation=generation)
        sampling = replace(completion.sampling, max_tokens=(64, RETRIED_TOKENS, 2 * RETRIED_TOKENS)[generation % 3])
        if prompt == 6:
            completion = replace(completion, seed=sample_seed(7, "p6", sample), prompt=None, metadata=None)
        own = {name: changes.pop(name) for name in [*changes] if hasattr(sampling, name)}
        return replace(completion, sampling=replace(sampling, **own), **changes)

    return make


def check(planned: Planned, rows: Sequence[Completion]) -> list[tuple[str, int, int]]:
    return [(v.kind, v.row, v.count) for v in problems(planned, rows)]


def problems(planned: Planned, rows: Sequence[Completion]) -> list[Violation]:
    return list(itertools.starmap(Violation.of_rows, planned.check(build_table(rows, SCHEMA))))


KEYS = [(0, 0), (0, 1), (1, 0), (2, 1), (4, 0), (5, 2), (6, 0), (6, 1)]


@pytest.mark.parametrize(
    "keys",
    [KEYS, KEYS[::-1], KEYS[3:4], KEYS[-1:] + KEYS[:1], KEYS * 2],
    ids=["all", "falling", "one", "ends", "twice"],
)
def test_rows_that_were_asked_for_pass(planned: Planned, row: Callable[..., Completion], keys: list[Any]) -> None:
    """Of all row groups of the plan, in any order, in one chunk or in many."""
    table = build_table([row(*key) for key in keys], SCHEMA)
    assert list(planned.check(table)) == []
    assert list(planned.check(pa.concat_tables([table.slice(at, 1) for at in range(len(table))]))) == []
    assert list(planned.check(table.slice(0, 0))) == []


def test_retried_rows_pass(planned: Planned, row: Callable[..., Completion]) -> None:
    """With the list's max_tokens; generations of a sample may have gaps."""
    assert check(planned, [row(0, 1), row(0, 1, 1), row(5, 2, 1), row(5, 2, 2)]) == []


UNPLANNED = {
    "prompt beyond the plan": (7, 0, 0),
    "prompt far beyond": (2**62, 0, 0),
    "prompt below 0": (-1, 0, 0),
    "sample beyond n": (0, 2, 0),
    "sample below 0": (0, -1, 0),
    "skipped prompt": (TOMBSTONE, 0, 0),
    "generation below 0": (0, 0, -1),
    "sample that retry 1 does not list": (0, 0, 1),
    "sample between those that retry 1 lists": (4, 1, 1),
    "sample after those that retry 1 lists": (6, 1, 1),
    "sample that retry 1 lists, but not retry 2": (0, 1, 2),
    "skipped prompt of an unknown retry": (TOMBSTONE, 0, 3),
    "sample beyond n of an unknown retry": (0, 2, 3),
}


@pytest.mark.parametrize("key", UNPLANNED.values(), ids=UNPLANNED)
def test_a_row_that_nobody_asked_for(
    planned: Planned, row: Callable[..., Completion], key: tuple[int, int, int]
) -> None:
    """It is named; the rows beside it are judged as if it were not there."""
    prompt, sample, generation = key
    wrong = replace(row(2), prompt_index=prompt, sample_index=sample, generation=generation)
    (violation,) = problems(planned, [row(0), wrong, row(6), wrong])
    assert (violation.kind, violation.row, violation.token, violation.count) == ("unplanned", 1, None, 2)
    name = f"prompt {prompt}, sample {sample}" + (f", generation {generation}" if generation else "")
    assert violation.problem == f"{name} is not in the plan"
    assert check(planned, [wrong, row(0), wrong, row(6, seed=5)]) == [("unplanned", 0, 2), ("seed", 3, 1)]


def test_only_rows_that_nobody_asked_for(planned: Planned, row: Callable[..., Completion]) -> None:
    """Nothing is left to compare."""
    assert check(planned, [row(0, sample_index=9)]) == [("unplanned", 0, 1)]


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "prompt_id": ({"prompt_id": "q"}, "prompt_id is not the plan's"),
    "prompt ids as many": ({"prompt_token_ids": np.array([1, 2, 3], np.int32)}, "prompt_token_ids is not the plan's"),
    "prompt ids shorter": ({"prompt_token_ids": np.array([1], np.int32)}, "prompt_token_ids is not the plan's"),
    "no prompt ids": ({"prompt_token_ids": np.array([], np.int32)}, "prompt_token_ids is not the plan's"),
    "prompt": ({"prompt": "prompt 1"}, "prompt is not the plan's"),
    "prompt null": ({"prompt": None}, "prompt is not the plan's"),
    "prompt empty": ({"prompt": ""}, "prompt is not the plan's"),
    "metadata": ({"metadata": '{"answer": 3}'}, "metadata is not the plan's"),
    "metadata null": ({"metadata": None}, "metadata is not the plan's"),
    "temperature": ({"temperature": 0.8}, "temperature is 0.800000011920929, the plan says 0.75"),
    "temperature NaN": ({"temperature": np.nan}, "temperature is nan, the plan says 0.75"),
    "top_p": ({"top_p": 1.0}, "top_p is 1.0, the plan says 0.875"),
    "min_p": ({"min_p": 0.5}, "min_p is 0.5, the plan says 0.0"),
    "top_k": ({"top_k": 9}, "top_k is 9, the plan says 8"),
    "max_tokens": ({"max_tokens": 63}, "max_tokens is 63, 64 was asked for"),
}


@pytest.mark.parametrize(("change", "text"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_row_that_is_not_as_asked_for(
    planned: Planned, row: Callable[..., Completion], change: dict[str, Any], text: str
) -> None:
    """Each column by itself; a changed id changes the seed that belongs to it, too."""
    violations = problems(planned, [row(0), row(6), row(2, **change), row(2), row(2, 1, **change)])
    expected = [("mismatch", 2, 2), *([("seed", 2, 2)] if "prompt_id" in change else [])]
    assert [(v.kind, v.row, v.count) for v in violations] == expected
    assert violations[0].problem == text


@pytest.mark.parametrize("name", ["prompt", "metadata"])
def test_text_where_the_plan_has_none(planned: Planned, row: Callable[..., Completion], name: str) -> None:
    """Prompt 6 has neither."""
    assert check(planned, [row(0), row(6, **{name: "{}"}), row(6)]) == [("mismatch", 1, 1)]


def test_all_that_is_wrong_is_said(planned: Planned, row: Callable[..., Completion]) -> None:
    """In rows of several row groups of the plan."""
    rows = [row(6, temperature=2.0), row(0, top_k=9), row(4, seed=0), row(1, prompt="x"), row(1, 1, temperature=2.0)]
    assert check(planned, rows) == [("mismatch", 3, 1), ("mismatch", 0, 2), ("mismatch", 1, 1), ("seed", 2, 1)]


@pytest.mark.parametrize(
    ("key", "max_tokens", "wanted"),
    [
        pytest.param((0, 1, 1), 64, 96, id="the plan's in a retry"),
        pytest.param((0, 1, 0), 96, 64, id="the retry's in the first try"),
        pytest.param((5, 2, 2), 96, 192, id="an earlier retry's"),
        pytest.param((5, 2, 1), 192, 96, id="a later retry's"),
    ],
)
def test_max_tokens_of_a_retry(
    planned: Planned, row: Callable[..., Completion], key: tuple[int, int, int], max_tokens: int, wanted: int
) -> None:
    """Each generation has its own."""
    (violation,) = problems(planned, [row(0, 1, 1), row(5, 2, 2), row(*key, max_tokens=max_tokens), row(6)])
    assert violation == Violation("mismatch", 2, None, f"max_tokens is {max_tokens}, {wanted} was asked for", 1)


def test_a_retry_whose_list_is_not_there(planned: Planned, row: Callable[..., Completion]) -> None:
    """Its rows are of the plan's prompts, as far as can be told: all but max_tokens is compared."""
    rows = [row(0, 0, 3, max_tokens=5), row(1), row(2, 0, 3, prompt="x")]
    assert check(planned, rows) == [("mismatch", 2, 1)]
    assert planned.is_planned(Keys.of(build_table(rows, SCHEMA))).tolist() == [False, True, False]


def test_seeds_are_those_of_the_specification(planned: Planned, row: Callable[..., Completion]) -> None:
    """`schema/SPEC.md`, section 9: seed(0, p0, 0) and seed(0, p0, 1). A prompt's own seed counts: that of 6 is 7."""
    rows = [row(0, seed=7946509806446685545), row(0, 1, seed=2041286349572205399)]
    assert check(planned, rows) == []
    assert check(planned, rows[::-1]) == []
    (violation,) = problems(
        planned, [rows[0], row(0, 1, seed=7946509806446685545), row(6, seed=sample_seed(0, "p6", 0))]
    )
    text = "the seed is not 2041286349572205399, the hash that the plan's seed gives"
    assert violation == Violation("seed", 1, None, text, 2)


def test_a_value_of_the_plan_that_no_row_can_hold(tmp_path: Path, make_prompt: MakePrompt, row: Any) -> None:
    """A temperature beyond float32 is not what the row has, and no warning."""
    prompt = make_prompt(0)
    with PlanWriter(tmp_path / "huge.parquet") as writer:
        writer.write([replace(prompt, sampling=replace(prompt.sampling, temperature=1e300))])
    (violation,) = problems(Planned(Plan(tmp_path / "huge.parquet"), []), [row(0)])
    assert violation.problem == "temperature is 0.75, the plan says 1e+300"


def test_one_row_group_of_the_plan_is_held_at_a_time(
    tmp_path: Path, make_prompt: MakePrompt, row: Callable[..., Completion]
) -> None:
    """Rows of a part lie apart: here one in each of 64 row groups of a megabyte, which are ten prompts."""
    text = "x" * 100_000
    with PlanWriter(tmp_path / "long.parquet") as writer:
        for first in range(0, 640, 10):
            writer.write([make_prompt(first + each, prompt=text) for each in range(10)])
    planned = Planned(Plan(tmp_path / "long.parquet"), [])
    planned._groups = RowGroupCache(planned.plan.group, max_bytes=1)
    table = build_table([row(prompt, prompt=text) for prompt in range(630, -1, -10)], SCHEMA)
    with counted() as pool:
        assert list(planned.check(table)) == []
    assert 1_000_000 < pool.max_memory() < 16_000_000  # 64 MB, were all of them held


def test_a_long_prompt_that_many_rows_were_to_have(
    tmp_path: Path, make_prompt: MakePrompt, row: Callable[..., Completion]
) -> None:
    """2,200 rows that say nothing of a megabyte: more than Arrow has in one text column, were it taken for each."""
    with PlanWriter(tmp_path / "long.parquet") as writer:
        writer.write([make_prompt(0, n=2200, prompt="x" * 1_000_000)])
    planned = Planned(Plan(tmp_path / "long.parquet"), [])
    assert check(planned, [row(0, sample, prompt="y") for sample in range(2200)]) == [("mismatch", 0, 2200)]


texts = st.none() | st.sampled_from(["", "a", "b", "é", "aa"])


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=8))
def test_texts_differ_as_in_plain_python(pairs: list[tuple[str | None, str | None]]) -> None:
    """Null is no empty text, and bytes as many are not the same."""
    stored, planned = (pa.chunked_array([pa.array(side, pa.string())]) for side in zip(*pairs, strict=True))
    expected = [one != other for one, other in pairs]
    assert _differ(stored, planned, np.arange(len(pairs))).tolist() == expected
    assert _differ(stored, planned[::-1], np.arange(len(pairs))[::-1]).tolist() == expected


lists = st.lists(st.integers(0, 2), max_size=3)


@given(st.lists(st.tuples(lists, lists), min_size=1, max_size=8))
def test_lists_differ_as_in_plain_python(pairs: list[tuple[list[int], list[int]]]) -> None:
    """Lists of token ids, empty ones among them."""
    stored, planned = (pa.chunked_array([pa.array(side, TOKEN_LIST)]) for side in zip(*pairs, strict=True))
    assert _differ(stored, planned, np.arange(len(pairs))).tolist() == [one != other for one, other in pairs]


keys_of_rows = st.lists(st.tuples(st.integers(-1, 8), st.integers(-1, 4), st.integers(-1, 4)), max_size=12)
listed = [{(0, 1), (5, 2)}, {(5, 2)}]


def as_keys(rows: Sequence[tuple[int, int, int]]) -> Keys:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Keys(table[:, 0], table[:, 1].astype(np.int32), table[:, 2].astype(np.int32))


@given(rows=keys_of_rows)
def test_is_planned_agrees_with_plain_python(plan_of_module: Planned, rows: list[tuple[int, int, int]]) -> None:
    """Any mixture of prompts, samples and generations."""
    n = [2, 2, 2, 0, 2, 3, 2]  # 0: skipped
    wanted = [
        0 <= prompt < 7
        and 0 <= sample < n[prompt]
        and (generation == 0 or (0 < generation <= 2 and (prompt, sample) in listed[generation - 1]))
        for prompt, sample, generation in rows
    ]
    assert plan_of_module.is_planned(as_keys(rows)).tolist() == wanted


@pytest.fixture(scope="module")
def plan_of_module(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The plan of `planned`, with nothing but what `is_planned` reads."""
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    some = Prompt(prompt_id="", prompt_index=0, token_ids=np.ones(1, np.int32), sampling=Sampling(), n=2, seed=0)
    prompts = [replace(some, prompt_id=f"p{index}", prompt_index=index) for index in range(7)]
    prompts[TOMBSTONE] = replace(prompts[TOMBSTONE], error="no prompt")
    prompts[5] = replace(prompts[5], n=3)
    with PlanWriter(path) as writer:
        writer.write(prompts)
    return Planned(Plan(path), [retry_of(1, [(0, 1), (5, 2)], 9), retry_of(2, [(5, 2)], 9)])


def test_without_a_plan_numbers_derive_from_ids(row: Callable[..., Completion]) -> None:
    """The first 8 bytes of SHA-256 less a bit; `a` has the number of section 4 of the specification."""
    right = [replace(row(0), prompt_id="a", prompt_index=7299139317422481125)]
    for name in ("é😀", "x" * 1000, "\n"):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        right += [replace(row(0), prompt_id=name, prompt_index=number)] * 2
    wrong = replace(row(0), prompt_id="b", prompt_index=7299139317422481125)
    table = build_table([*right, wrong, *right, wrong], SCHEMA)
    text = "prompt_index is not the number of its prompt_id"
    (mismatch,) = check_planless(table)
    assert Violation.of_rows(*mismatch) == Violation("mismatch", len(right), None, text, 2)
    assert list(check_planless(table.slice(0, len(right)))) == []
    assert list(check_planless(table.slice(0, 0))) == []
