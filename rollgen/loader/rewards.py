"""Rewards beside the samples that a loader hands out: joined by key when a dataset is opened, no loop over samples.

`"correct"` is the reward of that name, `"correct.format"` a further value that its scorer gave. All samples that are
handed out must have them, else a trainer would learn from numbers that nobody gave. They are held in memory, 16 bytes
for each sample and name. When a row group is read, the CRC-32 of its tokens must be that of the tokens that were
scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollgen.errors import UsageError
from rollgen.format.reader import StoredDataset
from rollgen.format.rewards import (
    UNREWARDABLE,
    Rewards,
    ScorerRecord,
    is_name,
    reward_names,
    rewards_in_force,
    token_checksums,
)
from rollgen.loader.samples import Samples
from rollgen.remote.objects import ObjectStore
from rollgen.rollouts import REWARD

if TYPE_CHECKING:
    from rollgen.format.keys import Keys
    from rollgen.loader.index import Index
    from rollgen.loader.places import Place
    from rollgen.rollouts import Int64Array

    Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRewards:
    """Of the S samples of an index."""

    values: dict[str, Float64Array]
    """float64 [S] by the names that were asked for, all finite."""
    checksums: dict[str, Int64Array]
    """int64 [S] by the names of rewards: of the tokens that were scored."""
    scorers: dict[str, ScorerRecord]
    """By the names of rewards: who computed them."""

    def fingerprints(self, order: Int64Array) -> dict[str, str]:
        """By the names that were asked for, SHA-256 of the values and of the tokens' checksums, [S] in this order.

        Not of who gave them: what a rescoring leaves as it was, trains as it did.
        """
        return {
            name: hashlib.sha256(
                values[order].tobytes() + self.checksums[_column_of(name)[0]][order].tobytes()
            ).hexdigest()
            for name, values in self.values.items()
        }

    def attached(self, samples: Samples, rows: Int64Array, numbers: slice, place: str) -> Samples:
        """A row group, with the rewards of these `rows` of it, which are the samples of these `numbers`.

        Other rows have NaN, and are not handed out. Raises UsageError, naming `place`, when tokens have changed: the
        samples have no reward then, which is no damage that a stream may skip.
        """
        checksums = token_checksums(samples.token_ids)[rows]
        for name, wanted in self.checksums.items():
            changed = int((checksums != wanted[numbers]).sum())
            if changed:
                raise UsageError(
                    f"{place}: {changed} samples were made again since rewards {name!r} were; `rollgen score` scores "
                    "them again"
                )
        values = {name: np.full(len(samples), np.nan) for name in self.values}
        for name, column in values.items():
            column[rows] = self.values[name][numbers]
        return replace(samples, rewards=values)


def names_of(rewards: str | Sequence[str] | None) -> tuple[str, ...]:
    """As callers give them: one name, several, or none. Raises UsageError for anything else."""
    given = () if rewards is None else (rewards,) if isinstance(rewards, str) else rewards
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise UsageError("rewards must be a name like 'correct' or 'correct.format', or a list of such names")
    return tuple(given)


def with_rewards(index: Index, places: Sequence[Place], names: Sequence[str]) -> Index:
    """An index of the datasets in `places`, with the rewards of these names; for no names, as it is.

    Raises UsageError for a name that a dataset has not or that two scorers gave, when samples have no reward, with the
    command that gives them one, and for a dataset in object storage; DatasetError for damage.
    """
    if not names:
        return index
    for place in places:
        if isinstance(place, ObjectStore):
            raise UsageError(f"{place.url}: rewards are not read from object storage; copy the dataset here")
    if not len(index):
        return index
    columns = {name: _column_of(name) for name in names}
    of_dataset = [np.flatnonzero(index.dataset == number) for number in range(len(index.datasets))]
    values = {name: np.full(len(index), np.nan) for name in columns}
    checksums = {name: np.zeros(len(index), np.int64) for name, _ in columns.values()}
    scorers: dict[str, ScorerRecord] = {}
    for name, checksum in checksums.items():
        wanted = {each: column for each, (rewards_name, column) in columns.items() if rewards_name == name}
        for stored, members in zip(index.datasets, of_dataset, strict=True):
            rewards = _read(stored, name, list(wanted.values()))
            assert rewards.scorer is not None  # or `_read` had refused
            if scorers.setdefault(name, rewards.scorer) != rewards.scorer:
                raise UsageError(
                    f"{stored.directory}: its rewards {name!r} are by another scorer than those of "
                    f"{index.datasets[0].directory}; score one of them again with the other's scorer and --rescore"
                )
            keys = index.keys.take(members)
            row = rewards.rows_of(keys)
            there = row >= 0
            checksum[members[there]] = rewards.tokens_crc32[row[there]]
            for each, column in wanted.items():
                values[each][members[there]] = rewards.values[column][row[there]]
                _check_all(values[each][members], keys, each, rewards, stored)
    return replace(index, rewards=SampleRewards(values, checksums, scorers))


def _column_of(name: str) -> tuple[str, str]:
    """Name of the rewards, and the column there."""
    rewards, dot, column = name.partition(".")
    if not is_name(rewards) or bool(dot) != bool(column):
        raise UsageError(f"rewards: {name!r} is no name of rewards; give one like 'correct' or 'correct.format'")
    return rewards, column or REWARD


def _read(stored: StoredDataset, name: str, columns: Sequence[str]) -> Rewards:
    directory = stored.directory
    rewards = rewards_in_force(directory, name, stored.manifest.config_digest, columns)
    if rewards.scorer is None:
        there = ", ".join(reward_names(directory)) or "none"
        raise UsageError(
            f"{directory}: has no rewards {name!r} (there are: {there}); make them with "
            f"`rollgen score {quote(str(directory))} --with MODULE:FUNCTION --name {name}`"
        )
    for column in columns:
        if column not in rewards.values:
            raise UsageError(f"{directory}: the scorer of rewards {name!r} gave no {column!r}")
    return rewards


def _check_all(values: Float64Array, keys: Keys, asked: str, rewards: Rewards, stored: StoredDataset) -> None:
    """Raise UsageError where one is missing."""
    is_missing = np.isnan(values)
    missing = int(is_missing.sum())
    if missing:
        superseded = int((is_missing & keys.superseded()).sum())
        if superseded:
            raise UsageError(
                f"{stored.directory}: {superseded} of {len(values)} samples have no {asked!r}, and get none: a retry "
                "made them again, and only current rows are scored; leave out all_generations, or rewards"
            )
        assert rewards.scorer is not None
        name, _, column = asked.partition(".")
        command = f"`rollgen score {quote(str(stored.directory))} {rewards.scorer.options} --name {name}"
        advice = f"{command}` scores what it can of them"
        if column:
            advice += f"; those that it scored without {column!r}, only `--rescore` scores again"
        raise UsageError(
            f"{stored.directory}: {missing} of {len(values)} samples have no {asked!r}; {advice}; {UNREWARDABLE}"
        )
