"""Every shape an engine answers in gives the same supports, bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

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


BFLOAT16 = torch.tensor([QUARTER, 0.0, REST], dtype=torch.bfloat16)


def trained(*values: float) -> torch.Tensor:
    """Logprobs that remember where they come from."""
    return torch.tensor(values, requires_grad=True) * 1.0


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
    "vLLM's choice, as objects": SimpleNamespace(
        token_ids=IDS,
        sampling_mask=SimpleNamespace(token_ids=MASKS),
        finish_reason="length",
        logprobs=SimpleNamespace(
            content=[SimpleNamespace(token_id=i, logprob=p) for i, p in zip(IDS, LOGPROBS, strict=True)]
        ),
    ),
    "tuples": plain(token_ids=tuple(IDS), logprobs=tuple(LOGPROBS)),
    "torch": plain(
        token_ids=torch.tensor(IDS),
        logprobs=trained(*LOGPROBS),
        sampling_mask=[torch.tensor(mask, dtype=torch.int32) for mask in MASKS],
    ),
    "CSR as a pair of tensors": plain(sampling_mask=(torch.tensor(FLAT_MASKS), torch.tensor(OFFSETS))),
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
    "torch, flat": plain(support_logprobs=trained(*FLAT_SUPPORT_LOGPROBS)),
    "torch, nested": plain(support_logprobs=[trained(*row) for row in SUPPORT_LOGPROBS]),
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
UNTRUNCATED_ROWS = [(p, i, None) for p, i in zip(LOGPROBS, IDS, strict=True)]
"""SGLang's `output_token_logprobs`."""


