"""What the backward passes share: zeros to sum gradients into, sums of products in a fixed order, and where it ends.

Nothing here uses atomics: results are equal bit by bit over repeats and numbers of threads.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.ops.dense import block_elements, spans


def zeros(like: Tensor, wanted: bool) -> Tensor:
    """Of the shape of `like`, or [0] when it is not wanted; contiguous: autograd takes it for `.grad` without a copy.

    On a CPU the pages come from numpy: the system has zeroed them, and numpy asks it for huge ones. `torch.zeros` takes
    small pages and fills them once more: for the gradient of a large head that was 9 tenths of the backward's time.
    That memory is numpy's: such a gradient cannot be resized in place.
    """
    shape = like.shape if wanted else torch.Size([0])
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    # As integers of the same size: numpy knows no bfloat16.
    return torch.from_numpy(np.zeros(tuple(shape), f"i{like.element_size()}")).view(like.dtype)


def add_products(into: Tensor, keys: Tensor, table: Tensor, index: Tensor, weights: Tensor) -> None:
    """into[keys[i]] += weights[i] * table[index[i]] for all i: [K, H] from [L, H] and three of [n].

    Sums in the dtype of `weights`, entries of one key in their order, rounded to the dtype of `into` once. Waits for
    the device: how many different keys there are is data.
    """
    order = keys.argsort(stable=True)
    keys, index, weights = keys[order], index[order], weights[order]
    is_first = keys.diff(prepend=keys[:1] - 1) != 0
    starts, segment = is_first.nonzero().squeeze(1), is_first.cumsum(0) - 1
    parts = list(spans(index.numel(), block_elements(into.device) // into.shape[1]))
    edges = [place for part in parts for place in (part.start, part.stop - 1)]
    reached = [*segment[edges].tolist(), -1]
    carried = weights.new_zeros(into.shape[1])
    for part, first, last, following in zip(parts, reached[:-1:2], reached[1:-1:2], reached[2::2], strict=True):
        terms = table.index_select(0, index[part]).to(weights.dtype)
        bags = (starts[first : last + 1] - part.start).clamp(min=0)
        places = torch.arange(terms.shape[0], device=into.device)
        sums = F.embedding_bag(places, terms, bags, mode="sum", per_sample_weights=weights[part])
        sums[0] += carried
        # A key that goes on in the next part takes its sum there, unrounded.
        done = last + (following != last)
        carried = sums[done - first :].sum(0)
        into.index_add_(0, keys[starts[first:done]], sums[: done - first].to(into.dtype))


def put_sums(into: Tensor, places: Tensor, values: Tensor) -> None:
    """into[places[i]] = the sum of all values of that place: [K], int64 [n] and [n].

    Sums in the dtype of `values`, in their order, rounded to the dtype of `into` once.
    """
    order = places.argsort(stable=True)
    places = places[order]
    run = (places.diff(prepend=places[:1]) != 0).cumsum(0)
    # One place more than there can be runs: how many there are is data, which would have to be waited for.
    starts = torch.searchsorted(run, torch.arange(run.numel() + 1, device=run.device))
    sums = torch.segment_reduce(values[order], "sum", offsets=starts, unsafe=True)
    into.index_copy_(0, places, sums[run].to(into.dtype))


def add_rows(into: Tensor, index: Tensor, values: Tensor) -> None:
    """into[index[i]] += values[i] for all i, in their order: [K, W], int64 [n] that never falls, and [n, W]."""
    bags = torch.searchsorted(index, torch.arange(into.shape[0], device=index.device))
    into += F.embedding_bag(torch.arange(index.numel(), device=index.device), values, bags, mode="sum")


def refuse(_ctx: Any, *_of_gradients: Tensor | None) -> NoReturn:
    """The gradient of a gradient, which no op here has. Raises UsageError."""
    raise UsageError("support_logprobs cannot be differentiated twice; for that use rollgen.ops.reference")
