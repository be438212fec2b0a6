"""What an engine answers and does not fit is refused by name: nothing is padded, cut or mended."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models.shapes import (
    FLAT_MASKS,
    IDS,
    LOGPROBS,
    MASKS,
    OFFSETS,
    QUARTER,
    REST,
    TABLE,
    TABLE_SHAPES,
    UNTRUNCATED_ROWS,
    VOCAB_SIZE,
    chunk,
    f32,
    i32,
    json_choice,
    plain,
    read,
    sglang,
    trained,
)

from rollgen.engines.base import SampleRequest
from rollgen.engines.outputs import completion_of, read_outputs
from rollgen.errors import CaptureError, IncompleteSupport, RollgenError, UnfitEngine, UsageError
from rollgen.rollouts import Prompt, Sampling


def flat_logprobs(*, starts: Any = (0, 4, 8), ends: Any = (4, 8, 12)) -> dict[str, Any]:
    """vLLM's FlatLogprobs, cut otherwise."""
    logprobs = TABLE_SHAPES["flat, the sampled id in front"]["logprobs"]
    changed = {"start_indices": starts, "end_indices": ends}
    return plain(logprobs=SimpleNamespace(**vars(logprobs) | changed))


def test_masks_and_logprobs_that_disagree_are_refused() -> None:
    """The engine's own mask lacks an id whose processed logprob is finite."""
    with pytest.raises(CaptureError, match="name different ids"):
        read(plain(logprobs=TABLE, sampling_mask=[[7], [4], [7, 9]]))


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


def test_a_null_in_place_of_a_logprob_is_explained() -> None:
    """Servers whose JSON has no -inf put null there, which is how JSON carries NaN as well."""
    with pytest.raises(CaptureError, match=r"^token 0: .* a logprob of nan, or null, which JSON servers put"):
        read(plain(sampling_mask=None, logprobs=[{7: QUARTER, 9: REST, 2: None}, *TABLE[1:]]), capture="logprobs")


def test_the_sampled_logprobs_alone_are_no_support() -> None:
    """With capture logprobs, a loop that forgot to ask for them is told how many."""
    with pytest.raises(IncompleteSupport, match=r"^token 0: .* logprobs=16$"):
        read(plain(sampling_mask=None), capture="logprobs", sampling=Sampling(top_k=8))