def flat_logprobs(*, starts: Any = (0, 4, 8), ends: Any = (4, 8, 12)) -> dict[str, Any]:
    """vLLM's FlatLogprobs, cut otherwise."""
    logprobs = TABLE_SHAPES["flat, the sampled id in front"]["logprobs"]
    changed = {"start_indices": starts, "end_indices": ends}
    return plain(logprobs=SimpleNamespace(**vars(logprobs) | changed))


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


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(plain(), "^token 0: ids were excluded", id="masks"),
        pytest.param(plain(mask_ids=FLAT_MASKS, mask_offsets=OFFSETS), "^token 0: ids were excluded", id="CSR"),
        pytest.param(plain(sampling_mask=[None, [4], None]), "^token 1: ids were excluded", id="a mask among nulls"),
        pytest.param(plain(sampling_mask=[chunk(0, 3)]), "^token 0: ids were excluded", id="chunks"),
        pytest.param(plain(sampling_mask=None, logprobs=TABLE), "^token 0: ids were excluded", id="-inf"),
        pytest.param(
            json_choice(
                sampling_mask=None,
                logprobs={
                    "content": [
                        {"token_id": i, "logprob": p, "top_logprobs": [{"token_id": 0, "logprob": -9999.0}]}
                        for i, p in zip(IDS, LOGPROBS, strict=True)
                    ]
                },
            ),
            "^token 0: ids were excluded",
            id="-inf in vLLM's JSON",
        ),
        pytest.param(
            sglang(output_token_logprobs=UNTRUNCATED_ROWS), "^token 0: ids were excluded", id="SGLang's masks"
        ),
        pytest.param(
            sglang(output_token_sampling_mask=None, output_token_logprobs=[(-1.0, i, None) for i in (7, 5, 9)]),
            "^token 1: the engine returned no logprob of the sampled id 4",
            id="SGLang's logprobs of other ids",
        ),
        pytest.param(
            sglang(output_token_sampling_mask=None, output_token_logprobs=[-1.0, -2.0, -3.0]),
            "not rows of a logprob and an id",
            id="SGLang's logprobs without ids",
        ),
    ],
)
def test_outputs_that_an_untruncated_request_cannot_have(output: object, message: str) -> None:
    """Most of them are of a loop that has the same parameters for all requests."""
    with pytest.raises(CaptureError, match=message):
        read(output, truncates=False, capture="none")


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
    "output",
    [
        pytest.param({"outputs": [plain(prompt_token_ids=[1, 2]), plain()], "prompt_token_ids": [1, 2]}, id="vLLM's"),
        pytest.param([plain(prompt_token_ids=i32(1, 2))], id="a mapping"),
        pytest.param({**sglang(), "prompt_token_ids": (1, 2)}, id="SGLang's"),
    ],
)
def test_an_output_of_another_prompt_is_refused(output: object, make_prompt: Callable[..., Prompt]) -> None:
    """Loops mix up their outputs, and engines cut prompts that are too long."""
    for sampled in read_outputs(output, truncates=True, vocab_size=VOCAB_SIZE, capture="native"):
        arguments = {"replayable": True, "support_logprobs": False, "text": None}
        same = SampleRequest(make_prompt(0, token_ids=i32(1, 2)), 0)
        assert completion_of(same, sampled, **arguments).prompt_token_ids.tolist() == [1, 2]
        for ids in ((1, 3), (1, 2, 3), (2,)):
            other = SampleRequest(make_prompt(0, token_ids=i32(*ids)), 0)
            with pytest.raises(CaptureError, match="of another prompt, or its prompt was cut"):
                completion_of(other, sampled, **arguments)


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
    "outputs that are no list": ({"outputs": 7}, UsageError, "got the fields outputs"),
    "no sequence": (SimpleNamespace(outputs=[]), CaptureError, "^the output has no sequence$"),
    "no choice": ({"choices": []}, CaptureError, "^the output has no sequence$"),
    "an empty list": ([], CaptureError, "^the output has no sequence$"),
    "a list with an empty output": ([plain(), {"outputs": []}], CaptureError, "^the output has no sequence$"),
    "the same index twice": ({"choices": [json_choice()] * 2}, CaptureError, "the 2 sequences are 0, 0: they are not"),
    "an index missing": ([plain(index=0), plain()], CaptureError, "the 2 sequences are 0: they are not those of one"),
    "an index below 0": (plain(index=-1), CaptureError, "^the index -1 of a sequence"),
    "an index that is text": (plain(index="0"), CaptureError, "^the index '0' of a sequence"),
    "a prompt that is text": (plain(prompt_token_ids="a"), CaptureError, "prompt_token_ids are not a list of 32-bit"),
    "fields of no known shape": ({"text": "", "id": 1}, UsageError, "got the fields text, id"),
    "aborted": (plain(finish_reason="abort"), CaptureError, "finish reason 'abort' is not one of"),
    "not finished": (plain(finish_reason=None), CaptureError, "finish reason None .* the output is unfinished"),
    "SGLang aborted": (sglang(finish_reason={"type": "abort"}), CaptureError, "finish reason 'abort'"),
    "SGLang's NaN": (sglang(finish_reason={"type": "stop", "matched": "NaN happened"}), CaptureError, "NaN logits"),
    "a stop reason of another kind": (plain(finish_reason="stop", stop_reason=1.5), CaptureError, "stop reason 1.5"),
    "half a surrogate pair": (plain(finish_reason="stop", stop_reason="\ud83d"), CaptureError, r"'.ud83d' holds half"),
    "no token": (plain(token_ids=[], logprobs=[], sampling_mask=[]), CaptureError, "no token was generated"),
    "ids that are text": (plain(token_ids=["a"]), CaptureError, "token_ids are not a list of 32-bit integers"),
    "ids beyond 32 bits": (plain(token_ids=[2**31, 4, 9]), CaptureError, "token_ids are not a list of 32-bit"),
    "ids beyond 32 bits, numpy": (plain(token_ids=np.array([2**31, 4, 9])), CaptureError, "token_ids are not a list"),
    "ids that are fractions": (plain(token_ids=f32(7, 4, 9)), CaptureError, "token_ids are not a list of 32-bit"),
    "ids in two dimensions": (plain(token_ids=np.array([IDS])), CaptureError, "token_ids are not a list of 32-bit"),
    "no logprobs": (plain(logprobs=None), UnfitEngine, "has no logprobs of the distribution"),
    "a logprob short": (plain(logprobs=LOGPROBS[:2]), CaptureError, "2 logprobs for 3 tokens"),
    "logprobs that are text": (plain(logprobs=["a", "b", "c"]), CaptureError, "logprobs are not a list of 32-bit numb"),
    "logprobs that are lists": (
        plain(logprobs=[[0.0], [0.0], [0.0]]),
        CaptureError,
        "logprobs are not a list of 32-bit",
    ),
    "logprobs beyond 32 bits": (plain(logprobs=[-1e300, 0.0, REST]), CaptureError, "logprobs are not a list of 32-bit"),
    "logprobs beyond 32 bits, numpy": (
        plain(logprobs=np.array([-1e300, 0.0, REST])),
        CaptureError,
        "logprobs are not a list of 32-bit numbers",
    ),
    "logprobs that are whole tensors": (
        plain(logprobs=[trained(0.0, 0.0), trained(0.0), trained(0.0)]),
        CaptureError,
        "logprobs are not a list of 32-bit numbers",
    ),
    "ids that are fractions, torch": (plain(token_ids=torch.tensor([7.0, 4, 9])), CaptureError, "token_ids are not a"),
    "mask rows that are single tensors": (
        plain(sampling_mask=[torch.tensor([7, 9]), torch.tensor(4), torch.tensor([7, 9])]),
        CaptureError,
        "^token 1: the sampling mask is tensor.4., not a list",
    ),
    "logprobs of two kinds": (plain(logprobs=[TABLE[0], None, TABLE[2]]), CaptureError, "logprobs of some tokens are"),
    "flat logprobs that start late": (flat_logprobs(starts=[1, 4, 8]), CaptureError, "do not fit each other"),
    "flat logprobs that fall": (
        flat_logprobs(starts=[0, 8, 4], ends=[8, 4, 12]),
        CaptureError,
        "do not fit each other",
    ),
    "flat logprobs that end early": (flat_logprobs(ends=[4, 8, 11]), CaptureError, "do not fit each other"),
    "flat logprobs with a gap": (flat_logprobs(starts=[0, 5, 8]), CaptureError, "do not fit each other"),
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
    "support logprobs that do not sum to 1": (
        plain(support_logprobs=[[REST, REST], [0.0], [QUARTER, REST]], logprobs=[REST, 0.0, REST]),
        CaptureError,
        "^token 0: .* sum to 1.5, not 1",
    ),
    "support logprobs that do not sum to 1, SGLang": (
        sglang(output_token_sampling_logprobs=[[REST, QUARTER], [0.0], [QUARTER, QUARTER]]),
        CaptureError,
        "^token 2: .* sum to 0.5, not 1",
    ),
    "support logprobs of another id": (
        plain(support_logprobs=[[QUARTER, REST], [0.0], [QUARTER, REST]]),
        CaptureError,
        "^token 0: id 7 has two logprobs, -1.38.* and -0.28",
    ),
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


