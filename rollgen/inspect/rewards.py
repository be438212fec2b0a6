"""Figures of the rewards of a dataset: how many samples have one, and how many prompts tell a trainer anything.

A reward counts if it is in force, its sample is current, and its tokens are those that are stored. For that the ids of
all tokens are read, of datasets that have rewards at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from rollgen.format.keys import Keys, read_rows
from rollgen.format.rewards import reward_names, rewards_in_force, stored_checksums
from rollgen.rollouts import REWARD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollgen.format.reader import StoredDataset
    from rollgen.format.rewards import Rewards
    from rollgen.rollouts import Int64Array


BARS: Final = 20
"""Of a histogram of rewards, at most."""


@dataclass(frozen=True, slots=True)
class RewardBar:
    """Samples with a reward of `low` to `high`, both included: of the same reward, or of a range of them."""

    low: float
    high: float
    samples: int


@dataclass(frozen=True, slots=True)
class RewardFigures:
    """A summary of rewards: at least one."""

    mean: float
    std: float
    """Of all of them, with n in the denominator."""
    min: float
    max: float
    prompts: int
    """With at least one."""
    equal_prompts: int
    """Of these, those whose rewards are all the same: no advantage, and so no gradient."""
    bars: tuple[RewardBar, ...]
    """A histogram: one for each reward where there are few of them, else of equal width."""


@dataclass(frozen=True, slots=True)
class RewardStats:
    """The rewards of one name."""

    name: str
    scorer: str
    """`module:function`, or the name of a built-in one. Data: escape it before it is shown."""
    scored: int
    """Current samples with a reward."""
    not_scored: int
    """Current samples without: not tried, tried in vain, or made again since."""
    figures: RewardFigures | None
    """None when no sample has one."""
    further: tuple[str, ...]
    """Names of further values that the scorer gave."""


def stored_rewards(dataset: StoredDataset) -> dict[str, Rewards]:
    """Those in force now, by name: a rescoring may end at any time, and what is told of them is to be of one scorer.

    Raises DatasetError for damage.
    """
    directory, config_digest = dataset.directory, dataset.manifest.config_digest
    return {name: rewards_in_force(directory, name, config_digest, None) for name in reward_names(directory)}


def reward_stats(dataset: StoredDataset, stored: Mapping[str, Rewards]) -> tuple[RewardStats, ...]:
    """Of each name. Raises DatasetError for damage."""
    if not stored:
        return ()
    rows = read_rows(dataset.shards)
    current = rows.current()
    keys, checksums = rows.keys.take(current), stored_checksums(dataset.shards)[current]
    return tuple(_stats(name, rewards, keys, checksums) for name, rewards in stored.items())


def _stats(name: str, rewards: Rewards, keys: Keys, checksums: Int64Array) -> RewardStats:
    values = rewards.of(keys, checksums)[REWARD]
    there = ~np.isnan(values)
    return RewardStats(
        name=name,
        scorer=rewards.scorer.function if rewards.scorer else "",
        scored=int(there.sum()),
        not_scored=int((~there).sum()),
        figures=_figures(values[there], keys.prompt_index[there]) if there.any() else None,
        further=tuple(column for column in rewards.values if column != REWARD),
    )


def _figures(values: npt.NDArray[np.float64], prompts: Int64Array) -> RewardFigures:
    order = np.argsort(prompts, kind="stable")
    first = np.unique(prompts[order], return_index=True)[1]
    ordered = values[order]
    equal = np.minimum.reduceat(ordered, first) == np.maximum.reduceat(ordered, first)
    return RewardFigures(
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        max=float(values.max()),
        prompts=len(first),
        equal_prompts=int(equal.sum()),
        bars=tuple(_bars(values)),
    )


def _bars(values: npt.NDArray[np.float64]) -> Iterator[RewardBar]:
    distinct, counts = np.unique(values, return_counts=True)
    lows = highs = distinct
    if len(distinct) > BARS:
        edges = np.linspace(distinct[0], distinct[-1], BARS + 1)  # some may be the same: numpy's histogram refuses that
        counts = np.bincount(np.searchsorted(edges[1:-1], values, side="right"), minlength=BARS)
        lows, highs = edges[:-1], edges[1:]
    for low, high, samples in zip(lows.tolist(), highs.tolist(), counts.tolist(), strict=True):
        yield RewardBar(low, high, samples)
