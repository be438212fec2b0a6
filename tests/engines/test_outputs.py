"""Every shape an engine answers in gives the same supports, bit for bit, and becomes the same row."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models.shapes import (
    IDS,
    LOGPROBS,
    MASKS,
    NATIVE_SHAPES,
    OFFSETS,
    QUARTER,
    REST,
    SUPPORT_SHAPES,
    TABLE,
    TABLE_SHAPES,
    UNTRUNCATED_ROWS,
    VOCAB_SIZE,
    f32,
    json_choice,
    plain,
    read,
    sglang,
)

from rollgen.engines.base import SampleRequest
from rollgen.engines.outputs import SampledOutput, completion_of, read_outputs
from rollgen.errors import IncompleteSupport
from rollgen.format.invariants import find_problem
from rollgen.rollouts import Completion, Prompt, Sampling

BFLOAT16 = torch.tensor([QUARTER, 0.0, REST], dtype=torch.bfloat16)


def cases(shapes: dict[str, Any]) -> list[Any]:
    return [pytest.param(output, id=name) for name, output in shapes.items()]


def check_support(sampled: SampledOutput) -> None:
    """The three tokens and their sorted supports."""
    assert sampled.token_ids.tolist() == IDS
    assert sampled.support.mask_ids.tolist() == [7, 9, 4, 7, 9]
    assert sampled.support.mask_offsets.tolist() == OFFSETS
    assert sampled.support.logprobs.tolist() == f32(*LOGPROBS).tolist()
    assert (sampled.finish_reason, sampled.stop_reason) == ("length", None)
    support = sampled.support
    dtypes = [array.dtype for array in (sampled.token_ids, support.mask_ids, support.mask_offsets, support.logprobs)]
    assert dtypes == [np.int32, np.int32, np.int64, np.float32]


@pytest.mark.parametrize("output", cases(NATIVE_SHAPES))
def test_native_shapes(output: object) -> None:
    """Masks alone."""
    sampled = read(output)
    check_support(sampled)
    assert sampled.support.support_logprobs is None


@pytest.mark.parametrize("output", cases(SUPPORT_SHAPES))
def test_native_shapes_with_the_logprobs_of_the_support(output: object) -> None:
    """They follow their ids when these are sorted."""
    sampled = read(output)
    check_support(sampled)
    assert sampled.support.support_logprobs is not None
    assert sampled.support.support_logprobs.tolist() == f32(QUARTER, REST, 0, QUARTER, REST).tolist()


@pytest.mark.parametrize("capture", ["logprobs", "native"])
@pytest.mark.parametrize("output", cases(TABLE_SHAPES))
def test_logprobs_of_the_most_likely_ids(output: dict[str, Any], capture: str) -> None:
    """They are the support, or beside masks they complete it with its logprobs."""
    sampled = read(output | {"sampling_mask": MASKS}, capture=capture)
    check_support(sampled)
    assert sampled.support.support_logprobs is not None
    assert sampled.support.support_logprobs.tolist() == f32(QUARTER, REST, 0, QUARTER, REST).tolist()


def test_too_few_logprobs_beside_masks_matter_only_when_wanted(make_prompt: Callable[..., Prompt]) -> None:
    """Of the first token's two ids only the sampled one has a logprob: those of the support are not known."""
    sampled = read(plain(logprobs=[{7: QUARTER}, *TABLE[1:]]))
    assert sampled.support.support_logprobs is None
    request = SampleRequest(make_prompt(0), 0)
    assert completion_of(request, sampled, replayable=True, support_logprobs=False, text=None).support_logprobs is None
    with pytest.raises(IncompleteSupport, match="ask for more logprobs than the largest support"):
        completion_of(request, sampled, replayable=True, support_logprobs=True, text=None)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(plain(sampling_mask=[[*range(VOCAB_SIZE)]] * 3), id="masks of the whole vocabulary"),
        pytest.param(plain(sampling_mask=[None, None, None]), id="null masks"),
        pytest.param(plain(sampling_mask=SimpleNamespace(token_ids=[None, [], None])), id="null masks of an object"),
        pytest.param(plain(mask_ids=[], mask_offsets=[0, 0, 0, 0]), id="CSR without ids"),
        pytest.param(plain(sampling_mask=None, support_logprobs=[None] * 3), id="null support logprobs"),
        pytest.param(plain(sampling_mask=None), id="no masks"),
        pytest.param(json_choice(sampling_mask=None), id="vLLM's JSON"),
        pytest.param(
            sglang(output_token_sampling_mask=None, output_token_logprobs=UNTRUNCATED_ROWS),
            id="SGLang",
        ),
        pytest.param(
            sglang(output_token_sampling_mask=[None] * 3, output_token_logprobs=UNTRUNCATED_ROWS),
            id="SGLang, null masks",
        ),
    ],
)
@pytest.mark.parametrize("capture", ["none", "logprobs", "native"])
def test_untruncated_supports_are_empty(output: object, capture: str) -> None:
    """Nothing truncates: every support is the full vocabulary, however supports are read."""
    sampled = read(output, truncates=False, capture=capture)
    assert sampled.support.mask_offsets.tolist() == [0, 0, 0, 0]
    assert sampled.support.logprobs.tolist() == f32(*LOGPROBS).tolist()


