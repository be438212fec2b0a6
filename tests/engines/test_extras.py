"""Weight versions and routed experts, in every shape that engines give them, become columns or an error that tells."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollgen.engines.base import Extras, SampleRequest
from rollgen.engines.extras import read_experts, read_layout, read_versions
from rollgen.engines.outputs import completion_of, read_outputs
from rollgen.errors import CaptureError
from rollgen.format.invariants import find_problem
from rollgen.format.manifest import Manifest, RoutedExperts
from rollgen.rollouts import Prompt, WeightVersions

LAYOUT = RoutedExperts(layers=2, top_k=2, experts=4)
HALF = math.log(0.5)
EXPERTS = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[2, 0], [3, 1]]], np.int16)
"""Three positions: of a prompt of two tokens and a response of two."""


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(array: np.ndarray, **options: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64_of(file.getvalue())


EXPERT_SHAPES: dict[str, Any] = {
    "vLLM's array": EXPERTS.astype(np.uint8),
    "more experts than a byte numbers": EXPERTS.astype(np.uint16),
    "torch": torch.from_numpy(EXPERTS),
    "nested lists": EXPERTS.tolist(),
    "vLLM's server": npy(EXPERTS.astype(np.uint8)),
    "a wide .npy": npy(EXPERTS.astype(np.int32)),
    "SGLang": base64_of(EXPERTS.astype("<i4").tobytes()),
    "flat": EXPERTS.flatten(),
}


@pytest.mark.parametrize("value", EXPERT_SHAPES.values(), ids=EXPERT_SHAPES)
def test_experts_in_every_shape(value: Any) -> None:
    """int16, of memory of their own, whatever they came in."""
    experts = read_experts(value, 3, LAYOUT)
    assert experts.dtype == np.int16
    np.testing.assert_array_equal(experts, EXPERTS)
    assert not isinstance(value, np.ndarray) or not np.shares_memory(experts, value)


WRONG_EXPERTS: dict[str, tuple[Any, str]] = {
    "none": (None, "the output has none: start vLLM with enable_return_routed_experts"),
    "a position short": (
        EXPERTS[1:],
        r"routed experts are \[2, 2, 2\], not \[3, 2, 2\]: a row for each token of prompt",
    ),
    "a layer short": (EXPERTS[:, :1], r"routed experts are \[3, 1, 2\], not \[3, 2, 2\]"),
    "two dimensions": (EXPERTS.reshape(3, 4), r"routed experts are \[3, 4\], not"),
    "beyond the experts": (EXPERTS + 1, "not all numbers from 0 to 3"),
    "negative": (EXPERTS - 1, "not all numbers from 0 to 3"),
    "fractions": (EXPERTS / 2, "not all numbers from 0 to 3"),
    "ragged": ([[[0, 1]], [[0]]], "their rows differ in length"),
    "no base64": ("%%%%", "neither a .npy file nor raw int32 in base64"),
    "raw bytes of no int32": (base64_of(b"abcde"), "neither a .npy file nor raw int32 in base64"),
    "cut .npy": (npy(EXPERTS.astype(np.uint8))[:-8], "neither a .npy file nor raw int32 in base64"),
    "pickled": (npy(np.array([{}], object), allow_pickle=True), "not a .npy file of whole numbers in C order"),
    "floats": (npy(EXPERTS.astype(np.float16)), "not a .npy file of whole numbers in C order"),
    "Fortran order": (npy(np.asfortranarray(EXPERTS)), "not a .npy file of whole numbers in C order"),
    "far too long": ("A" * 4_000, "routed experts are 4000 characters of base64, more than 12 numbers take"),
}


@pytest.mark.parametrize(("value", "expected"), WRONG_EXPERTS.values(), ids=WRONG_EXPERTS)
def test_wrong_experts_are_named(value: Any, expected: str) -> None:
    """One line each, and nothing is unpickled."""
    with pytest.raises(CaptureError, match=expected):
        read_experts(value, 3, LAYOUT)


def test_a_header_cannot_ask_for_memory() -> None:
    """A .npy of 140 bytes that claims 2^60 numbers."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60,)})
    with pytest.raises(CaptureError, match=r"neither a \.npy file"):
        read_experts(base64_of(file.getvalue() + b"0" * 12), 3, LAYOUT)


def header(text: bytes) -> str:
    """A .npy file with this header and 12 bytes."""
    return base64_of(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(12))


