"""Completions to Arrow and back: every value is what it was, and row groups are cut where they should be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.format import columns
from rollgen.format.columns import build_table, split_row_groups, stored_sizes
from rollgen.format.schema import ROW_GROUP_TOKENS, shard_schema
from rollgen.format.writer import build_row_groups, write_parquet
from rollgen.rollouts import FINISH_REASONS, Completion, Sampling, expert_ids, text_length

MakeCompletion = Callable[..., Completion]


def as_row(completion: Completion, *, support_logprobs: bool) -> dict[str, Any]:
    """A row as plain values, token by token; an empty support becomes None."""
    sampling = completion.sampling
    spans = list(itertools.pairwise(completion.mask_offsets.tolist()))

    def per_token(values: np.ndarray) -> list[list[Any] | None]:
        return [values[start:stop].tolist() if start < stop else None for start, stop in spans]

    row = {
        "prompt_id": completion.prompt_id,
        "sample_index": completion.sample_index,
        "generation": completion.generation,
        "prompt_index": completion.prompt_index,
        "prompt_length": len(completion.prompt_token_ids),
        "response_length": len(completion.token_ids),
        "prompt_token_ids": completion.prompt_token_ids.tolist(),
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "sampling_mask": per_token(completion.mask_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "temperature": float(np.float32(sampling.temperature)),
        "top_p": float(np.float32(sampling.top_p)),
        "min_p": float(np.float32(sampling.min_p)),
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": completion.seed,
        "replayable": completion.replayable,
        "text": completion.text,
        "prompt": completion.prompt,
        "metadata": completion.metadata,
    }
    if support_logprobs and completion.support_logprobs is not None:
        row["support_logprobs"] = per_token(completion.support_logprobs)
    return row


WITH_EXTRAS = shard_schema(support_logprobs=False, weight_versions=True, routed_experts=True)


def test_weights_and_experts_round_trip(tmp_path: Path, make_completion: MakeCompletion) -> None:
    """Spans as two lists, experts flat, row by row; all else as without them."""
    rows = [make_completion(k, 0, tokens=k + 1, extras=True) for k in range(6)]
    path = tmp_path / "shard.parquet"
    write_parquet(path, build_row_groups(rows, WITH_EXTRAS), WITH_EXTRAS)
    stored = pq.read_table(path).to_pylist()
    for row, completion in zip(stored, rows, strict=True):
        assert completion.weight_versions is not None
        assert completion.routed_experts is not None
        assert row.pop("weight_versions") == list(completion.weight_versions.versions)
        assert row.pop("weight_version_starts") == list(completion.weight_versions.starts)
        assert row.pop("routed_experts") == completion.routed_experts.flatten().tolist()
        assert row == as_row(completion, support_logprobs=False)


def test_new_and_stored_rows_have_the_same_size(make_completion: MakeCompletion) -> None:
    """So a compaction cuts row groups where the writer would: versions are texts, and experts are counted."""
    rows = [make_completion(k, 0, tokens=4, extras=k % 2 == 0, stop_reason=[None, '"."'][k // 2]) for k in range(4)]
    with_extras, without = rows[::2], rows[1::2]
    sizes = [
        *stored_sizes(build_table(with_extras, WITH_EXTRAS)),
        *stored_sizes(build_table(without, shard_schema(support_logprobs=False))),
    ]
    assert sizes == [
        (4, len(row.mask_ids), text_length(row), expert_ids(row), len(row.prompt_token_ids))
        for row in (*with_extras, *without)
    ]
    # Prompts 0 and 2 have 1 and 3 tokens: 4 and 6 positions of 3 layers with 2 experts each.
    assert [size.expert_ids for size in sizes] == [24, 36, 0, 0]


def test_a_row_group_is_closed_by_experts_too(make_completion: MakeCompletion, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 numbers a row: the second one passes a bound of 30."""
    rows = [make_completion(0, k, tokens=4, extras=True) for k in range(5)]
    monkeypatch.setattr(columns, "MAX_ROW_GROUP_EXPERT_IDS", 30)
    assert [len(group) for group in split_row_groups(rows)] == [2, 2, 1]


