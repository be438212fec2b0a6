"""A stored completion is read back as it was written, with the support of each of its tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards
from rollgen.format.manifest import read_manifest
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.inspect.sample import read_sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollgen.inspect.sample import Sample
    from rollgen.rollouts import Completion

ARRAYS = ("prompt_token_ids", "token_ids", "logprobs", "mask_ids", "mask_offsets")
FIELDS = ("prompt_id", "sample_index", "generation", "finish_reason", "stop_reason", "seed", "replayable", "text")


@pytest.mark.parametrize("support_logprobs", [False, True])
def test_reads_back_what_was_written(make_dataset: Callable[..., Any], support_logprobs: bool) -> None:
    """Every field of every completion, truncated (p0) or not (p3), with and without support logprobs."""
    directory, completions = make_dataset(0, support_logprobs=support_logprobs)
    names = (*ARRAYS, "support_logprobs") if support_logprobs else ARRAYS
    for written in completions[::5]:
        read = read_sample(directory, f"{written.prompt_id}:{written.sample_index}").completion
        for name in names:
            np.testing.assert_array_equal(getattr(read, name), getattr(written, name), strict=True)
        assert [getattr(read, name) for name in FIELDS] == [getattr(written, name) for name in FIELDS]
        assert read.sampling.max_tokens == written.sampling.max_tokens


def test_weights_are_read_back(tmp_path: Path, make_extras: Callable[..., Path]) -> None:
    """Spans with their ends; experts, a thousand numbers in front of nobody, are not."""
    sample = read_sample(make_extras(tmp_path / "run"), "p1:0")
    assert sample.completion.routed_experts is None
    spans = [("step 0", 0, 3), ("step 3", 3, 6), ("step 6", 6, 8)]
    assert sample.weights == spans
    shown = sample.to_json()["weight_versions"]
    assert shown == [{"version": version, "start": start, "end": end} for version, start, end in spans]


def test_without_weights_there_are_none(make_dataset: Callable[..., Any]) -> None:
    """Nothing is made up."""
    sample = read_sample(make_dataset(0).directory, "p0")
    assert sample.weights is None
    assert sample.to_json()["weight_versions"] is None


def test_place_and_plan(make_dataset: Callable[..., Any]) -> None:
    """p5 is in the second of three shards of twelve rows; four samples were planned, three are stored."""
    directory, _ = make_dataset(0)
    sample = read_sample(directory, "p5:1")
    assert (sample.file, sample.row_group, sample.row) == ("part-w0-000001.parquet", 0, 4)
    assert (sample.n, sample.samples, sample.vocab_size) == (4, (0, 1, 2), 500)
    (directory / PLAN_FILE).unlink()
    assert read_sample(directory, "p5:1").n is None


def a_sample(make_completion: Callable[..., Any], sample: Sample, **changes: Any) -> Sample:
    """`sample` with another completion."""
    return replace(sample, completion=make_completion(**changes))


def test_figures(make_dataset: Callable[..., Any], make_completion: Callable[..., Any]) -> None:
    """Three tokens with supports of 1, 2 and 1 ids and probabilities 1, a quarter and 1."""
    sample = a_sample(
        make_completion,
        read_sample(make_dataset(0).directory, "p0"),
        tokens=3,
        token_ids=np.array([7, 8, 9], np.int32),
        mask_ids=np.array([7, 5, 8, 9], np.int32),
        mask_offsets=np.array([0, 1, 3, 4]),
        logprobs=np.log(np.array([1, 0.25, 1], np.float32)),
    )
    assert sample.support_sizes == [1, 2, 1]
    assert sample.mean_support == pytest.approx(4 / 3)
    assert sample.probabilities == pytest.approx([1, 0.25, 1])
    support = sample.support(1)
    assert support is not None
    assert [(row.id, row.sampled) for row in support] == [(8, True), (5, False)]  # by id, but for the sampled one
    assert support[0].logprob == pytest.approx(np.log(0.25))
    assert support[1].logprob is None


def test_support_with_logprobs(make_dataset: Callable[..., Any]) -> None:
    """Most likely first, probabilities sum to one, exactly one id was sampled, and that with the token's logprob."""
    sample = read_sample(make_dataset(0, support_logprobs=True).directory, "p0:1")
    for position in range(len(sample.completion.token_ids)):
        support = sample.support(position)
        assert support is not None
        logprobs = [row.logprob for row in support if row.logprob is not None]
        assert logprobs == sorted(logprobs, reverse=True)
        assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)
        assert [row.logprob for row in support if row.sampled] == [sample.completion.logprobs[position]]


def test_untruncated(make_dataset: Callable[..., Any]) -> None:
    """Every fourth prompt has no supports: sizes are None, and so is their mean."""
    sample = read_sample(make_dataset(0).directory, "p3")
    assert set(sample.support_sizes) == {None}
    assert sample.mean_support is None
    assert sample.support(0) is None
    assert sample.to_json(0)["at"] == {
        "token": 0,
        "id": int(sample.completion.token_ids[0]),
        "truncated": False,
        "support": None,
    }


def test_positions(make_dataset: Callable[..., Any]) -> None:
    """From 0, or from the end; the error names the range."""
    sample = read_sample(make_dataset(0).directory, "p0")
    tokens = len(sample.completion.token_ids)
    assert [sample.position(at) for at in (0, -1, -tokens)] == [0, tokens - 1, 0]
    for at in (tokens, -tokens - 1):
        with pytest.raises(UsageError, match=f"--at {at}: the response has {tokens} tokens: 0 to {tokens - 1}, or "):
            sample.position(at)


