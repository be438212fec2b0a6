"""Every shape an engine answers in gives the same supports, bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rollgen.engines.base import SampleRequest
from rollgen.engines.outputs import SampledOutput, completion_of, read_outputs
from rollgen.errors import CaptureError, IncompleteSupport, RollgenError, UnfitEngine, UsageError
from rollgen.format.invariants import find_problem
from rollgen.rollouts import Completion, Prompt, Sampling

VOCAB_SIZE = 16
IDS = [7, 4, 9]
QUARTER, REST = math.log(0.25), math.log(0.75)
LOGPROBS = [QUARTER, 0.0, REST]
MASKS = [[9, 7], [4], [7, 9]]
"""The supports of three tokens, the first not sorted."""
SUPPORT_LOGPROBS = [[REST, QUARTER], [0.0], [QUARTER, REST]]
FLAT_MASKS, FLAT_SUPPORT_LOGPROBS, OFFSETS, LENGTHS = (
    [9, 7, 4, 7, 9],
    [REST, QUARTER, 0.0, QUARTER, REST],
    [0, 2, 3, 5],
    [2, 1, 2],
)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def plain(**changes: Any) -> dict[str, Any]:
    """A mapping of plain lists."""
    return {"token_ids": IDS, "logprobs": LOGPROBS, "sampling_mask": MASKS, "finish_reason": "length"} | changes


def sglang(**meta: Any) -> dict[str, Any]:
    """A response of SGLang's /generate; `output_token_logprobs` are those before truncation."""
    own = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_sampling_mask": MASKS,
        "output_token_sampling_logprobs": LOGPROBS,
        "output_token_logprobs": [(-3.0, 7, None), (-2.0, 4, None), (-1.0, 9, None)],
    }
    return {"text": "", "output_ids": IDS, "meta_info": own | meta}


def json_choice(**changes: Any) -> dict[str, Any]:
    """A choice of vLLM's /inference/v1/generate."""
    content = [{"token_id": i, "logprob": p, "top_logprobs": []} for i, p in zip(IDS, LOGPROBS, strict=True)]
    own = {"index": 0, "token_ids": IDS, "logprobs": {"content": content}, "sampling_mask": MASKS}
    return own | {"finish_reason": "length", "stop_reason": None} | changes


class Csr(NamedTuple):
    """The field names of vLLM's SamplingMaskLists."""

    token_ids: np.ndarray
    offsets: np.ndarray | None = None


def chunk(first: int, last: int, *, of_sampled: bool = False) -> SimpleNamespace:
    """SGLang's SamplingMaskChunk of some tokens."""
    ids = slice(OFFSETS[first], OFFSETS[last])
    logprobs = LOGPROBS[first:last] if of_sampled else FLAT_SUPPORT_LOGPROBS[ids]
    return SimpleNamespace(lengths=i32(*LENGTHS[first:last]), token_ids=i32(*FLAT_MASKS[ids]), logprobs=f32(*logprobs))


NATIVE_SHAPES: dict[str, Any] = {
    "lists": plain(),
    "numpy": plain(token_ids=np.array(IDS), logprobs=f32(*LOGPROBS), sampling_mask=[i32(*mask) for mask in MASKS]),
    "CSR as a pair of lists": plain(sampling_mask=(FLAT_MASKS, OFFSETS)),
    "CSR as a pair of arrays": plain(sampling_mask=(i32(*FLAT_MASKS), np.array(OFFSETS))),
    "CSR beside each other": plain(sampling_mask=None, mask_ids=i32(*FLAT_MASKS), mask_offsets=i32(*OFFSETS)),
    "CSR as a named tuple": plain(sampling_mask=Csr(i32(*FLAT_MASKS), np.array(OFFSETS))),
    "CSR as a mapping": plain(sampling_mask={"ids": FLAT_MASKS, "offsets": OFFSETS}),
    "nested in an object": plain(sampling_mask=SimpleNamespace(token_ids=MASKS)),
    "lengths": plain(sampling_mask=chunk(0, 3, of_sampled=True)),
    "an object with attributes": SimpleNamespace(**plain()),
    "a list of one": [plain()],
    "vLLM's response": {"choices": [json_choice()]},
    "vLLM's choice": json_choice(),
    "SGLang's response": sglang(),
    "SGLang without output_ids": {"meta_info": sglang()["meta_info"]},
}
SUPPORT_SHAPES: dict[str, Any] = {
    "plain": plain(support_logprobs=SUPPORT_LOGPROBS),
    "plain, flat": plain(support_logprobs=f32(*FLAT_SUPPORT_LOGPROBS)),
    "CSR of three": plain(sampling_mask=(FLAT_MASKS, OFFSETS, FLAT_SUPPORT_LOGPROBS)),
    "CSR beside each other": plain(mask_ids=FLAT_MASKS, mask_offsets=OFFSETS, support_logprobs=FLAT_SUPPORT_LOGPROBS),
    "a second field, nested": plain(sampling_mask=SimpleNamespace(token_ids=MASKS, logprobs=SUPPORT_LOGPROBS)),
    "a chunk": plain(sampling_mask=chunk(0, 3)),
    "chunks": plain(sampling_mask=[chunk(0, 1), chunk(1, 3)]),
    "chunks alone": plain(sampling_mask=[chunk(0, 2), chunk(2, 3)], logprobs=None),
    "SGLang, mode support": sglang(output_token_sampling_logprobs=SUPPORT_LOGPROBS),
    "SGLang, chunks": sglang(output_token_sampling_mask=[chunk(0, 3)], output_token_sampling_logprobs=None),
}
"""Those whose masks bring the logprobs of their ids."""
EXCLUDED = -math.inf
TABLE = [{7: QUARTER, 9: REST, 2: EXCLUDED}, {4: 0.0, 1: EXCLUDED, 2: EXCLUDED}, {9: REST, 7: QUARTER, 0: EXCLUDED}]
TABLE_SHAPES: dict[str, Any] = {
    "mappings": plain(sampling_mask=None, logprobs=TABLE),
    "mappings of objects": plain(
        logprobs=[{i: SimpleNamespace(logprob=p, rank=1) for i, p in row.items()} for row in TABLE]
    ),
    "flat, the sampled id in front": plain(
        logprobs=SimpleNamespace(
            token_ids=[i for token, row in zip(IDS, TABLE, strict=True) for i in (token, *row)],
            logprobs=[p for token, row in zip(IDS, TABLE, strict=True) for p in (row[token], *row.values())],
            start_indices=[0, 4, 8],
            end_indices=[4, 8, 12],
        )
    ),
}
"""Processed logprobs of the most likely ids."""


