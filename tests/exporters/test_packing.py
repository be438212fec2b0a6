"""Samples into bins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.exporters.packing import pack


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_everything_once_and_nothing_too_long(lengths: list[int], ranks: int) -> None:
    """Bins are no longer than the capacity, come by falling length, and go evenly into the ranks where they can."""
    bins = pack(lengths, 50, ranks)
    assert sorted(place for members in bins for place in members) == list(range(len(lengths)))
    tokens = [sum(lengths[place] for place in members) for members in bins]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] <= 50
    assert len(bins) % ranks == 0 or all(len(members) == 1 for members in bins)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_is_first_fit_decreasing(lengths: list[int]) -> None:
    """The plain definition: the first bin that has room, one sample at a time."""
    bins: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        room = (members for members in bins if sum(lengths[at] for at in members) + lengths[place] <= 50)
        if (members := next(room, None)) is None:
            bins.append(members := [])
        members.append(place)
    assert sorted(pack(lengths, 50, 1)) == sorted(bins)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(1, [[3, 1], [0, 2]], id="first fit, the longest first"),  # 7 + 3 and 5 + 4 fill two bins of 10
        pytest.param(3, [[0, 2], [3], [1]], id="the fullest is halved for three ranks"),
    ],
)
def test_a_case_by_hand(ranks: int, expected: list[list[int]]) -> None:
    """Four samples into bins of ten."""
    assert pack([5, 3, 4, 7], 10, ranks) == expected