def test_json(make_dataset: Callable[..., Any]) -> None:
    """Plain values only, an entry a token, cells that cover them, a support that is complete."""
    sample = read_sample(make_dataset(0, support_logprobs=True).directory, "p0:2")
    shown = json.loads(json.dumps(sample.to_json(-1), allow_nan=False))
    tokens = sample.completion.token_ids.tolist()
    assert [token["id"] for token in shown["tokens"]] == tokens
    assert [token["text"] for token in shown["tokens"]] == [str(token_id) for token_id in tokens]  # no tokenizer
    assert [token["support_size"] for token in shown["tokens"]] == np.diff(sample.completion.mask_offsets).tolist()
    assert [cell["start"] for cell in shown["cells"]] == list(range(len(tokens)))
    assert len(shown["at"]["support"]) == shown["tokens"][-1]["support_size"]
    assert shown["at"]["token"] == len(tokens) - 1
    assert (shown["prompt_id"], shown["sample_index"], shown["generation"], shown["n"]) == ("p0", 2, 0, 4)
    assert shown["sampling"]["top_k"] == 8
    assert shown["prompt_text"] == "prompt p0"
    assert "at" not in sample.to_json()


def test_generations(make_again: Callable[..., Any]) -> None:
    """The current one is read by default, the one before when asked for."""
    directory, completions = make_again()
    current, before = read_sample(directory, "p0:0"), read_sample(directory, "p0:0@0")
    np.testing.assert_array_equal(current.completion.token_ids, completions[1].token_ids)
    np.testing.assert_array_equal(before.completion.token_ids, completions[0].token_ids)
    assert (current.completion.generation, current.generations) == (1, (0, 1))


def test_while_a_run_is_writing(make_dataset: Callable[..., Any]) -> None:
    """What is committed is found; the shard that is being built is not looked at."""
    directory, completions = make_dataset(0)
    with WriterSlot(directory, "w0") as slot:
        slot.temporary().write_bytes(b"PAR1 half a shard")
        assert read_sample(directory, "p11:2").completion.seed == completions[-1].seed


def test_damage_names_the_row_group(make_dataset: Callable[..., Any]) -> None:
    """Also where the key columns are sound."""
    directory, _ = make_dataset(0)
    damage_middle(list_shards(directory)[0])
    with pytest.raises(DatasetError, match=r"part-w0-000000\.parquet: row group 0: "):
        read_sample(directory, "p0")


def spoilt(completion: Completion, damage: str) -> Completion:
    """A completion with one thing in it that no figure can be made of."""
    logprobs, support = completion.logprobs.copy(), completion.support_logprobs
    assert support is not None
    match damage:
        case "no tokens":
            ids, numbers = completion.token_ids[:0], logprobs[:0]
            fields = {"token_ids": ids, "logprobs": numbers, "mask_ids": ids, "support_logprobs": numbers}
            return replace(completion, **fields, mask_offsets=np.zeros(1, np.int64))
        case "support":
            return replace(completion, support_logprobs=np.where(np.arange(len(support)) == 1, -np.inf, support))
        case "temperature":
            return replace(completion, sampling=replace(completion.sampling, temperature=math.inf))
    logprobs[0] = float(damage)
    return replace(completion, logprobs=logprobs)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("no tokens", "has no tokens"),
        ("nan", "a logprob is not a finite number <= 0"),
        ("-inf", "a logprob is not a finite number <= 0"),
        ("3e38", "a logprob is not a finite number <= 0"),
        ("support", "a logprob is not a finite number <= 0"),
        ("temperature", "a sampling parameter is not a finite number"),
    ],
)
def test_a_row_that_cannot_be_shown_is_named(make_dataset: Callable[..., Any], damage: str, problem: str) -> None:
    """Rather than printed as NaN or Infinity, which are no JSON."""
    directory, completions = make_dataset(0, support_logprobs=True)
    row = replace(spoilt(completions[0], damage), sample_index=3)
    with (
        WriterSlot(directory, "w1") as slot,
        ShardWriter(slot, read_manifest(directory), commit_interval=math.inf) as writer,
    ):
        writer.add(row)
    with pytest.raises(
        DatasetError, match=rf"part-w1-000000\.parquet: row group 0, row 0: {problem}; `rollgen verify`"
    ):
        read_sample(directory, "p0:3")


@pytest.mark.parametrize("index", [-1, 1, 2**62])
def test_a_row_of_another_prompt_index(make_dataset: Callable[..., Any], index: int) -> None:
    """The plan has prompt p0 at 0: else n were that of another prompt, or of none. A right row beside it is found."""
    directory, completions = make_dataset(0)
    rows = [replace(completions[0], sample_index=4 if place else 3, prompt_index=place) for place in (0, index)]
    with (
        WriterSlot(directory, "w1") as slot,
        ShardWriter(slot, read_manifest(directory), commit_interval=math.inf) as writer,
    ):
        for row in rows:
            writer.add(row)
    with pytest.raises(DatasetError, match=rf"plan\.parquet: row {index} is not prompt 'p0', as a stored row says"):
        read_sample(directory, "p0:4")
    assert read_sample(directory, "p0:3").n == 4


def damage_middle(path: Path) -> None:
    """Flip a byte in the middle of the file: inside the pages of supports, which are most of it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
