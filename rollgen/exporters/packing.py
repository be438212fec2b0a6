"""Samples into bins of bounded length, a whole number of them for each rank: how trainers pack sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int], capacity: int, ranks: int) -> list[list[int]]:
    """First fit decreasing: places in `lengths`, by bin; the fullest bin first. No length may exceed `capacity`.

    Bins are then halved, the fullest first, until `ranks` divides their number or every bin is a single sample.
    """
    bins: list[list[int]] = []
    room = np.full(len(lengths), capacity)
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        found = int(np.argmax(room[: len(bins) + 1] >= lengths[place]))  # the one behind all bins has room for any
        if found == len(bins):
            bins.append([])
        bins[found].append(place)
        room[found] -= lengths[place]

    def tokens(members: list[int]) -> int:
        return sum(lengths[place] for place in members)

    while len(bins) % ranks and (divisible := [members for members in bins if len(members) > 1]):
        fullest = max(divisible, key=tokens)
        bins.remove(fullest)
        bins += [fullest[::2], fullest[1::2]]  # they come by falling length: the halves are about equal
    return sorted(bins, key=tokens, reverse=True)
