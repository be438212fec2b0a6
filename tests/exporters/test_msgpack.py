"""MessagePack by numpy, against msgspec, which reads it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.exporters import msgpack

decode = msgspec.msgpack.decode


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_integers(values: list[int]) -> None:
    """Every one that fits into 32 bits."""
    assert decode(msgpack.integers(np.array(values, np.int64)), type=list[int]) == values


@pytest.mark.parametrize(("largest", "width"), [(65_535, 3), (65_536, 5)])
def test_width_of_integers(largest: int, width: int) -> None:
    """A byte for the type and two or four for the value, the same for all; a byte before them says how many."""
    assert len(msgpack.integers(np.array([0, largest]))) == 1 + 2 * width


@given(st.lists(st.floats(width=32)))
def test_floats(values: list[float]) -> None:
    """Bit by bit, NaN and -0.0 too."""
    array = np.array(values, np.float32)
    assert np.array(decode(msgpack.floats(array), type=list[float]), np.float32).tobytes() == array.tobytes()


@given(st.lists(st.booleans()))
def test_booleans(values: list[bool]) -> None:
    """As booleans, not as numbers."""
    assert decode(msgpack.booleans(np.array(values, np.bool_)), type=list[bool]) == values


@pytest.mark.parametrize("length", [0, 31, 32, 255, 256, 65_535, 65_536])
def test_lengths(length: int) -> None:
    """At both sides of every border between one form of a header and the next."""
    assert decode(msgpack.text("x" * length), type=str) == "x" * length
    assert decode(msgpack.binary(b"x" * length), type=bytes) == b"x" * length
    assert decode(msgpack.array([msgpack.NIL] * length)) == [None] * length


def test_text_is_utf_8() -> None:
    """Lengths are in bytes."""
    assert decode(msgpack.text("é" * 20), type=str) == "é" * 20
