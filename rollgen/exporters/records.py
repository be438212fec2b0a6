"""`Records`: the samples of a dataset as an exporter takes them, whole prompt groups in stored order, with advantages.

Nothing is made anew here: row groups are read, verified and decoded as the loader does it, and rows gathered as numpy
CSR arrays, so that no loop and no Python object is needed for a token. Rewards and advantages are those of all samples
(16 bytes each); of tokens only one block is in memory, beside the row groups that it is gathered from and those that
were read last (256 MB at most).

Of a sample that was made again only the latest generation is there, and a group comes at the place of its first row.
Rows that cannot be replayed are refused unless they are asked for, and so are advantages over groups of which a part is
yet to be made.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rollgen.errors import UsageError
from rollgen.exporters.owed import OwedSamples, owed_of
from rollgen.format.manifest import Manifest
from rollgen.format.reader import read_columns
from rollgen.format.rewards import ScorerRecord
from rollgen.format.row_groups import OpenShards, RowGroupCache
from rollgen.loader.index import open_index
from rollgen.loader.order import samples_of, units_of
from rollgen.loader.places import place_of
from rollgen.loader.samples import RUN, SCALARS, VERSIONS, Samples, gather, offsets_of
from rollgen.ops import group_advantages
from rollgen.ops.advantages import AdvantageKind
from rollgen.rollouts import LARGEST_REWARD

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array, Int64Array

    Float64Array = npt.NDArray[np.float64]

BLOCK_TOKENS: Final = 1 << 18
"""Prompt and response tokens after which a block ends, once its last group is whole: some 20 MB."""
BLOCK_BYTES: Final = 1 << 26
"""The same, where supports, experts or texts make more of them."""
LISTS: Final = ("prompt_token_ids", "token_ids", "logprobs", "sampling_mask")
"""Columns of tokens that every dataset has."""
ALL_COLUMNS: Final = (*LISTS, *SCALARS, "support_logprobs", VERSIONS, RUN, "reward", "advantage")
"""What a file for any tool has of a dataset, experts apart."""
_NULLABLE: Final = ("stop_reason", "text", "prompt", "metadata")
_TEXTS: Final = ("text", "prompt", "metadata")


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """B samples: whole groups, one after the other, each in the order of sample_index."""

    samples: Samples
    """With the columns of SCALARS, and the optional ones that the dataset stores."""
    group: Int64Array
    """int64 [B], rising: the number of each sample's prompt, counted from 0 over the whole export."""
    reward: Float64Array | None
    """float64 [B]; None when no reward was named."""
    advantage: Float64Array | None
    """float64 [B]; None when no reward was named, or the trainer makes advantages of it."""

    def __len__(self) -> int:
        return len(self.group)


