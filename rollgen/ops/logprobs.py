"""log pi_theta of sampled tokens, normalised over the support that pi_old sampled from.

    log pi(a) = z_a / T - log sum_{v in S} exp(z_v / T)        z raw logits, T temperature, S support

Only the logits inside the supports are read: a gather of nnz numbers, then a log-sum-exp per CSR segment with the
segment's maximum subtracted, in float32 (float64 for float64 logits) whatever the dtype of the logits. A logit outside
the support is never touched, so it can neither overflow nor turn 0 * inf into NaN. The gradient is exact: softmax over
the support, and zeros elsewhere, in one dense [M, V]. Forward cost and memory grow with nnz and not with V. Rows that
are not truncated, and the mass outside the support when it is asked for, need whole rows of the vocabulary: they go
through a block at a time, forward and backward. `reference.py` is the plain dense twin.

All sums run in a fixed order: values and gradients are equal bit by bit over repeats and numbers of threads. A row of
logits that is used more than once sums its gradients before they are rounded.

Forward and backward are custom operators, so that `torch.compile(fullgraph=True)` takes them whole, at any N and nnz.
The backward has no gradient of its own: differentiating twice, or in forward mode, raises UsageError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, overload

import torch
from torch import Tensor

from rollgen.ops.arguments import (
    SupportLogprobs,
    check_logits,
    check_mode,
    check_values,
    row_places,
    temperature_rows,
)
from rollgen.ops.dense import WIDTH, DenseGradient, OnlineSoftmax, block_elements, spans, spread
from rollgen.ops.gradients import add_rows, put_sums, refuse, zeros
from rollgen.ops.segments import Segments
from rollgen.ops.support import Support

SUMS_ELEMENTS: Final = 1 << 24
"""How many numbers of a gradient are summed up at once before they are rounded: 64 MB in float32; one row at least."""


@overload
def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
    entropy: Literal[False] = False,
    kept_mass: Literal[False] = False,
) -> Tensor: ...


@overload
def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
    entropy: Literal[True],
    kept_mass: bool = False,
) -> SupportLogprobs: ...


@overload
def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
    entropy: bool = False,
    kept_mass: Literal[True],
) -> SupportLogprobs: ...


@overload
def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
    entropy: bool = False,
    kept_mass: bool = False,
) -> Tensor | SupportLogprobs: ...


def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
    entropy: bool = False,
    kept_mass: bool = False,
) -> Tensor | SupportLogprobs:
    """Log-probability of each target, normalised over its row of the support.

    logits       float [M, V], raw: not divided by the temperature. V may exceed `support.vocab_size`
    support      N rows
    targets      int64 [N], the sampled ids
    temperature  a number, or float [N]: divides the logits. A tensor gets its gradient
    rows         int64 [N], the row of `logits` for each row of the support, so that no rows need be copied out of a
                 larger tensor; one may be used more than once. Default: row n for n, and M = N
    entropy      also the entropy of pi_theta over the support
    kept_mass    also the share of the full softmax that falls on the support; reads all logits, a few rows at a time

    Returns float32 [N] (float64 for float64 logits), or with `entropy` or `kept_mass` a SupportLogprobs. For finite
    logits a support of one id gives exactly 0 and no gradient, a row that is not truncated the ordinary log-softmax
    over the ids below `support.vocab_size`, a target outside its support -inf and no gradient. Waits for the device
    where there are rows that are not truncated, and in the backward of the kept mass. Raises UsageError when shapes or
    dtypes do not fit together, and for rows or temperatures out of range: those of CUDA tensors are not looked at.
    """
    check_logits(logits, support, targets, rows)
    check_mode(logits, temperature)
    results: tuple[Tensor, ...] = torch.ops.rollgen.support_logprobs(
        logits,
        support.ids,
        support.offsets,
        targets,
        temperature_rows(temperature, logits, len(support)),
        row_places(rows, support),
        support.vocab_size,
        bool(support.has_full_rows),
        entropy,
        kept_mass,
    )
    logprobs, entropies, masses, _, _ = results
    if not (entropy or kept_mass):
        return logprobs
    return SupportLogprobs(logprobs, entropies if entropy else None, masses if kept_mass else None)


def _forward(
    logits: Tensor,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: Tensor,
    vocab_size: int,
    full_rows: bool,
    entropy: bool,
    kept_mass: bool,
) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and log kept masses [N] (or [0]), and what the backward needs of the forward.

    That is log pi of every id [nnz], and [2, N] (or [2, 0]): `largest` and `log_total` of the whole vocabulary.
    """
    check_values(rows, scale, logits.shape[0])
    segments = Segments.of(ids, offsets, targets)
    scaled = logits[rows[segments.row], ids.long()].to(scale.dtype) / scale[segments.row]
    listed, largest, log_total = segments.log_softmax(scaled)
    logprobs = segments.at_targets(listed)
    entropies = segments.entropy(listed) if entropy else scale.new_empty(0)
    masses, whole = scale.new_empty(0), scale.new_empty(2, 0)
    if full_rows or kept_mass:
        full = offsets.diff() == 0
        dense = _dense_rows(full, kept_mass)
        softmax = OnlineSoftmax(targets[dense], scale.dtype, entropy=entropy)
        vocabulary = _Vocabulary(logits, rows[dense], scale[dense], vocab_size)
        for part in vocabulary.spans_of_rows():
            for ids_part in vocabulary.spans_of_ids():
                softmax.add(part, ids_part.start, vocabulary.scaled(part, ids_part))
        logprobs, entropies, whole = softmax.merge(dense, full, logprobs, entropies)
        if kept_mass:
            # The two sums round differently, so that a support of nearly all mass could come out above it.
            masses = ((largest - whole[0]) + (log_total - whole[1])).clamp(max=0).masked_fill(full, 0)
    return logprobs, entropies, masses, listed, whole


