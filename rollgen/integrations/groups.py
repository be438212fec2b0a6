"""Stored samples as the groups that GRPO compares, and the order in which a trainer reads them.

A group is `size` samples of one prompt, in the order of their numbers; a prompt with twice as many samples is two
groups. Samples that fill none are counted, so that whoever leaves them out can say so. Plain numbers: nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array


class Groups(NamedTuple):
    """What S samples make."""

    samples: Int64Array
    """int64 [G, size], the samples of each group; prompts in the order of the plan."""
    left_out: Int64Array
    """int64 [R], the samples that fill no group."""
    uneven_prompts: int
    """Prompts that these are of."""


def group_samples(prompt_index: npt.NDArray[np.integer], sample_index: npt.NDArray[np.integer], size: int) -> Groups:
    """Groups of `size`; both arrays are [S], sample i being number `sample_index[i]` of prompt `prompt_index[i]`."""
    order = np.lexsort((sample_index, prompt_index))
    _, starts, counts = np.unique(prompt_index[order], return_index=True, return_counts=True)
    place = np.arange(len(order)) - np.repeat(starts, counts)
    used = place < np.repeat(counts // size * size, counts)
    return Groups(order[used].reshape(-1, size), order[~used], int((counts % size > 0).sum()))


class GroupSampler(Sampler[int]):
    """Numbers of samples: `batch_groups` groups at a time, and each such batch `repeats` times before the next one.

    That is the order of TRL's `RepeatSampler`, with the stored samples of a prompt in place of its copies. Groups that
    fill no batch are left out of the epoch. A shuffled order depends on the seed and on the epoch's number, which is
    asked for when the epoch begins: a run that is resumed goes on in the order that it had.
    """

    def __init__(
        self,
        groups: Int64Array,
        *,
        batch_groups: int,
        repeats: int,
        shuffle: bool,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        self._groups = groups
        self._batch_groups = batch_groups
        self._batches = len(groups) // batch_groups
        self._repeats = repeats
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = epoch

    def __len__(self) -> int:
        return self._batches * self._batch_groups * self._repeats * int(self._groups.shape[1])

    def __iter__(self) -> Iterator[int]:
        order = self._order(self._epoch())[: self._batches * self._batch_groups]
        for batch in order.reshape(self._batches, self._batch_groups):
            samples = self._groups[batch].flatten().tolist()
            for _ in range(self._repeats):
                yield from samples

    def _order(self, epoch: int) -> Int64Array:
        """int64 [G]"""
        if not self._shuffle:
            return np.arange(len(self._groups))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