def test_several_sequences_come_in_the_order_of_their_index() -> None:
    """Servers answer in the order in which the sequences finished."""
    choices = [json_choice(index=3, finish_reason="stop", stop_reason=9), json_choice(index=1)]
    first, second = read_outputs({"choices": choices}, truncates=True, vocab_size=VOCAB_SIZE, capture="native")
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert (first.index, second.index) == (1, 3)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param(plain(), [0], id="one"),
        pytest.param([plain(), plain()], [0, 1], id="a list: the place in it"),
        pytest.param({"outputs": [plain(), plain(), plain()]}, [0, 1, 2], id="the place among the outputs"),
        pytest.param(plain(index=5), [5], id="one of several, alone"),
        pytest.param([plain(index=np.int64(1)), plain(index=0)], [0, 1], id="a list of which each says its own"),
        pytest.param([{"choices": [plain(index=1)]}, {"choices": [plain(index=0)]}], [0, 1], id="in two answers"),
    ],
)
def test_the_index_of_sequences(output: object, expected: list[int]) -> None:
    """The engine's word, or else the place."""
    several = read_outputs(output, truncates=True, vocab_size=VOCAB_SIZE, capture="native")
    assert [sampled.index for sampled in several] == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (plain(finish_reason="stop"), ("stop", None)),
        (plain(finish_reason="stop", stop_reason=2), ("stop", "2")),
        (plain(finish_reason="stop", stop_reason=np.int64(2)), ("stop", "2")),
        (plain(finish_reason="stop", stop_reason="2"), ("stop", '"2"')),
        (plain(finish_reason="stop", stop_reason="Zürich\n"), ("stop", '"Zürich\\n"')),
        (plain(finish_reason="repetition", stop_reason="repetition_detected"), ("repetition", None)),
        (sglang(finish_reason={"type": "stop", "matched": 2}), ("stop", "2")),
        (sglang(finish_reason={"type": "stop", "matched": "\n\n"}), ("stop", '"\\n\\n"')),
        (sglang(finish_reason={"type": "length", "length": 3}), ("length", None)),
        (sglang(finish_reason="length"), ("length", None)),
    ],
)
def test_finish_and_stop_reasons(output: object, expected: tuple[str, str | None]) -> None:
    """The id 2 and the string "2" stay apart; vLLM's EOS has no stop reason."""
    sampled = read(output)
    assert (sampled.finish_reason, sampled.stop_reason) == expected


def test_bfloat16() -> None:
    """8 bits of fraction: exact for 0, and for others off by less than 2^-8 of the value."""
    sampled = read(plain(logprobs=BFLOAT16))
    assert sampled.support.logprobs.tolist() == pytest.approx(LOGPROBS, rel=2**-8)
    assert sampled.support.logprobs.dtype == np.float32


def completion(make_prompt: Callable[..., Prompt], sampled: SampledOutput, **changes: Any) -> Completion:
    request = SampleRequest(make_prompt(3), 2, generation=1)
    return completion_of(request, sampled, **{"replayable": True, "support_logprobs": False, "text": "a"} | changes)


def test_a_sampled_output_becomes_a_row(make_prompt: Callable[..., Prompt]) -> None:
    """All of the request and all of the output, and it satisfies the format's invariants."""
    request = SampleRequest(make_prompt(3), 2, generation=1)
    made = completion(make_prompt, read(SUPPORT_SHAPES["plain"]), support_logprobs=True, replayable=False)
    assert find_problem(made, VOCAB_SIZE) is None
    assert (made.prompt_id, made.sample_index, made.prompt_index, made.generation) == ("p3", 2, 3, 1)
    assert (made.seed, made.sampling) == (request.seed, request.prompt.sampling)
    assert (made.text, made.prompt, made.metadata) == ("a", "prompt 3", '{"answer": 3}')
    assert made.replayable is False
    assert made.support_logprobs is not None


def test_support_logprobs_that_are_not_stored_are_dropped(make_prompt: Callable[..., Prompt]) -> None:
    """They came along, but the dataset has no such column."""
    assert completion(make_prompt, read(SUPPORT_SHAPES["plain"])).support_logprobs is None


def test_engine_neutral_sampling_parameters(make_prompt: Callable[..., Prompt]) -> None:
    """What a loop passes to its engine: the effective values, and the sample's own seed."""
    sampling = Sampling(
        temperature=0.5, top_p=0.75, top_k=8, min_p=0.25, max_tokens=9, stop=("a",), stop_token_ids=(2,)
    )
    request = SampleRequest(make_prompt(0, sampling=sampling), 1)
    assert request.sampling_params == {
        "seed": request.seed,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 8,
        "min_p": 0.25,
        "max_tokens": 9,
        "stop": ["a"],
        "stop_token_ids": [2],
    }
