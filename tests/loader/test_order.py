"""The order of an epoch, on indexes without files: complete, reproducible, and packed as a plain loop would pack it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.loader.index import Index
from rollgen.loader.order import BatchSettings, Epoch, Units, last_uses, plan_epoch, samples_of, units_of

MakeIndex = Callable[[list[list[tuple[int, int, int, int]]]], Index]

PLAIN = BatchSettings(
    batch_tokens=20, shuffle=False, seed=0, group_by_prompt=False, bucket_by_length=False, shuffle_window=50
)
every_settings = st.builds(
    BatchSettings,
    batch_tokens=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**70),
    group_by_prompt=st.booleans(),
    bucket_by_length=st.booleans(),
    shuffle_window=st.integers(1, 200),
)
lengths = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=6)


def rows(group_lengths: list[list[int]]) -> list[list[tuple[int, int, int, int]]]:
    """Row groups of samples of these lengths: two datasets of four prompts each, whose samples are far apart."""
    counts: dict[tuple[int, int], int] = {}
    groups = []
    for number, group in enumerate(group_lengths):
        dataset = int(number >= len(group_lengths) / 2)
        keys = [(dataset, place % 4) for place in range(len(group))]
        for key in keys:
            counts[key] = counts.get(key, -1) + 1
        groups.append([(*key, counts[key] * 10 + number, size) for key, size in zip(keys, group, strict=True)])
    return groups


def batches_of(units: Units, epoch: Epoch) -> list[list[int]]:
    """The samples of each batch."""
    return [samples_of(units, epoch.batch(number)).tolist() for number in range(len(epoch))]


def next_fit(tokens: list[int], limit: int) -> list[int]:
    """Edges of batches that are closed by the first unit that does not fit any more."""
    edges, filled = [0], 0
    for place, size in enumerate(tokens):
        if place > edges[-1] and filled + size > limit:
            edges.append(place)
            filled = 0
        filled += size
    return [*edges, len(tokens)]


@settings(max_examples=80)
@given(lengths, every_settings, st.integers(0, 3))
def test_every_sample_once_and_units_whole(
    make_index: MakeIndex, group_lengths: list[list[int]], chosen: BatchSettings, epoch: int
) -> None:
    """Whatever the settings: each sample is in one batch, a group in the same one, a batch is full or one unit."""
    index = make_index(rows(group_lengths))
    units = units_of(index, group_by_prompt=chosen.group_by_prompt)
    plan = plan_epoch(units, chosen, epoch)
    batches = batches_of(units, plan)
    assert sorted(sample for batch in batches for sample in batch) == list(range(len(index)))
    for number, batch in enumerate(batches):
        assert index.tokens[batch].sum() <= chosen.batch_tokens or len(plan.batch(number)) == 1
    if chosen.group_by_prompt:
        homes = [{(int(index.dataset[s]), int(index.prompt_index[s])) for s in batch} for batch in batches]
        assert sum(map(len, homes)) == len(set().union(*homes))
    again = plan_epoch(units, chosen, epoch)
    assert (again.order.tolist(), again.edges.tolist()) == (plan.order.tolist(), plan.edges.tolist())


@settings(max_examples=60)
@given(lengths, every_settings.filter(lambda chosen: not (chosen.shuffle and chosen.bucket_by_length)))
def test_batches_are_cut_like_a_plain_loop(
    make_index: MakeIndex, group_lengths: list[list[int]], chosen: BatchSettings
) -> None:
    """Next-fit over the sequence of units."""
    units = units_of(make_index(rows(group_lengths)), group_by_prompt=chosen.group_by_prompt)
    plan = plan_epoch(units, chosen, 0)
    assert plan.edges.tolist() == next_fit(units.tokens[plan.order].tolist(), chosen.batch_tokens)


@settings(max_examples=40)
@given(lengths, st.integers(1, 60), st.integers(0, 5))
def test_shuffled_buckets_are_cut_before_they_move(
    make_index: MakeIndex, group_lengths: list[list[int]], limit: int, seed: int
) -> None:
    """In a single window: next-fit over the sorted lengths, the batches then in any order."""
    units = units_of(make_index(rows(group_lengths)), group_by_prompt=False)
    chosen = replace(PLAIN, batch_tokens=limit, shuffle=True, seed=seed, bucket_by_length=True, shuffle_window=10**9)
    plan = plan_epoch(units, chosen, 0)
    rising = sorted(units.tokens.tolist())
    expected = [rising[start:stop] for start, stop in pairwise(next_fit(rising, limit))]
    assert sorted(units.tokens[plan.batch(number)].tolist() for number in range(len(plan))) == sorted(expected)


@settings(max_examples=40)
@given(lengths, every_settings)
def test_last_uses(make_index: MakeIndex, group_lengths: list[list[int]], chosen: BatchSettings) -> None:
    """The last batch that holds a sample of each row group, -1 for a row group without samples."""
    index = make_index([*rows(group_lengths), []])
    units = units_of(index, group_by_prompt=chosen.group_by_prompt)
    plan = plan_epoch(units, chosen, 0)
    group_of_sample = index.locate(np.arange(len(index)))[0]
    expected = [-1] * len(index.groups)
    for number, batch in enumerate(batches_of(units, plan)):
        for sample in batch:
            expected[group_of_sample[sample]] = number
    assert last_uses(units, plan, group_of_sample, len(index.groups)).tolist() == expected


def test_stored_order_without_shuffling(make_index: MakeIndex) -> None:
    """Batches of 20 tokens, cut from 9, 9, 9 | 12, 25, 3: 9 + 9, 9, 12, 25 (alone, too large), 3."""
    index = make_index([[(0, 0, k, 9) for k in range(3)], [(0, 1, k, size) for k, size in enumerate((12, 25, 3))]])
    units = units_of(index, group_by_prompt=False)
    assert batches_of(units, plan_epoch(units, PLAIN, 0)) == [[0, 1], [2], [3], [4], [5]]
    assert batches_of(units, plan_epoch(units, PLAIN, 7)) == [[0, 1], [2], [3], [4], [5]]


def test_groups_are_by_dataset_and_prompt(make_index: MakeIndex) -> None:
    """Prompt 0 of two datasets is two prompts; samples of a group are in the order of their numbers."""
    index = make_index([[(0, 0, 2, 5), (0, 1, 0, 5)], [(0, 0, 1, 5)], [(1, 0, 0, 5), (1, 0, 3, 5)]])
    units = units_of(index, group_by_prompt=True)
    assert [samples_of(units, np.array([unit])).tolist() for unit in range(3)] == [[2, 0], [1], [3, 4]]
    assert units.tokens.tolist() == [10, 5, 10]
    assert units.home.tolist() == [1, 0, 2]


@pytest.mark.parametrize("group_by_prompt", [False, True])
def test_no_samples_no_batches(make_index: MakeIndex, group_by_prompt: bool) -> None:
    """An index of nothing plans an epoch of nothing."""
    units = units_of(make_index([]), group_by_prompt=group_by_prompt)
    for shuffle in (False, True):
        assert len(plan_epoch(units, replace(PLAIN, shuffle=shuffle, bucket_by_length=shuffle), 0)) == 0


def spread(make_index: MakeIndex, groups: int = 10, size: int = 20) -> Index:
    """Row groups of `size` samples with lengths 1 to 60, drawn with a fixed seed."""
    drawn = np.random.default_rng(5).integers(1, 60, (groups, size)).tolist()
    return make_index([[(0, g * size + i, 0, drawn[g][i]) for i in range(size)] for g in range(groups)])


def test_shuffling_depends_on_seed_and_epoch(make_index: MakeIndex) -> None:
    """Each pair has an order of its own, and none is the stored one."""
    units = units_of(spread(make_index), group_by_prompt=False)
    chosen = replace(PLAIN, shuffle=True)
    orders = [plan_epoch(units, replace(chosen, seed=seed), epoch).order for seed in (0, 1) for epoch in (0, 1)]
    orders.append(plan_epoch(units, PLAIN, 0).order)
    assert len({tuple(order.tolist()) for order in orders}) == 5


def test_a_batch_needs_row_groups_of_one_window(make_index: MakeIndex) -> None:
    """Windows of 1,200 tokens are two or three row groups of about 600: no more are mixed at any time."""
    index = spread(make_index)
    units = units_of(index, group_by_prompt=False)
    plan = plan_epoch(units, replace(PLAIN, shuffle=True, shuffle_window=1200, batch_tokens=300), 0)
    group_of_sample = index.locate(np.arange(len(index)))[0]
    first = np.full(10, len(plan))
    for number, batch in enumerate(batches_of(units, plan)):
        for group in group_of_sample[batch]:
            first[group] = min(first[group], number)
    last = last_uses(units, plan, group_of_sample, 10)
    alive = [int(((first <= number) & (number <= last)).sum()) for number in range(len(plan))]
    assert max(alive) <= 5  # a batch at a border touches two windows
    everywhere = plan_epoch(units, replace(PLAIN, shuffle=True, shuffle_window=10**9, batch_tokens=300), 0)
    assert (last_uses(units, everywhere, group_of_sample, 10) >= len(everywhere) // 2).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_buckets_lessen_padding(make_index: MakeIndex, shuffle: bool) -> None:
    """Padding is the longest of each batch times its size less its tokens; sorted by length it all but goes."""
    index = spread(make_index)
    units = units_of(index, group_by_prompt=False)
    padding = {}
    for bucket in (False, True):
        chosen = replace(PLAIN, shuffle=shuffle, bucket_by_length=bucket, shuffle_window=10**6, batch_tokens=300)
        sizes = [index.tokens[batch] for batch in batches_of(units, plan_epoch(units, chosen, 0))]
        padding[bucket] = sum(int(size.max()) * len(size) - int(size.sum()) for size in sizes)
    assert padding[True] < padding[False] / 5


def test_shuffled_buckets_do_not_come_by_length(make_index: MakeIndex) -> None:
    """A run of ever longer batches would be a curriculum that nobody asked for."""
    index = spread(make_index)
    units = units_of(index, group_by_prompt=False)
    chosen = replace(PLAIN, shuffle=True, bucket_by_length=True, shuffle_window=10**6, batch_tokens=300)
    longest = [int(index.tokens[batch].max()) for batch in batches_of(units, plan_epoch(units, chosen, 0))]
    rises = sum(one < other for one, other in pairwise(longest))
    assert 0.25 < rises / len(longest) < 0.75


@pytest.mark.parametrize("limit", [10**9, 2**63 - 1, 2**80])
def test_limits_without_bound(make_index: MakeIndex, limit: int) -> None:
    """One batch of everything, also where tokens and limit together pass 64 bits."""
    units = units_of(make_index([[(0, 0, k, 9) for k in range(3)]] * 2), group_by_prompt=False)
    assert batches_of(units, plan_epoch(units, replace(PLAIN, batch_tokens=limit), 0)) == [[0, 1, 2, 3, 4, 5]]


GOLDEN = {
    "samples": ({}, [[10, 11, 7], [2, 8, 3, 0], [6, 5, 4], [1, 9, 15], [14, 13, 12]]),
    "buckets": ({"bucket_by_length": True}, [[8, 11, 2], [0, 9, 3, 4, 7], [1, 5], [6, 10], [14, 15], [12, 13]]),
    "groups": ({"group_by_prompt": True}, [[1, 5, 9, 13], [0, 4, 8, 12], [2, 6, 10, 14], [3, 7, 11, 15]]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_order_is_pinned(make_index: MakeIndex, name: str) -> None:
    """A saved state is a place in this order: when this test fails, `STATE_VERSION` has to change too."""
    changes, expected = GOLDEN[name]
    index = make_index(
        [[(0, place % 4, group, 3 + (5 * place + group) % 7) for place in range(4)] for group in range(4)]
    )
    units = units_of(index, group_by_prompt=name == "groups")
    chosen = replace(PLAIN, shuffle=True, seed=3, **changes)
    assert batches_of(units, plan_epoch(units, chosen, 1)) == expected