GARBAGE = {
    "a number": 5,
    "text": "x",
    "a mapping": {"a": 1},
    "an object": object(),
    "NaN": NAN,
    "nulls": [None] * 3,
    "lists": [[1], [[2]], []],
    "a number of numpy's": np.array(3),
    "a number of torch's": torch.tensor(3),
    "a table": torch.zeros((2, 2)),
    "too large": [2**70, -(2**70), 1e300],
    "below 0": [-1, -1, -1],
}
FLAT = TABLE_SHAPES["flat, the sampled id in front"]
HOSTS: dict[str, tuple[dict[str, Any], Callable[..., dict[str, Any]]]] = {
    "plain": (plain(mask_ids=None, mask_offsets=None, support_logprobs=None, index=0, prompt_token_ids=[1]), plain),
    "CSR": (
        {"mask_ids": FLAT_MASKS, "mask_offsets": OFFSETS},
        lambda **changes: plain(**{"mask_ids": FLAT_MASKS, "mask_offsets": OFFSETS} | changes),
    ),
    "flat": (vars(FLAT["logprobs"]), lambda **changes: FLAT | {"logprobs": vars(FLAT["logprobs"]) | changes}),
    "content": (
        {"token_id": 7, "logprob": QUARTER, "top_logprobs": []},
        lambda **changes: json_choice(logprobs={"content": [{"token_id": 7, "logprob": QUARTER} | changes] * 3}),
    ),
    "choice": (json_choice(), json_choice),
    "chunk": (
        vars(chunk(0, 3)),
        lambda **changes: plain(sampling_mask=[SimpleNamespace(**vars(chunk(0, 3)) | changes)]),
    ),
    "SGLang": (sglang()["meta_info"], sglang),
}
"""Fields, and what makes an output with some of them changed."""


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize(("fields", "make"), HOSTS.values(), ids=HOSTS)
def test_garbage_in_any_field_raises_no_error_but_ours(
    fields: dict[str, Any], make: Callable[..., dict[str, Any]], garbage: object
) -> None:
    """A loop catches CaptureError: a TypeError from within would end it."""
    for field in fields:
        for truncates, capture in ((True, "native"), (True, "logprobs"), (False, "none")):
            with suppress(RollgenError):
                read(make(**{field: garbage}), truncates=truncates, capture=capture, sampling=Sampling(top_k=8))


def test_bfloat16() -> None:
    """8 bits of fraction: exact for 0, and for others off by less than 2^-8 of the value."""
    sampled = read(plain(logprobs=BFLOAT16))
    assert sampled.support.logprobs.tolist() == pytest.approx(LOGPROBS, rel=2**-8)
    assert sampled.support.logprobs.dtype == np.float32


def test_a_null_in_place_of_a_logprob_is_explained() -> None:
    """Servers whose JSON has no -inf put null there, which is how JSON carries NaN as well."""
    with pytest.raises(CaptureError, match=r"^token 0: .* a logprob of nan, or null, which JSON servers put"):
        read(plain(sampling_mask=None, logprobs=[{7: QUARTER, 9: REST, 2: None}, *TABLE[1:]]), capture="logprobs")


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