def cases(shapes: dict[str, Any]) -> list[Any]:
    return [pytest.param(output, id=name) for name, output in shapes.items()]


def read(output: object, **changes: Any) -> SampledOutput:
    """The only sequence of an output that truncates, natively."""
    (sampled,) = read_outputs(output, **{"truncates": True, "vocab_size": VOCAB_SIZE, "capture": "native"} | changes)
    return sampled


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


def test_masks_and_logprobs_that_disagree_are_refused() -> None:
    """The engine's own mask lacks an id whose processed logprob is finite."""
    with pytest.raises(CaptureError, match="name different ids"):
        read(plain(logprobs=TABLE, sampling_mask=[[7], [4], [7, 9]]))


def test_too_few_logprobs_beside_masks_matter_only_when_wanted(make_prompt: Callable[..., Prompt]) -> None:
    """The first token's two ids are both finite: others may be, so the logprobs of the support are not known."""
    sampled = read(plain(logprobs=[{7: QUARTER, 9: REST}, *TABLE[1:]]))
    assert sampled.support.support_logprobs is None
    request = SampleRequest(make_prompt(0), 0)
    assert completion_of(request, sampled, replayable=True, support_logprobs=False, text=None).support_logprobs is None
    with pytest.raises(IncompleteSupport, match="ask for more logprobs than the largest support"):
        completion_of(request, sampled, replayable=True, support_logprobs=True, text=None)


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(plain(), id="masks of the whole vocabulary are not read"),
        pytest.param(plain(sampling_mask=[None, None, None]), id="null masks"),
        pytest.param(plain(sampling_mask=None), id="no masks"),
        pytest.param(json_choice(sampling_mask=None), id="vLLM's JSON"),
        pytest.param(
            sglang(output_token_logprobs=[(p, i, None) for p, i in zip(LOGPROBS, IDS, strict=True)]), id="SGLang"
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
    choices = [json_choice(index=1, finish_reason="stop", stop_reason=9), json_choice(index=0)]
    first, second = read_outputs({"choices": choices}, truncates=True, vocab_size=VOCAB_SIZE, capture="native")
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")


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


NAN = math.nan
REFUSED: dict[str, tuple[Any, type[RollgenError], str]] = {
    "no known shape": (17, UsageError, "expected a vLLM RequestOutput .* got int"),
    "fields of no known shape": ({"text": "", "id": 1}, UsageError, "got the fields text, id"),
    "aborted": (plain(finish_reason="abort"), CaptureError, "finish reason 'abort' is not one of"),
    "not finished": (plain(finish_reason=None), CaptureError, "finish reason None .* the output is unfinished"),
    "SGLang aborted": (sglang(finish_reason={"type": "abort"}), CaptureError, "finish reason 'abort'"),
    "SGLang's NaN": (sglang(finish_reason={"type": "stop", "matched": "NaN happened"}), CaptureError, "NaN logits"),
    "a stop reason of another kind": (plain(finish_reason="stop", stop_reason=1.5), CaptureError, "stop reason 1.5"),
    "no token": (plain(token_ids=[], logprobs=[], sampling_mask=[]), CaptureError, "no token was generated"),
    "ids that are text": (plain(token_ids=["a"]), CaptureError, "token_ids are not a list of 32-bit integers"),
    "ids beyond 32 bits": (plain(token_ids=[2**31, 4, 9]), CaptureError, "token_ids are not a list of 32-bit"),
    "ids beyond 32 bits, numpy": (plain(token_ids=np.array([2**31, 4, 9])), CaptureError, "token_ids are not a list"),
    "ids that are fractions": (plain(token_ids=f32(7, 4, 9)), CaptureError, "token_ids are not a list of 32-bit"),
    "ids in two dimensions": (plain(token_ids=np.array([IDS])), CaptureError, "token_ids are not a list of 32-bit"),
    "no logprobs": (plain(logprobs=None), UnfitEngine, "has no logprobs of the distribution"),
    "a logprob short": (plain(logprobs=LOGPROBS[:2]), CaptureError, "2 logprobs for 3 tokens"),
    "logprobs that are text": (plain(logprobs=["a", "b", "c"]), CaptureError, "logprobs are not a list of numbers"),
    "a null logprob": (plain(logprobs=[QUARTER, None, REST]), CaptureError, "^token 1: logprob nan of the sampled id"),
    "a NaN logprob": (plain(logprobs=[QUARTER, 0.0, NAN]), CaptureError, "^token 2: logprob nan of the sampled id"),
    "a clamped logprob": (json_choice(logprobs=[-9999.0, 0.0, REST]), CaptureError, "^token 0: logprob -9999"),
    "logprobs of another id": (
        plain(logprobs=[{1: 0.0}, *TABLE[1:]]),
        CaptureError,
        "^token 0: .*no logprob of .*id 7",
    ),
    "logprobs without ids": (
        json_choice(logprobs={"content": [{"token": "a", "logprob": 0.0}] * 3}),
        CaptureError,
        "output_mode=tokens",
    ),
    "no mask": (plain(sampling_mask=None), UnfitEngine, "no sampling mask although sampling truncates"),
    "SGLang without masks": (sglang(output_token_sampling_mask=None), UnfitEngine, "no sampling mask"),
    "a null mask": (plain(sampling_mask=[[7, 9], None, [7, 9]]), UnfitEngine, "^token 1: the sampling mask is null"),
    "a mask that is a number": (
        plain(sampling_mask=[[7, 9], 4, [7, 9]]),
        CaptureError,
        "^token 1: .* is 4, not a list",
    ),
    "a mask short": (plain(sampling_mask=MASKS[:2]), CaptureError, "sampling masks of 2 tokens, but 3 token ids"),
    "an empty mask": (plain(sampling_mask=[[7, 9], [], [7, 9]]), CaptureError, "^token 1: .* empty sampling mask"),
    "an id twice": (plain(sampling_mask=[[7, 9, 7], [4], [7, 9]]), CaptureError, "^token 0: .* has id 7 twice"),
    "an id outside": (plain(sampling_mask=[[7, 9], [4, 16], [7, 9]]), CaptureError, "^token 1: id 16 .* of 16$"),
    "mask ids that are text": (
        plain(sampling_mask=[["a"], [4], [7]]),
        CaptureError,
        "the ids of the sampling masks are",
    ),
    "a tuple of four": (plain(sampling_mask=([7, 9], [4], [7], [9])), CaptureError, r"is \(ids, offsets\) or .* got 4"),
    "masks that are a number": (plain(sampling_mask=7), CaptureError, "expected in a list, got int"),
    "ids without offsets": (
        plain(mask_ids=FLAT_MASKS),
        CaptureError,
        "the offsets of the sampling masks are not a list",
    ),
    "offsets that end early": (plain(sampling_mask=(FLAT_MASKS, [0, 2, 3, 4])), CaptureError, "do not rise from 0 to"),
    "offsets that fall": (plain(sampling_mask=(FLAT_MASKS, [0, 3, 2, 5])), CaptureError, "do not rise from 0 to"),
    "offsets of more tokens": (plain(sampling_mask=(FLAT_MASKS, [0, 2, 3, 4, 5])), CaptureError, "masks of 4 tokens"),
    "support logprobs short": (plain(support_logprobs=[[REST], [0.0], [QUARTER, REST]]), CaptureError, "not parallel"),
    "support logprobs cut differently": (
        plain(support_logprobs=[[REST], [QUARTER, 0.0], [QUARTER, REST]]),
        CaptureError,
        "not parallel",
    ),
}


@pytest.mark.parametrize(
    ("output", "error", "message"), [pytest.param(*case, id=name) for name, case in REFUSED.items()]
)
def test_what_does_not_fit_is_refused(output: object, error: type[RollgenError], message: str) -> None:
    """Nothing is padded, cut or mended; the message says what was expected, and names the token."""
    with pytest.raises(error, match=message) as caught:
        read(output)
    assert type(caught.value) is error


def test_the_sampled_logprobs_alone_are_no_support() -> None:
    """With capture logprobs, a loop that forgot to ask for them is told how many."""
    with pytest.raises(IncompleteSupport, match=r"^token 0: .* logprobs=16$"):
        read(plain(sampling_mask=None), capture="logprobs", sampling=Sampling(top_k=8))


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