class Records:
    """All samples of a dataset, by group.

    `reward` names a stored reward; `advantages` is how they become advantages, a `kind` of `ops.group_advantages`, or
    None for a trainer that makes its own. With `routed_experts` blocks have those of their tokens.

    Raises DatasetError when there is no complete, undamaged dataset, and UsageError when it holds no sample, when it
    holds samples that cannot be replayed (unless `allow_unreplayable`), when a sample has no such reward, when rewards
    are of prompts of which some samples are owed, or may be (unless `allow_incomplete`), when an advantage is larger
    than float32 goes, and when the experts that are asked for are not stored.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        reward: str | None = None,
        advantages: AdvantageKind | None = "mean",
        allow_unreplayable: bool = False,
        allow_incomplete: bool = False,
        routed_experts: bool = False,
    ) -> None:
        place = place_of(path)
        self._index = open_index(
            [place], allow_unreplayable=allow_unreplayable, rewards=() if reward is None else (reward,)
        )
        if not len(self._index):
            raise UsageError(f"{os.fspath(path)}: holds no sample")
        self._scalars = self._index.scalars(SCALARS)
        self._routed_experts = routed_experts
        self.manifest: Manifest = self._index.datasets[0].manifest
        if routed_experts and self.manifest.routed_experts is None:
            raise UsageError("--option routed_experts: the dataset stores none; leave that option out")
        units = units_of(self._index, group_by_prompt=True)
        order = np.argsort(units.home, kind="stable")
        self._chosen = samples_of(units, order)
        self.group_sizes: Int64Array = np.diff(units.offsets)[order]
        """int64 [G], samples of each group."""
        self._offsets = offsets_of(self.group_sizes)
        self._group = np.repeat(np.arange(len(self.group_sizes)), self.group_sizes)
        self.owed: OwedSamples = owed_of(self._index, place)
        """What is yet to be made."""
        self._reward = self._advantage = None
        if reward is not None and self._index.rewards is not None:
            if not allow_incomplete:
                self.owed.check_groups()
            self._reward = self._index.rewards.values[reward][self._chosen]
            if advantages is not None:
                self._advantage = self._advantages(self._reward, advantages)
        self.lengths: Int32Array = self._index.tokens[self._chosen]
        """int32 [S], prompt and response tokens of each sample."""
        self.filled: Counter[str] = Counter()
        """By column, of the samples that were handed out so far: how many have a value that says something."""

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def scorer(self) -> ScorerRecord | None:
        """Who computed the reward; None when none was named."""
        rewards = self._index.rewards
        return None if rewards is None else next(iter(rewards.scorers.values()))

    def fingerprint(self) -> str:
        """SHA-256 of what is handed out: shards, rows and lengths."""
        return self._index.fingerprint()

    def columns(self, *names: str) -> dict[str, npt.NDArray[Any]]:
        """Narrow columns of all samples, [S], read now."""
        rows, tables = self._index.rows[self._chosen], []
        for stored in self._index.shards:
            with stored.part(names).open() as shard:
                tables.append(read_columns(shard, names))
        return {name: np.concatenate([table[name].to_numpy() for table in tables])[rows] for name in names}

    def prompt_id(self, sample: int) -> str:
        """Of one of the S samples, to name it."""
        (group,), (row,) = self._index.locate(self._chosen[sample : sample + 1])
        with closing(OpenShards()) as shards:
            return str(self._loader(shards)(int(group)).scalars["prompt_id"][row])

    def blocks(self, groups: int | None = None) -> Iterator[Block]:
        """Every sample once: `groups` groups a block (the last one may have fewer), or what the bounds above allow.

        Raises DatasetError for a row group that is damaged.
        """
        with closing(OpenShards()) as shards:
            row_groups = RowGroupCache(self._loader(shards))
            for rows in self._rows_of_blocks(row_groups, groups):
                block = self._block(row_groups, rows)
                self.filled.update(self._filled(block))
                yield block

    def _rows_of_blocks(self, row_groups: RowGroupCache[Samples], groups: int | None) -> Iterator[slice]:
        """Of each block, the samples: whole groups."""
        count = len(self.group_sizes)
        if groups is not None:
            for first in range(0, count, groups):
                yield slice(*self._offsets[[first, min(first + groups, count)]].tolist())
            return
        tokens = np.add.reduceat(self.lengths, self._offsets[:-1], dtype=np.int64)
        for start, stop in pieces(tokens, BLOCK_TOKENS):
            offsets = self._offsets[start : stop + 1]
            sizes = self._row_bytes(row_groups, slice(*offsets[[0, -1]].tolist()))
            of_groups = np.add.reduceat(sizes, offsets[:-1] - offsets[0])
            for first, end in pieces(of_groups, BLOCK_BYTES):
                yield slice(*offsets[[first, end]].tolist())

    def _row_bytes(self, row_groups: RowGroupCache[Samples], rows: slice) -> Int64Array:
        """int64 [rows], see `row_bytes`, one row group after the other."""
        group, row = self._index.locate(self._chosen[rows])
        sizes = np.zeros(len(group), np.int64)
        for number in np.unique(group).tolist():
            members = group == number
            sizes[members] = row_bytes(row_groups[number])[row[members]]
        return sizes

    def _loader(self, shards: OpenShards) -> Callable[[int], Samples]:
        def load(group: int) -> Samples:
            return self._index.load(
                group, self._scalars, self._routed_experts, lambda part: nullcontext(shards[part]), shards.drop_copy
            )

        return load

    def _block(self, row_groups: RowGroupCache[Samples], rows: slice) -> Block:
        group, row = self._index.locate(self._chosen[rows])
        sources = {number: row_groups[number] for number in np.unique(group).tolist()}
        return Block(
            samples=gather(list(sources.values()), np.searchsorted(list(sources), group), row),
            group=self._group[rows],
            reward=None if self._reward is None else self._reward[rows],
            advantage=None if self._advantage is None else self._advantage[rows],
        )

    def _advantages(self, reward: Float64Array, kind: AdvantageKind) -> Float64Array:
        """float64 [S], all finite as float32, which trainers compute with; groups are whole here."""
        if kind == "leave_one_out" and (alone := self.group_sizes == 1).any():
            prompt_id = self.prompt_id(int(self._offsets[int(alone.argmax())]))
            raise UsageError(
                f"--advantages leave_one_out: {prompt_id!r} has one sample, and so no others to compare it with; take "
                "mean or mean_std"
            )
        advantages: Float64Array = group_advantages(
            torch.from_numpy(reward), torch.from_numpy(self._group), kind
        ).numpy()
        fits = np.abs(advantages) <= LARGEST_REWARD
        if not fits.all():
            sample = int(fits.argmin())
            number = self._index.sample_index[self._chosen[sample]]
            raise UsageError(
                f"{self.prompt_id(sample)!r}, sample {number}: reward {reward[sample]:.6g} makes an advantage of "
                f"{advantages[sample]:.6g}, more than float32 holds, which trainers compute with; make rewards smaller"
            )
        return advantages

    def _filled(self, block: Block) -> dict[str, int]:
        """By column, how many samples have a value; where one may be off or absent, those in which it is not."""
        samples, columns = block.samples, block.samples.scalars
        optional = {name for name, stored in self.manifest.optional_columns.items() if stored}
        computed = {"reward": block.reward, "advantage": block.advantage}
        optional |= {name for name, values in computed.items() if values is not None}
        of_supports = {"sampling_mask", "support_logprobs"} & {*LISTS, *optional}
        off = {
            **dict.fromkeys(of_supports, np.diff(samples.mask_offsets) == 0),
            "generation": columns["generation"] == 0,
            "top_p": columns["top_p"] == 1,
            "min_p": columns["min_p"] == 0,
            "top_k": columns["top_k"] == 0,
            "replayable": columns["replayable"].astype(np.bool_),
            **{name: [value is None for value in columns[name].tolist()] for name in _NULLABLE},
        }
        counts = dict.fromkeys((*LISTS, *SCALARS, *optional), len(block))
        return counts | {name: len(block) - int(np.count_nonzero(absent)) for name, absent in off.items()}


def take(samples: Samples, rows: Sequence[int] | Int64Array) -> Samples:
    """These rows of `samples`, in this order, as samples of their own."""
    chosen = np.asarray(rows, np.int64)
    return gather([samples], np.zeros_like(chosen), chosen)


def row_bytes(samples: Samples) -> Int64Array:
    """int64 [R], of each row: memory of its tokens, supports and experts, and characters of its texts."""
    stored = 1 if samples.support_logprobs is None else 2
    sizes: Int64Array = (
        4 * np.diff(samples.prompt_ids.offsets)
        + 12 * np.diff(samples.token_ids.offsets)
        + 4 * stored * np.diff(samples.mask_offsets)
    )
    if samples.experts is not None:
        sizes = sizes + 2 * np.diff(samples.experts.numbers.offsets)
    for name in _TEXTS:
        sizes = sizes + np.array([len(text or "") for text in samples.scalars[name].tolist()], np.int64)
    return sizes


def pieces(sizes: Int64Array, limit: int) -> Iterator[tuple[int, int]]:
    """First and last (excluded) of runs of `sizes` [N]: none is larger than `limit` by more than its last one."""
    before = offsets_of(sizes)[:-1] // limit
    return pairwise([0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(sizes)])
