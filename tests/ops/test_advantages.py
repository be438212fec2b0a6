"""Group advantages: against plain sums in fractions, and cases worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgen.errors import UsageError
from rollgen.ops import group_advantages

EPS = 1e-6


def plainly(rewards: list[float], group: list[int], kind: str) -> list[float]:
    """The definitions, one rollout at a time, without rounding before the root."""
    advantages = []
    for reward, number in zip(map(Fraction, rewards), group, strict=True):
        members = [Fraction(other) for other, of in zip(rewards, group, strict=True) if of == number]
        mean = sum(members) / len(members)
        if kind == "leave_one_out":
            advantages.append(float(reward - (sum(members) - reward) / (len(members) - 1)))
        elif kind == "mean":
            advantages.append(float(reward - mean))
        else:
            variance = sum((each - mean) ** 2 for each in members) / max(1, len(members) - 1)
            advantages.append(float(reward - mean) / (math.sqrt(variance) + EPS))
    return advantages


def test_by_hand() -> None:
    """Rewards 1, 0, 0, 1 of one prompt and 3, 5 of another, interleaved.

    Means are 0.5 and 4; n - 1 standard deviations sqrt(4 * 0.25 / 3) = 1 / sqrt(3) and sqrt(2); the others of the first
    have means 1/3 (for a 1) and 2/3 (for a 0).
    """
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 5.0, 1.0], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 0, 1, 0])
    half, root = 0.5 * math.sqrt(3), 1 / math.sqrt(2)
    wanted = {
        "mean": [0.5, -1, -0.5, -0.5, 1, 0.5],
        "mean_std": [half, -root, -half, -half, root, half],
        "leave_one_out": [2 / 3, -2, -2 / 3, -2 / 3, 2, 2 / 3],
    }
    for kind, values in wanted.items():
        torch.testing.assert_close(
            group_advantages(rewards, group, kind, eps=1e-15), torch.tensor(values, dtype=torch.float64)
        )
    assert group_advantages(rewards, group).tolist() == wanted["mean"]


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=1, max_size=24),
    st.sampled_from(["mean", "mean_std", "leave_one_out"]),
)
def test_is_the_definition(rows: list[tuple[float, int]], kind: str) -> None:
    """To float32, for groups of any size in any order; numbers that do not occur are no groups."""
    group = [number % len(rows) for _, number in rows]
    if kind == "leave_one_out" and any(group.count(number) == 1 for number in group):
        return
    rewards = [reward for reward, _ in rows]
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), kind)
    wanted = torch.tensor(plainly(rewards, group, kind), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    single = group_advantages(torch.tensor(rewards), torch.tensor(group), kind)
    assert single.dtype == torch.float32
    assert single.tolist() == found.float().tolist()


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_equal_rewards_teach_nothing(kind: str) -> None:
    """Exactly 0, though the mean of three times 0.1 is not 0.1 in floating point, and eps is tiny."""
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert group_advantages(rewards, torch.zeros(3, dtype=torch.int64), kind, eps=1e-30).tolist() == [0, 0, 0]


def test_rounding_is_no_advantage() -> None:
    """0.2 is the mean of 0.1, 0.2 and 0.3, from which float64 makes -3e-17; a difference of 1e-12 is one."""
    rewards = torch.tensor([0.1, 0.2, 0.3, 1.0, 1.0 + 1e-12], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1])
    assert group_advantages(rewards, group)[1] == 0
    assert group_advantages(rewards, group)[3:].tolist() == pytest.approx([-5e-13, 5e-13], rel=1e-3)


def test_a_group_of_one() -> None:
    """It is its own mean; it has no others."""
    rewards, group = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1, 0, 0])
    assert group_advantages(rewards, group).tolist() == [0, -0.5, 0.5]
    assert group_advantages(rewards, group, "mean_std")[0] == 0
    with pytest.raises(UsageError, match=r"^leave_one_out: group 1 has one member, .*group_by_prompt=True"):
        group_advantages(rewards, group, "leave_one_out")


def test_an_empty_batch() -> None:
    """As a rank gets when batches run out."""
    nothing = torch.zeros(0)
    for kind in ("mean", "mean_std", "leave_one_out"):
        assert group_advantages(nothing, torch.zeros(0, dtype=torch.int64), kind).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "group", "options", "message"),
    [
        pytest.param([1.0], [0], {"kind": "std"}, "kind must be one of 'mean', 'mean_std'", id="kind"),
        pytest.param([1.0], [0], {"eps": 0.0}, "eps must be above 0", id="eps"),
        pytest.param([1.0], [0], {"eps": "1"}, "eps must be above 0 and finite, not '1'", id="eps as text"),
        pytest.param([1], [0], {}, r"rewards must be float \[B\], not torch.int64", id="integers"),
        pytest.param([[1.0]], [0], {}, r"rewards must be float \[B\]", id="two dimensions"),
        pytest.param([1.0, 2.0], [0], {}, r"group must be int64 \[2\], not torch.int64 \[1\]", id="lengths"),
        pytest.param([1.0], [0.0], {}, r"group must be int64 \[1\], not torch.float32", id="group of floats"),
        pytest.param([1.0, math.nan], [0, 0], {}, "rewards must be finite, one is nan", id="nan"),
        pytest.param([1.0, 2.0], [0, 2], {}, "from 0 to 1 at most, one is 2", id="too large"),
        pytest.param([1.0, 2.0], [0, -1], {}, "from 0 to 1 at most, one is -1", id="negative"),
    ],
)
def test_what_cannot_be(rewards: list[float], group: list[int], options: dict[str, object], message: str) -> None:
    """Refused, not guessed."""
    with pytest.raises(UsageError, match=message):
        group_advantages(torch.tensor(rewards), torch.tensor(group), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_huge_rewards(kind: str) -> None:
    """Up to what float32 holds they are exact: the definition, in the dtype that was given, or refused."""
    rewards = [3e38, -3e38, -1e38, 1.0]
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), kind)
    assert found.tolist() == pytest.approx(plainly(rewards, [0] * 4, kind), rel=1e-12)
    with pytest.raises(UsageError, match=r"rewards must be numbers that float32 can hold, one is 1e\+300"):
        group_advantages(torch.tensor([1e300, 0.0], dtype=torch.float64), torch.tensor([0, 0]), kind)


def test_an_advantage_that_does_not_fit() -> None:
    """The mean is -1.5e38, so it is 4.5e38; float32 ends at 3.4e38."""
    with pytest.raises(UsageError, match=r"the advantage of a reward of 3e\+38 is more than torch.float32 holds"):
        group_advantages(torch.tensor([3e38, -3e38, -3e38, -3e38]), torch.zeros(4, dtype=torch.int64))


def test_lists_are_refused() -> None:
    """In words."""
    with pytest.raises(UsageError, match="rewards and group must be tensors, not list and list"):
        group_advantages([1.0], [0])  # type: ignore[arg-type]


def test_no_gradient_comes_through() -> None:
    """An advantage is a constant of the loss."""
    rewards = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not group_advantages(rewards, torch.tensor([0, 0])).requires_grad