HEADERS = {
    "empty": "",
    "magic alone": base64_of(b"\x93NUMPY"),
    "a zip file": base64_of(b"PK\x03\x04" + bytes(40)),
    "an open bracket": header(b"{'descr': ("),
    "nested": header(b"-" * 900 + b"1\n"),
    "more than a machine's number": header(
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 2, 2), }\n" % 2**70
    ),
    "negative": header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 2, 2), }\n"),
    "structured": header(b"{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (3, 2, 2), }\n"),
    "Python 2": header(b"{'descr': '|u1', 'fortran_order': False, 'shape': (3L, 2L, 2L), }\n"),
    "version 2": base64_of(b"\x93NUMPY\x02\x00" + bytes(40)),
}


@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS)
def test_broken_files(text: str) -> None:
    """Are refused in one way, by a probe and for a sample: numpy raises EOFError, BadZipFile, TokenError, and warns."""
    with pytest.raises(CaptureError, match="routed experts"):
        read_layout(text)
    with pytest.raises(CaptureError, match="routed experts"):
        read_experts(text, 3, LAYOUT)


def test_layout() -> None:
    """Of a file's shape; of raw numbers and of other than three dimensions it cannot be known."""
    assert read_layout(npy(EXPERTS.astype(np.uint8))) == RoutedExperts(layers=2, top_k=2, experts=None)
    for text in (npy(EXPERTS[0]), npy(EXPERTS[:, :0]), base64_of(EXPERTS.astype("<i4").tobytes()), "%"):
        with pytest.raises(CaptureError, match=r"no \.npy file of whole numbers in three dimensions"):
            read_layout(text)


def test_experts_of_an_unknown_number_are_bounded_by_the_column() -> None:
    """32,767 fits int16, 32,768 does not."""
    unknown = LAYOUT.model_copy(update={"experts": None})
    assert read_experts(EXPERTS.astype(np.int64) + 32_764, 3, unknown).max() == 32_767
    with pytest.raises(CaptureError, match="not all numbers from 0 to 32767"):
        read_experts(EXPERTS.astype(np.int64) + 32_765, 3, unknown)


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


VERSION_SHAPES: dict[str, tuple[Any, WeightVersions]] = {
    "JSON": ([span("a", 0, 2), span("b", 2, 3)], WeightVersions(("a", "b"), (0, 2))),
    "objects": ([SimpleNamespace(version="a", start=0, end=3)], WeightVersions(("a",), (0,))),
    "numpy numbers": ([span("a", np.int64(0), np.int64(3))], WeightVersions(("a",), (0,))),
    "one text": ("step 7", WeightVersions(("step 7",), (0,))),
    "the same twice": ((span("a", 0, 1), span("a", 1, 3)), WeightVersions(("a", "a"), (0, 1))),
}


@pytest.mark.parametrize(("value", "expected"), VERSION_SHAPES.values(), ids=VERSION_SHAPES)
def test_versions_in_every_shape(value: Any, expected: WeightVersions) -> None:
    """Three tokens; plain numbers come out."""
    found = read_versions(value, 3)
    assert found == expected
    assert {type(start) for start in found.starts} == {int}


NESTED: list[Any] = []
"""Too deep to be shown."""
for _ in range(1000):
    NESTED = [NESTED]
WRONG_VERSIONS: dict[str, tuple[Any, str]] = {
    "none": (None, "the output has none: vLLM returns them from 0.32 on"),
    "no spans": ([], "the weight versions are of 0 tokens, but there are 3"),
    "a token short": ([span("a", 0, 2)], "the weight versions are of 2 tokens, but there are 3"),
    "too long": ([span("a", 0, 4)], "the weight versions are of 4 tokens, but there are 3"),
    "a late start": ([span("a", 1, 3)], "not of one stretch of tokens after the other"),
    "a gap": ([span("a", 0, 1), span("b", 2, 3)], "not of one stretch of tokens after the other"),
    "an empty span": ([span("a", 0, 0), span("b", 0, 3)], "not of one stretch of tokens after the other"),
    "no end": ([span("a", 0, None)], "not of one stretch of tokens after the other"),
    "a number": ([span(7, 0, 3)], "the weight version of token 0 is no text"),
    "an empty version": ([span("", 0, 3)], "the weight version of token 0 is no text"),
    "half a surrogate pair": ([span("\ud83d", 0, 3)], "the weight version of token 0 is no text"),
    "a nested version": ([span(NESTED, 0, 3)], "the weight version of token 0 is no text"),
    "a nested end": ([span("a", 0, NESTED)], "not of one stretch of tokens after the other"),
    "a mapping": ({"a": 3}, "the weight versions are dict, not a list of spans"),
}


