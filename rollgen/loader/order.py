"""The order of an epoch: pure functions from the index, the settings and the epoch to global batches.

A *unit* is what stays together: a sample, or all samples of a prompt. Units are shuffled in two steps, so that a batch
needs few row groups: row groups are permuted and joined into windows of some tokens, then the units of a window are
permuted. Batches are cut from that sequence one after the other, each closed before it would exceed its tokens. Ranks,
workers and restarts take no part in it.

Random numbers are raw words of PCG64, sorted: numpy keeps the stream of a bit generator the same in all versions (NEP
19), which it does not promise for `Generator.permutation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rollgen.loader.index import Index
from rollgen.loader.samples import offsets_of

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What, beside the dataset and the epoch, decides about the batches."""

    batch_tokens: int
    """Most prompt and response tokens of a batch, padding not counted; a unit that is larger is a batch of its own."""
    shuffle: bool
    seed: int
    group_by_prompt: bool
    bucket_by_length: bool
    """Units of a window are sorted by length before they are cut into batches, which are then shuffled."""
    shuffle_window: int
    """Tokens among which units are mixed: memory against randomness."""


class Units(NamedTuple):
    """U units of S samples."""

    members: Int64Array
    """int64 [S], the samples of unit u are `members[offsets[u]:offsets[u + 1]]`."""
    offsets: Int64Array
    """int64 [U + 1]"""
    tokens: Int64Array
    """int64 [U]"""
    home: Int64Array
    """int64 [U], the row group of the unit's first sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """The global batches of one epoch."""

    order: Int64Array
    """int64 [U], units in the order in which they come."""
    edges: Int64Array
    """int64 [batches + 1]: batch b has the units `order[edges[b]:edges[b + 1]]`."""

    def __len__(self) -> int:
        return len(self.edges) - 1

    def batch(self, number: int) -> Int64Array:
        """The units of one batch, in order."""
        return self.order[self.edges[number] : self.edges[number + 1]]


def units_of(index: Index, *, group_by_prompt: bool) -> Units:
    """Every sample for itself in stored order, or with all of its prompt, by (dataset, prompt)."""
    samples = np.arange(len(index))
    if not group_by_prompt:
        return Units(samples, np.arange(len(index) + 1), index.tokens.astype(np.int64), index.locate(samples)[0])
    members = np.lexsort((index.sample_index, index.prompt_index, index.dataset))
    same = (np.diff(index.prompt_index[members]) == 0) & (np.diff(index.dataset[members]) == 0)
    firsts = np.flatnonzero(np.concatenate([[True], ~same])) if len(members) else np.zeros(0, np.int64)
    offsets = np.append(firsts, len(members))
    tokens = np.diff(offsets_of(index.tokens[members])[offsets])
    return Units(members, offsets, tokens, index.locate(members[firsts])[0])


def samples_of(units: Units, chosen: Int64Array) -> Int64Array:
    """The samples of these units, one unit after the other."""
    starts = units.offsets[chosen]
    sizes = units.offsets[chosen + 1] - starts
    places = np.arange(int(sizes.sum())) + np.repeat(starts - offsets_of(sizes)[:-1], sizes)
    members: Int64Array = units.members[places]
    return members


def last_uses(units: Units, epoch: Epoch, group_of_sample: Int64Array, groups: int) -> Int64Array:
    """int64 [groups]: the last global batch that needs each row group, -1 for none."""
    sizes = np.diff(units.offsets)[epoch.order]
    batch_of_unit = np.repeat(np.arange(len(epoch)), np.diff(epoch.edges))
    uses = np.full(groups, -1, np.int64)
    # In the order of batches: of several values for a place, the last one stays.
    uses[group_of_sample[samples_of(units, epoch.order)]] = np.repeat(batch_of_unit, sizes)
    return uses


def plan_epoch(units: Units, settings: BatchSettings, epoch: int) -> Epoch:
    """Order the units of an epoch and cut them into batches."""
    random = np.random.PCG64([settings.seed, epoch])
    groups = int(units.home.max()) + 1 if len(units.home) else 0
    window = _windows(units, groups, settings, random)[units.home]
    mixed = _keys(len(window), random) if settings.shuffle else np.arange(len(window))
    if settings.bucket_by_length:
        # Up in one window, down in the next: a batch that crosses from one to the other has similar lengths too.
        order = np.lexsort((mixed, np.where(window % 2, -units.tokens, units.tokens), window))
    else:
        order = np.lexsort((mixed, window) if settings.shuffle else (mixed, units.home))
    edges = _cut(units.tokens[order], settings.batch_tokens)
    if settings.shuffle and settings.bucket_by_length:
        order, edges = _shuffle_batches(order, edges, window[order], random)
    return Epoch(order, edges)


def _windows(units: Units, groups: int, settings: BatchSettings, random: np.random.PCG64) -> Int64Array:
    """int64 [groups]: the window that each row group is in, counted in the order in which windows come."""
    tokens = np.bincount(units.home, weights=units.tokens, minlength=groups)
    visits = np.argsort(_keys(groups, random), kind="stable") if settings.shuffle else np.arange(groups)
    windows = np.empty(groups, np.int64)
    before = np.cumsum(tokens[visits]) - tokens[visits]
    windows[visits] = before // settings.shuffle_window
    return windows


def _keys(count: int, random: np.random.PCG64) -> npt.NDArray[np.uint64]:
    return np.asarray(random.random_raw(count), np.uint64)


def _cut(tokens: Int64Array, limit: int) -> Int64Array:
    """Edges of consecutive batches, each as long as fits into `limit`, and one unit at least."""
    ends = offsets_of(tokens)
    # Where a batch that starts at each unit would end; then from one batch's end to the next.
    nexts = np.searchsorted(ends, ends[:-1] + min(limit, int(ends[-1])), side="right") - 1
    nexts = np.maximum(nexts, np.arange(1, len(tokens) + 1)).tolist()
    edges = [0]
    while edges[-1] < len(nexts):
        edges.append(nexts[edges[-1]])
    return np.array(edges, np.int64)


def _shuffle_batches(
    order: Int64Array, edges: Int64Array, window: Int64Array, random: np.random.PCG64
) -> tuple[Int64Array, Int64Array]:
    """Permute the batches that start in the same window."""
    sizes = np.diff(edges)
    batches = np.lexsort((_keys(len(sizes), random), window[edges[:-1]]))
    moved = offsets_of(sizes[batches])
    places = np.arange(len(order)) + np.repeat(edges[:-1][batches] - moved[:-1], sizes[batches])
    return order[places], moved