def _backward(
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    of_masses: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: Tensor,
    entropies: Tensor,
    masses: Tensor,
    listed: Tensor,
    whole: Tensor,
    vocab_size: int,
    full_rows: bool,
    of_logits: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients in the logits, [M, V] (or [0] when not `of_logits`), and in the temperatures, [N]."""
    absent = torch.zeros_like(scale)
    of_target = absent if of_logprobs is None else of_logprobs
    of_kept = absent if of_masses is None else of_masses
    segments = Segments.of(ids, offsets, targets)
    gradient = segments.gradient(listed, of_target, of_kept, of_entropies)
    slope = segments.slope(gradient, listed)

    result = zeros(logits, of_logits)
    entries = _Entries(rows[segments.row], ids, gradient / scale[segments.row])
    if not full_rows and of_masses is None:
        if of_logits:
            entries.put_into(result)
        return result, slope / -scale

    full = offsets.diff() == 0
    dense = _dense_rows(full, of_masses is not None)
    dense = dense[rows[dense].argsort(stable=True)]
    inside = (targets >= 0) & (targets < vocab_size)
    blocks = DenseGradient(
        dense,
        targets,
        whole,
        of_target=of_target.masked_fill(~(full & inside), 0),
        of_total=-of_kept.masked_fill(full, 0),
        of_entropy=None if of_entropies is None else of_entropies.masked_fill(~full, 0),
        entropy=entropies,
    )
    vocabulary = _Vocabulary(logits, rows[dense], scale[dense], vocab_size)
    if of_logits:
        _put_gradient(result, vocabulary, blocks, entries)
    else:
        for part in vocabulary.spans_of_rows():
            for ids_part in vocabulary.spans_of_ids():
                blocks.block(part, ids_part.start, vocabulary.scaled(part, ids_part))
    slope += spread(blocks.slope, dense, slope.numel())
    if of_masses is not None:  # its two slopes are taken about two different log-sum-exps
        slope += of_masses * masses
    return result, slope / -scale


def _dense_rows(full: Tensor, kept_mass: bool) -> Tensor:
    """int64 [D], the rows of the support that need the whole vocabulary: all, or those not truncated."""
    return torch.arange(full.numel(), device=full.device) if kept_mass else full.nonzero().squeeze(1)


class _Vocabulary(NamedTuple):
    """The logits of D rows of the support, over all ids, as blocks [rows, ids] in the dtype that is accumulated in."""

    logits: Tensor
    places: Tensor
    """int64 [D], in `logits`."""
    scale: Tensor
    """[D]"""
    vocab_size: int

    def spans_of_ids(self) -> Iterator[slice]:
        """As many ids as a block holds of one row."""
        return spans(self.vocab_size, self._width())

    def spans_of_rows(self, start: int = 0, stop: int | None = None) -> Iterator[slice]:
        """As many rows as a block holds, of those from `start` to `stop`."""
        stop = self.places.numel() if stop is None else stop
        return (slice(start + part.start, start + part.stop) for part in spans(stop - start, self.height()))

    def height(self) -> int:
        """Rows of a block."""
        return max(1, block_elements(self.logits.device) // self._width())

    def _width(self) -> int:
        return min(WIDTH, self.vocab_size, block_elements(self.logits.device))

    def scaled(self, rows: slice, ids: slice) -> Tensor:
        """[rows, ids], logits over temperatures; a copy."""
        return self.logits[self.places[rows], ids].to(self.scale.dtype).div_(self.scale[rows].unsqueeze(1))


class _Entries(NamedTuple):
    """A gradient at n listed ids."""

    row: Tensor
    """int64 [n]"""
    ids: Tensor
    """int32 [n]"""
    gradient: Tensor
    """[n]"""

    def pick(self, part: Tensor | slice) -> _Entries:
        """Some of them."""
        return _Entries(self.row[part], self.ids[part], self.gradient[part])

    def put_into(self, sums: Tensor) -> None:
        """Their sums, into [K, V]."""
        put_sums(sums.view(-1), self.row * sums.shape[1] + self.ids, self.gradient)


def _put_gradient(result: Tensor, vocabulary: _Vocabulary, blocks: DenseGradient, entries: _Entries) -> None:
    """Into zeros [M, V] what comes from whole rows, which are in the order of their places, and what from listed ids.

    Where there are both, or several of one, the sums are made apart, some rows of the logits at a time, and rounded to
    the dtype of `result` once.
    """
    places, place, counts = torch.unique_consecutive(vocabulary.places, return_inverse=True, return_counts=True)
    count = torch.arange(places.numel() + 1, device=places.device)
    # Of rows of the logits that are not among the places: one beyond the last.
    rank = places.new_full(result.shape[:1], places.numel()).index_copy_(0, places, count[:-1])[entries.row]
    order = rank.argsort(stable=True)
    entry_edges = torch.searchsorted(rank[order], count).tolist()
    row_edges = [0, *counts.cumsum(0).tolist()]
    entries.pick(order[entry_edges[-1] :]).put_into(result)
    entries = entries._replace(row=rank).pick(order)
    for part in spans(places.numel(), min(vocabulary.height(), SUMS_ELEMENTS // vocabulary.vocab_size)):
        sums = vocabulary.scale.new_zeros(part.stop - part.start, vocabulary.vocab_size)
        near = entries.pick(slice(entry_edges[part.start], entry_edges[part.stop]))
        near._replace(row=near.row - part.start).put_into(sums)
        for rows in vocabulary.spans_of_rows(row_edges[part.start], row_edges[part.stop]):
            for ids in vocabulary.spans_of_ids():
                block = blocks.block(rows, ids.start, vocabulary.scaled(rows, ids))
                block /= vocabulary.scale[rows].unsqueeze(1)
                add_rows(sums[:, ids], place[rows] - part.start, block)
        result[places[part], : vocabulary.vocab_size] = sums.to(result.dtype)


def _forward_shapes(
    logits: Tensor,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: Tensor,
    vocab_size: int,
    full_rows: bool,
    entropy: bool,
    kept_mass: bool,
) -> tuple[Tensor, ...]:
    count = scale.shape[0]
    return (
        scale.new_empty(count),
        scale.new_empty(count if entropy else 0),
        scale.new_empty(count if kept_mass else 0),
        scale.new_empty(ids.shape[0]),
        scale.new_empty(2, count if full_rows or kept_mass else 0),
    )


def _backward_shapes(
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    of_masses: Tensor | None,
    logits: Tensor,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    of_logits = rest[-1]
    return logits.new_empty(logits.shape if of_logits else (0,)), scale.new_empty(scale.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, *tensors, ctx.vocab_size, ctx.full_rows, ctx.entropy, ctx.kept_mass = inputs
    if not (ctx.full_rows or ctx.kept_mass):
        # Only their shape is needed: the logits themselves may be freed, or written over, before the backward.
        logits = logits.new_empty(()).expand(logits.shape)
    ctx.save_for_backward(logits, *tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None, of_masses: Tensor | None, *_state: None
) -> tuple[Tensor | None, ...]:
    check_mode(of_logprobs, of_entropies, of_masses)
    of_logits, _, _, _, of_scale, *_ = ctx.needs_input_grad
    in_logits, in_scale = torch.ops.rollgen.support_logprobs_backward(
        of_logprobs,
        of_entropies if ctx.entropy else None,
        of_masses if ctx.kept_mass else None,
        *ctx.saved_tensors,
        ctx.vocab_size,
        ctx.full_rows,
        of_logits,
    )
    return in_logits if of_logits else None, None, None, None, in_scale if of_scale else None, *[None] * 5


torch.library.define(
    "rollgen::support_logprobs",
    "(Tensor logits, Tensor ids, Tensor offsets, Tensor targets, Tensor scale, Tensor rows, SymInt vocab_size, "
    "bool full_rows, bool entropy, bool kept_mass) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("rollgen::support_logprobs", "default", _forward)
torch.library.register_fake("rollgen::support_logprobs", _forward_shapes)
torch.library.register_autograd("rollgen::support_logprobs", _differentiate, setup_context=_save)

torch.library.define(
    "rollgen::support_logprobs_backward",
    "(Tensor? of_logprobs, Tensor? of_entropies, Tensor? of_masses, Tensor logits, Tensor ids, Tensor offsets, "
    "Tensor targets, Tensor scale, Tensor rows, Tensor entropies, Tensor masses, Tensor listed, Tensor whole, "
    "SymInt vocab_size, bool full_rows, bool of_logits) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("rollgen::support_logprobs_backward", "default", _backward)
torch.library.register_fake("rollgen::support_logprobs_backward", _backward_shapes)
torch.library.register_autograd("rollgen::support_logprobs_backward", refuse)
