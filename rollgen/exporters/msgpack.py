"""MessagePack of arrays of numbers, encoded by numpy: no Python object for an element.

Each function returns one encoded value. All elements of an array have one width: four bytes for floats; for integers
two, or four where one needs them. MessagePack lets a writer choose, and readers take any. Numbers are big-endian behind
a byte that says their type: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NIL: Final = b"\xc0"
_TRUE: Final = 0xC3
_FALSE: Final = 0xC2
_UINT16: Final = 0xCD
_UINT32: Final = 0xCE
_FLOAT32: Final = 0xCA


def array(items: Sequence[bytes]) -> bytes:
    """An array of values that are encoded."""
    return array_header(len(items)) + b"".join(items)


def repeated(runs: Sequence[tuple[bytes, int]]) -> bytes:
    """An array of values that are encoded, each as often as is said."""
    return array_header(sum(count for _, count in runs)) + b"".join(item * count for item, count in runs)


def integers(values: npt.NDArray[Any]) -> bytes:
    """An array of integers from 0 to 2**32 - 1."""
    if values.size and values.max() >= 1 << 16:
        return _typed(values, _UINT32, ">u4")
    return _typed(values, _UINT16, ">u2")


def floats(values: npt.NDArray[np.float32]) -> bytes:
    """An array of float32 numbers."""
    return _typed(values, _FLOAT32, ">f4")


def booleans(values: npt.NDArray[np.bool_]) -> bytes:
    """An array of booleans."""
    return array_header(len(values)) + np.where(values, _TRUE, _FALSE).astype(np.uint8).tobytes()


def text(value: str) -> bytes:
    """A string."""
    content = value.encode()
    if len(content) < 32:
        return bytes([0xA0 | len(content)]) + content
    return _sized(len(content), 0xD9) + content


def binary(content: bytes) -> bytes:
    """Bytes."""
    return _sized(len(content), 0xC4) + content


def _typed(values: npt.NDArray[Any], code: int, dtype: str) -> bytes:
    """A header, and of each element its type and its big-endian value."""
    elements = np.empty(len(values), [("code", np.uint8), ("value", dtype)])
    elements["code"] = code
    elements["value"] = values
    return array_header(len(values)) + elements.tobytes()


def array_header(count: int) -> bytes:
    """What comes before the `count` values of an array."""
    if count < 16:
        return bytes([0x90 | count])
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


def _sized(count: int, code: int) -> bytes:
    """The header of `count` bytes; `code` is that of a length in one byte, after which come those in two and four."""
    if count < 1 << 8:
        return struct.pack(">BB", code, count)
    return struct.pack(">BH", code + 1, count) if count < 1 << 16 else struct.pack(">BI", code + 2, count)
