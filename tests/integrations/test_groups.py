"""Groups of stored samples and the order of an epoch, on numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rollgen.integrations.groups import GroupSampler, group_samples

# Samples as they may lie in shards: 0, 2 and 1 of prompt 9, 1 and 0 of prompt 3, 0 of prompt 7.
PROMPTS = np.array([9, 3, 9, 7, 3, 9])
NUMBERS = np.array([0, 1, 2, 0, 0, 1])


@pytest.mark.parametrize(
    ("size", "groups", "left_out", "uneven"),
    [
        pytest.param(1, [[4], [1], [3], [0], [5], [2]], [], 0, id="one"),
        pytest.param(2, [[4, 1], [0, 5]], [3, 2], 2, id="two"),
        pytest.param(3, [[0, 5, 2]], [4, 1, 3], 2, id="three"),
        pytest.param(4, [], [4, 1, 3, 0, 5, 2], 3, id="none"),
    ],
)
def test_groups_are_of_one_prompt_in_order(
    size: int, groups: list[list[int]], left_out: list[int], uneven: int
) -> None:
    """Prompts by number, their samples by number; what fills no group is told."""
    found = group_samples(PROMPTS, NUMBERS, size)
    assert found.samples.shape == (len(groups), size)
    assert found.samples.tolist() == groups
    assert (found.left_out.tolist(), found.uneven_prompts) == (left_out, uneven)


def sampler(*, shuffle: bool, epoch: int = 0, seed: int = 0, repeats: int = 1) -> GroupSampler:
    """Seven groups (0, 10), (1, 11), ..., three to a batch."""
    groups = np.array([[number, 10 + number] for number in range(7)])
    return GroupSampler(groups, batch_groups=3, repeats=repeats, shuffle=shuffle, seed=seed, epoch=lambda: epoch)


def test_batches_are_repeated_and_the_rest_left_out() -> None:
    """Groups 0 to 2 twice, then 3 to 5 twice; group 6 fills no batch."""
    once = [0, 10, 1, 11, 2, 12], [3, 13, 4, 14, 5, 15]
    order = sampler(shuffle=False, repeats=2)
    assert list(order) == [*once[0], *once[0], *once[1], *once[1]]
    assert len(order) == 24


def test_shuffled_epochs_differ_and_can_be_had_again() -> None:
    """Groups stay together; an epoch's order depends on its number and the seed, on nothing that came before."""
    first = list(sampler(shuffle=True))
    assert first == list(sampler(shuffle=True)) != list(sampler(shuffle=True, epoch=1))
    assert first != list(sampler(shuffle=True, seed=1))
    numbers = first[::2]
    assert first[1::2] == [10 + number for number in numbers]
    assert len(set(numbers)) == 6


def test_the_epoch_is_asked_for_when_it_begins() -> None:
    """Not when the sampler is made: one sampler serves all epochs."""
    epochs = iter([3, 4])
    groups = np.arange(20).reshape(10, 2)
    one = GroupSampler(groups, batch_groups=1, repeats=1, shuffle=True, seed=5, epoch=lambda: next(epochs))
    assert list(one) != list(one)