@pytest.mark.parametrize(("value", "expected"), WRONG_VERSIONS.values(), ids=WRONG_VERSIONS)
def test_wrong_versions_are_named(value: Any, expected: str) -> None:
    """One line each."""
    with pytest.raises(CaptureError, match=expected):
        read_versions(value, 3)


SAMPLED = {"token_ids": [7, 30], "finish_reason": "stop"}
MASKED = {"logprobs": [HALF, 0.0], "sampling_mask": [[7, 8], [30]]}
TOLD = {"weight_versions": [span("a", 0, 1), span("b", 1, 2)]}
OUTPUTS: dict[str, Any] = {
    "plain": SAMPLED | MASKED | TOLD | {"routed_experts": EXPERTS},
    "vLLM": SimpleNamespace(outputs=[SimpleNamespace(**SAMPLED, **MASKED, **TOLD, routed_experts=EXPERTS)]),
    "vLLM's server": {"choices": [SAMPLED | MASKED | TOLD | {"routed_experts": npy(EXPERTS.astype(np.uint8))}]},
    "SGLang": {
        "output_ids": [7, 30],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 7, None], [-1.0, 30, None]],
            "output_token_sampling_mask": [[7, 8], [30]],
            "output_token_sampling_logprobs": [HALF, 0.0],
            **TOLD,
            "routed_experts": base64_of(EXPERTS.astype("<i4").tobytes()),
        },
    },
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_they_reach_the_row(make_prompt: Callable[..., Prompt], output: Any) -> None:
    """From every engine; where they are not stored they are not even read."""
    (sampled,) = read_outputs(output, truncates=True, vocab_size=100, capture="native")
    request = SampleRequest(make_prompt(1), 0)  # two prompt tokens
    made = completion_of(
        request, sampled, replayable=True, support_logprobs=False, text=None, extras=Extras(True, LAYOUT)
    )
    assert find_problem(made, 100) is None
    assert made.weight_versions == WeightVersions(("a", "b"), (0, 1))
    assert made.routed_experts is not None
    np.testing.assert_array_equal(made.routed_experts, EXPERTS)
    without = completion_of(request, sampled, replayable=True, support_logprobs=False, text=None)
    assert (without.weight_versions, without.routed_experts) == (None, None)


def test_nonsense_that_is_not_stored_does_no_harm(make_prompt: Callable[..., Prompt]) -> None:
    """It stays as it came."""
    output = SAMPLED | MASKED | {"weight_versions": 7, "routed_experts": "%"}
    (sampled,) = read_outputs(output, truncates=True, vocab_size=100, capture="native")
    completion_of(SampleRequest(make_prompt(1), 0), sampled, replayable=True, support_logprobs=False, text=None)


@pytest.mark.parametrize(
    ("stored", "offered", "missing"),
    [
        pytest.param(Extras(), Extras(True, LAYOUT), None, id="nothing stored"),
        pytest.param(Extras(True, LAYOUT), Extras(True, LAYOUT), None, id="all of it"),
        pytest.param(Extras(True), Extras(), "weight versions", id="no versions"),
        pytest.param(Extras(False, LAYOUT), Extras(), "routed experts, 2 in each of 2 layers", id="no experts"),
        pytest.param(
            Extras(False, LAYOUT),
            Extras(False, LAYOUT.model_copy(update={"layers": 3})),
            "routed experts, 2 in each of 2 layers",
            id="another model",
        ),
        pytest.param(
            Extras(False, LAYOUT), Extras(False, LAYOUT.model_copy(update={"experts": None})), None, id="fewer words"
        ),
    ],
)
def test_what_an_engine_lacks(stored: Extras, offered: Extras, missing: str | None) -> None:
    """In words; how many experts a layer has need not be known."""
    assert stored.missing(offered) == missing


def test_what_a_dataset_stores(make_manifest: Callable[..., Manifest]) -> None:
    """As its manifest says."""
    assert Extras.of(make_manifest()) == Extras()
    assert Extras.of(make_manifest(weight_versions=True, routed_experts=LAYOUT)) == Extras(True, LAYOUT)
