"""What newer engines return with a sample beside tokens, logprobs and supports, in the shapes that they give it.

    weight versions  spans with version, start and end: vLLM's WeightVersionSpan, or their JSON, which is SGLang's too;
                     one text where a single version sampled all tokens
    routed experts   numbers of experts, [P + T - 1, layers, top_k]: an array of numpy or torch, nested lists, or the
                     base64 of a .npy file (vLLM's /inference/v1/generate) or of raw int32 (SGLang), which has no shape

Only what a dataset stores is read at all: hundreds of kilobytes a sample stay as they came otherwise. Nothing is
unpickled or evaluated, and no more is decoded than the shape that is expected takes. Raises CaptureError for anything
else.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollgen.engines.shapes import as_array, fields_of
from rollgen.errors import CaptureError
from rollgen.format.manifest import RoutedExperts
from rollgen.format.schema import MAX_EXPERTS
from rollgen.rollouts import WeightVersions

if TYPE_CHECKING:
    from rollgen.rollouts import Int16Array

_NPY_MAGIC: Final = b"\x93NUMPY"
_NPY_HEADER: Final = re.compile(
    _NPY_MAGIC + rb"\x01\x00..\{'descr': '([<>|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}(?:, \d{1,9})*),?\), \} *\n",
    re.DOTALL,
)
"""As numpy writes it, of whole numbers in C order. (numpy's reader evaluates headers, and makes arrays of any size.)"""
_NPY_HEADER_BYTES: Final = 1 << 10
"""At most: 128 for three dimensions."""
_ID_BYTES: Final = 4
"""Of the widest numbers that engines send; vLLM sends 1 or 2."""


def read_versions(value: Any, tokens: int) -> WeightVersions:
    """Which weights sampled which of so many tokens."""
    if value is None:
        raise CaptureError(
            "the dataset stores weight versions, but the output has none: vLLM returns them from 0.32 on"
        )
    spans = [(value, 0, tokens)] if isinstance(value, str) else [*map(_span, _listed(value))]
    end = 0
    for version, start, stop in spans:
        if not (isinstance(version, str) and version and _is_utf8(version)):
            raise CaptureError(f"the weight version of token {end} is no text")
        if start != end or not isinstance(stop, int | np.integer) or stop <= start:
            raise CaptureError(
                f"the weight versions are not of one stretch of tokens after the other: {version!r} starts or ends "
                f"elsewhere than after token {end}"
            )
        end = int(stop)
    if end != tokens:
        raise CaptureError(f"the weight versions are of {end} tokens, but there are {tokens}")
    return WeightVersions(tuple(version for version, _, _ in spans), tuple(int(start) for _, start, _ in spans))


def _listed(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    raise CaptureError(f"the weight versions are {type(value).__name__}, not a list of spans")


def _span(span: Any) -> tuple[Any, Any, Any]:
    field = fields_of(span)
    return field("version"), field("start"), field("end")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def read_experts(value: Any, positions: int, layout: RoutedExperts) -> Int16Array:
    """int16 [positions, layers, top_k], where positions is P + T - 1: the last token never went through the model."""
    if value is None:
        raise CaptureError(
            "the dataset stores routed experts, but the output has none: start vLLM with enable_return_routed_experts"
        )
    shape = (positions, layout.layers, layout.top_k)
    numbers = _decoded(value, int(np.prod(shape))) if isinstance(value, str) else _as_numbers(value)
    if numbers.ndim == 1 and numbers.size == np.prod(shape):
        numbers = numbers.reshape(shape)
    if numbers.shape != shape:
        raise CaptureError(
            f"routed experts are {list(numbers.shape)}, not {list(shape)}: a row for each token of prompt and response "
            f"but the last one, {layout.layers} layers, {layout.top_k} experts each"
        )
    experts = layout.experts or MAX_EXPERTS
    if numbers.dtype.kind not in "iu" or (numbers.size and not 0 <= numbers.min() <= numbers.max() < experts):
        raise CaptureError(f"routed experts are not all numbers from 0 to {experts - 1}")
    return numbers.astype(np.int16)


def _as_numbers(value: Any) -> np.ndarray:
    try:
        return np.asarray(as_array(value))
    except ValueError:
        raise CaptureError("routed experts are no array: their rows differ in length") from None


def _decoded(text: str, size: int) -> np.ndarray:
    """Base64 of a .npy file, or of raw int32; of `size` numbers at most."""
    limit = size * _ID_BYTES + _NPY_HEADER_BYTES
    if len(text) > 4 * limit // 3 + 4:
        raise CaptureError(f"routed experts are {len(text)} characters of base64, more than {size} numbers take")
    try:
        data = base64.b64decode(text, validate=True)
        return _from_npy(data) if data.startswith(_NPY_MAGIC) else np.frombuffer(data, "<i4")
    except ValueError as error:  # binascii.Error is one
        raise CaptureError(f"routed experts are neither a .npy file nor raw int32 in base64: {error}") from None


def read_layout(text: str) -> RoutedExperts:
    """What the numbers mean, as far as the shape of a .npy file in base64 tells it."""
    try:
        _, layers, top_k = _from_npy(base64.b64decode(text, validate=True)).shape
        return RoutedExperts(layers=layers, top_k=top_k, experts=None)
    except ValueError:
        raise CaptureError("routed experts are no .npy file of whole numbers in three dimensions, in base64") from None


def _from_npy(data: bytes) -> np.ndarray:
    """A view of `data`. Raises ValueError."""
    header = _NPY_HEADER.match(data)
    if header is None:
        raise ValueError("not a .npy file of whole numbers in C order, as numpy writes it")
    shape = [int(size) for size in header[2].split(b", ")]
    return np.frombuffer(data, np.dtype(header[1].decode()), offset=header.end()).reshape(shape)
