"""One prompt by itself: what is not tested through `RolloutWriter.request`."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.prompts.single import id_number


@pytest.mark.parametrize(("prompt_id", "number"), [("a", 7299139317422481125)])
def test_number_of_an_id(prompt_id: str, number: int) -> None:
    """The test vector of schema/SPEC.md: sha256("a") begins with ca978112ca1bbdca."""
    assert id_number(prompt_id) == number == 0xCA978112CA1BBDCA >> 1


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_numbers_fit_the_column(prompt_id: str) -> None:
    """63 bits: an int64 that is never negative."""
    number = id_number(prompt_id)
    assert 0 <= number < 2**63
    assert number == int(hashlib.sha256(prompt_id.encode()).hexdigest()[:16], 16) // 2