@pytest.mark.parametrize("name", ["prompt_id", "stop_reason", "text", "prompt", "metadata"])
def test_a_row_group_is_closed_by_texts(
    make_completion: MakeCompletion, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever it is: ids and stop strings may be as long as a row of the input."""
    rows = [make_completion(0, k, tokens=4, **{name: "é" * 1000}) for k in range(5)]
    monkeypatch.setattr(columns, "MAX_ROW_GROUP_CHARACTERS", 2000)
    assert [len(group) for group in split_row_groups(rows)] == [2, 2, 1]


def test_a_row_group_is_closed_by_prompts_too(make_completion: MakeCompletion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of prompts of 4 tokens: the second one reaches a bound of 8."""
    rows = [make_completion(3, k, tokens=1) for k in range(5)]
    monkeypatch.setattr(columns, "MAX_ROW_GROUP_PROMPT_TOKENS", 8)
    assert [len(group) for group in split_row_groups(rows)] == [2, 2, 1]


def round_trip(path: Path, completions: list[Completion], *, support_logprobs: bool) -> list[dict[str, Any]]:
    schema = shard_schema(support_logprobs=support_logprobs)
    write_parquet(path, build_row_groups(completions, schema), schema)
    table = pq.read_table(path)
    assert table.schema.equals(schema)
    return list(table.to_pylist())


texts = st.none() | st.text(max_size=20)
"""Any Unicode text that has a UTF-8 form, NUL and emoji included."""


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Any valid nesting and any storable value; ids are not those of a real support, which the format does not ask."""
    truncates = draw(st.booleans())
    tokens = draw(st.integers(1, 6))
    sizes = [draw(st.integers(1, 4)) if truncates else 0 for _ in range(tokens)]
    int32 = st.integers(0, 2**31 - 1)
    float32 = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
    ids = draw(st.lists(int32, min_size=sum(sizes), max_size=sum(sizes)))
    weights = draw(st.lists(float32, min_size=sum(sizes), max_size=sum(sizes)))
    return Completion(
        prompt_id=draw(st.text(min_size=1, max_size=8)),
        sample_index=draw(int32),
        prompt_index=draw(st.integers(0, 2**63 - 1)),
        prompt_token_ids=np.array(draw(st.lists(int32, min_size=1, max_size=5)), np.int32),
        token_ids=np.array(draw(st.lists(int32, min_size=tokens, max_size=tokens)), np.int32),
        logprobs=np.array(draw(st.lists(float32, min_size=tokens, max_size=tokens)), np.float32),
        mask_ids=np.array(ids, np.int32),
        mask_offsets=np.cumsum([0, *sizes], dtype=np.int64),
        finish_reason=draw(st.sampled_from(FINISH_REASONS)),
        sampling=Sampling(draw(st.floats(0.01, 2)), draw(st.floats(0.01, 1)), 50 * truncates, 0.25, draw(int32)),
        seed=draw(st.integers(0, 2**63 - 1)),
        stop_reason=draw(texts),
        support_logprobs=np.array(weights, np.float32),
        replayable=draw(st.booleans()),
        text=draw(texts),
        prompt=draw(texts),
        metadata=draw(texts),
        generation=draw(int32),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(completions(), min_size=1, max_size=4), st.booleans())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[Completion], support_logprobs: bool) -> None:
    """Every value of every column, int32 and int64 edges, -0.0, nulls and texts: exactly as it went in."""
    path = tmp_path_factory.mktemp("columns") / "shard.parquet"
    expected = [as_row(row, support_logprobs=support_logprobs) for row in rows]
    assert round_trip(path, rows, support_logprobs=support_logprobs) == expected


def test_strings_survive(tmp_path: Path, make_completion: MakeCompletion) -> None:
    """NUL, emoji with a modifier, line separators, an empty text, and no text at all (which is not an empty one)."""
    values = ["a\x00b", "👋🏽", "\u2028\u0085\r\n", "", None]
    rows = [make_completion(0, k, text=text, prompt=text, metadata=text) for k, text in enumerate(values)]
    read = round_trip(tmp_path / "shard.parquet", rows, support_logprobs=False)
    for column in ("text", "prompt", "metadata"):
        assert [row[column] for row in read] == values


def test_null_means_not_truncated_and_only_that(tmp_path: Path, make_completion: MakeCompletion) -> None:
    """Truncated and untruncated rows side by side: the latter's supports are null, nobody's are empty."""
    rows = [make_completion(0, k, tokens=5, full=k % 2 == 1, support_logprobs=True) for k in range(4)]
    for row in round_trip(tmp_path / "shard.parquet", rows, support_logprobs=True):
        for column in ("sampling_mask", "support_logprobs"):
            supports = row[column]
            assert len(supports) == 5
            assert all((support is None) is (row["sample_index"] % 2 == 1) for support in supports)
            assert all(support != [] for support in supports)


def test_columns_are_those_of_the_schema_in_order(make_completion: MakeCompletion) -> None:
    """No null where the schema allows none: `validate` checks the buffers too."""
    for support_logprobs in (False, True):
        schema = shard_schema(support_logprobs=support_logprobs)
        table = build_table([make_completion(0, 0, support_logprobs=True)], schema)
        table.validate(full=True)
        assert table.schema == schema
        nullable = {field.name for field in schema if field.nullable}
        assert nullable == {"stop_reason", "text", "prompt", "metadata"}
        assert all(table[name].null_count == 0 for name in set(schema.names) - nullable)


def test_a_row_group_is_closed_by_the_row_that_fills_it(make_completion: MakeCompletion) -> None:
    """57,344 tokens: 3 rows of 20,000 pass it, 2 do not; a row longer than that is a group of its own."""
    assert ROW_GROUP_TOKENS == 57_344
    lengths = [20_000] * 4 + [100_000] + [1] * 3
    rows = [make_completion(0, k, tokens=tokens, full=True) for k, tokens in enumerate(lengths)]
    groups = list(split_row_groups(rows))
    # 20,000 * 3 = 60,000 >= 57,344; then 20,000 + 100,000; then what is left.
    assert [len(group) for group in groups] == [3, 2, 3]
    assert [row for group in groups for row in group] == rows


def test_a_row_group_is_closed_by_mask_ids_too(
    make_completion: MakeCompletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supports of 100 ids at most, 10 tokens a row: with a bound of one row's ids, each row is a group."""
    rows = [make_completion(0, k, tokens=10, largest=100) for k in range(3)]
    monkeypatch.setattr(columns, "MAX_ROW_GROUP_IDS", min(len(row.mask_ids) for row in rows))
    assert [len(group) for group in split_row_groups(rows)] == [1, 1, 1]


def test_a_row_group_is_closed_by_text_too(make_completion: MakeCompletion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a hundred characters with answers of one token: a bound of 250 is passed by the third row."""
    rows = [make_completion(0, k, tokens=1, prompt="p" * 100, text=None, metadata=None) for k in range(7)]
    monkeypatch.setattr(columns, "MAX_ROW_GROUP_CHARACTERS", 250)
    assert [len(group) for group in split_row_groups(rows)] == [3, 3, 1]


def test_no_rows_no_groups() -> None:
    """An empty sequence is cut into nothing."""
    assert list(split_row_groups([])) == []


def test_groups_of_a_file_are_those_of_the_split(tmp_path: Path, make_completion: MakeCompletion) -> None:
    """One Parquet row group for each: what is read at random is what was cut."""
    rows = [make_completion(0, k, tokens=20_000, largest=2) for k in range(5)]
    path = tmp_path / "shard.parquet"
    write_parquet(
        path, build_row_groups(rows, shard_schema(support_logprobs=False)), shard_schema(support_logprobs=False)
    )
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [3, 2]
    assert pq.read_table(path)["sample_index"].to_pylist() == [0, 1, 2, 3, 4]
