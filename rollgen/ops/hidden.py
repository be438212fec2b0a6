"""log pi_theta straight from hidden states: only the rows of the head that some support lists are read.

    z_v = hidden . weight_v + bias_v        log pi(a) = z_a / T - log sum_{v in S} exp(z_v / T)

A mean support holds some 10 of 150,000 ids, so the full product [N, V] is nearly all waste. Here one dot product is
made for each listed id, in float32 (float64 for float64) whatever the dtypes: nnz * H multiplications, and none at all
for a row of one id, whose log pi is exactly 0 without gradient. What is gathered on the way is made block by block and
thrown away; the backward makes nothing larger than the gradients, and a dense one of `weight` is most of its time.
Rows that are not truncated get the full product, also block by block, made again in the backward.

Gradients are summed in a fixed order (entries sorted by the row they belong to, then one bag each), with no atomics:
they are equal bit by bit over repeats and numbers of threads. For rows that are not truncated this is up to the matrix
product of the BLAS. `weight` is a whole tensor: gather a sharded head first. Under autocast nothing is cast: the op
keeps the dtype it is given. `reference.py` is the plain dense twin; on compiling and differentiating twice see
`logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from rollgen.ops.arguments import (
    SupportLogprobs,
    check_hidden,
    check_mode,
    check_values,
    row_places,
    temperature_rows,
)
from rollgen.ops.dense import WIDTH, DenseGradient, OnlineSoftmax, block_elements, spans, spread
from rollgen.ops.gradients import add_products, refuse, zeros
from rollgen.ops.segments import Segments
from rollgen.ops.support import Support


@overload
def support_logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def support_logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    entropy: Literal[True],
) -> SupportLogprobs: ...


@overload
def support_logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    entropy: bool = False,
) -> Tensor | SupportLogprobs: ...


def support_logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    entropy: bool = False,
) -> Tensor | SupportLogprobs:
    """Log-probability of each target, normalised over its row of the support, without making logits.

    hidden       float [M, H], what the head would be given
    weight       [V, H], of the head, in the dtype of `hidden`. V may exceed `support.vocab_size`
    support      N rows
    targets      int64 [N], the sampled ids
    temperature  a number, or float [N]: divides the logits. A tensor gets its gradient
    bias         [V], of the head
    rows         int64 [N], the row of `hidden` for each row of the support. Default: row n for n, and M = N
    entropy      also the entropy of pi_theta over the support

    Returns float32 [N] (float64 for float64), or with `entropy` a SupportLogprobs; values are as those of
    `support_logprobs`. Waits for the device: the sizes of what is gathered are data. Raises UsageError when shapes,
    dtypes or devices do not fit together, and for rows or temperatures out of range: those of CUDA tensors are not
    looked at.

    Only for models whose logits are `hidden @ weight.T + bias`. Some scale or cap them after that (Gemma 2 by a tanh,
    Granite by `logits_scaling`, Cohere by `logit_scale`): a scale may go into `temperature`, a cap needs the logits.
    """
    check_hidden(hidden, weight, bias, support, targets, rows)
    check_mode(hidden, weight, bias, temperature)
    results: tuple[Tensor, ...] = torch.ops.rollgen.support_logprobs_from_hidden(
        hidden,
        weight,
        bias,
        support.ids,
        support.offsets,
        targets,
        temperature_rows(temperature, hidden, len(support)),
        row_places(rows, support),
        support.vocab_size,
        bool(support.has_full_rows),
        entropy,
    )
    logprobs, entropies, _, _ = results
    return SupportLogprobs(logprobs, entropies, None) if entropy else logprobs


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: Tensor,
    vocab_size: int,
    full_rows: bool,
    entropy: bool,
) -> tuple[Tensor, ...]:
    """Log-probabilities [N] and entropies [N] (or [0]), and what the backward needs of the forward.

    That is log pi of every id [nnz], and [2, N] (or [2, 0]): `largest` and `log_total` of rows that are not truncated.
    """
    check_values(rows, scale, hidden.shape[0])
    segments = Segments.of(ids, offsets, targets)
    several = _in_rows_of_several(segments)
    row, listed_ids = segments.row[several], ids[several].long()
    logits = _dots(hidden, weight, rows[row], listed_ids, scale.dtype)
    if bias is not None:
        logits += bias[listed_ids]
    # A single id is left at 0: whatever its logit, its log pi is 0.
    listed, _, _ = segments.log_softmax(spread(logits / scale[row], several, ids.numel()))
    logprobs = segments.at_targets(listed)
    entropies = segments.entropy(listed) if entropy else scale.new_empty(0)
    whole = scale.new_empty(2, 0)
    if full_rows:
        full = offsets.diff() == 0
        dense = full.nonzero().squeeze(1)
        softmax = OnlineSoftmax(targets[dense], scale.dtype, entropy=entropy)
        product = _Product(hidden, weight, bias, rows[dense], scale[dense], vocab_size)
        for ids_part in product.spans_of_ids():
            head = product.head(ids_part)
            for part in product.spans_of_rows():
                softmax.add(part, ids_part.start, product.scaled(product.states(part), part, head, ids_part))
        logprobs, entropies, whole = softmax.merge(dense, full, logprobs, entropies)
    return logprobs, entropies, listed, whole


def _backward(
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: Tensor,
    entropies: Tensor,
    listed: Tensor,
    whole: Tensor,
    vocab_size: int,
    full_rows: bool,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, ...]:
    """Gradients in hidden [M, H], weight [V, H] and bias [V] (each [0] when not wanted), and the temperatures [N]."""
    absent = torch.zeros_like(scale)
    of_target = absent if of_logprobs is None else of_logprobs
    segments = Segments.of(ids, offsets, targets)
    gradient = segments.gradient(listed, of_target, absent, of_entropies)
    slope = segments.slope(gradient, listed)

    several = _in_rows_of_several(segments)
    row, listed_ids = segments.row[several], ids[several].long()
    places, weights = rows[row], gradient[several] / scale[row]
    into = _Gradients(zeros(hidden, of_hidden), zeros(weight, of_weight), zeros(weight[:, 0], of_bias))
    if of_hidden:
        add_products(into.hidden, places, weight, listed_ids, weights)
    if of_weight:
        add_products(into.weight, listed_ids, hidden, places, weights)
    if of_bias:
        add_products(into.bias.unsqueeze(1), listed_ids, weights.new_ones(1, 1), torch.zeros_like(places), weights)

    if full_rows:
        dense = (offsets.diff() == 0).nonzero().squeeze(1)
        inside = (targets >= 0) & (targets < vocab_size)
        blocks = DenseGradient(
            dense,
            targets,
            whole,
            of_target=of_target.masked_fill(~inside, 0),
            of_total=absent,
            of_entropy=of_entropies,
            entropy=entropies,
        )
        _add_full_rows(into, blocks, _Product(hidden, weight, bias, rows[dense], scale[dense], vocab_size))
        slope += spread(blocks.slope, dense, slope.numel())
    return *into, slope / -scale


class _Gradients(NamedTuple):
    """Those that are summed up; [0] for one that is not wanted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


def _in_rows_of_several(segments: Segments) -> Tensor:
    """int64, which of the nnz ids stand in a row of two or more."""
    return (segments.offsets.diff() > 1)[segments.row].nonzero().squeeze(1)


def _dots(hidden: Tensor, weight: Tensor, places: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[n], hidden[places[i]] . weight[ids[i]], multiplied and summed in `dtype`."""
    result = torch.empty(ids.shape, dtype=dtype, device=ids.device)
    for part in spans(ids.numel(), block_elements(ids.device) // hidden.shape[1]):
        left, right = hidden.index_select(0, places[part]), weight.index_select(0, ids[part])
        torch.sum(left.to(dtype) * right.to(dtype), 1, out=result[part])
    return result


class _Product(NamedTuple):
    """The logits of D rows that are not truncated, as blocks [rows, ids] in the dtype that is accumulated in."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    places: Tensor
    """int64 [D], in `hidden`."""
    scale: Tensor
    """[D]"""
    vocab_size: int

    def spans_of_ids(self) -> Iterator[slice]:
        """As many ids as their part of the head makes a block."""
        return spans(self.vocab_size, self._width())

    def spans_of_rows(self) -> Iterator[slice]:
        """As many rows as their logits for those ids make a block."""
        return spans(self.places.numel(), block_elements(self.hidden.device) // self._width())

    def _width(self) -> int:
        return min(WIDTH, max(1, block_elements(self.hidden.device) // self.hidden.shape[1]))

    def states(self, rows: slice) -> Tensor:
        """[rows, H]"""
        return self.hidden[self.places[rows]].to(self.scale.dtype)

    def head(self, ids: slice) -> Tensor:
        """[ids, H]"""
        return self.weight[ids].to(self.scale.dtype)

    def scaled(self, states: Tensor, rows: slice, head: Tensor, ids: slice) -> Tensor:
        """[rows, ids], logits over temperatures."""
        logits = _matmul(states, head.T)
        if self.bias is not None:
            logits += self.bias[ids]
        return logits.div_(self.scale[rows].unsqueeze(1))


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product in the dtype it is given, under autocast too."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _add_full_rows(into: _Gradients, gradients: DenseGradient, product: _Product) -> None:
    """What rows that are not truncated add to the gradients."""
    in_states = product.scale.new_zeros(product.places.numel(), product.hidden.shape[1])
    for ids in product.spans_of_ids():
        head = product.head(ids)
        in_head, in_bias = torch.zeros_like(head), head.new_zeros(head.shape[0])
        for rows in product.spans_of_rows():
            states = product.states(rows)
            block = gradients.block(rows, ids.start, product.scaled(states, rows, head, ids))
            block /= product.scale[rows].unsqueeze(1)
            in_bias += block.sum(0)
            if into.hidden.numel():
                in_states[rows] += _matmul(block, head)
            if into.weight.numel():
                in_head += _matmul(block.T, states)
        if into.weight.numel():
            into.weight[ids] += in_head
        if into.bias.numel():
            into.bias[ids] += in_bias
    if into.hidden.numel():
        # `rows` of the op may name one state twice.
        order = torch.arange(len(in_states), device=in_states.device)
        add_products(into.hidden, product.places, in_states, order, torch.ones_like(product.scale))


def _forward_shapes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: Tensor,
    vocab_size: int,
    full_rows: bool,
    entropy: bool,
) -> tuple[Tensor, ...]:
    count = scale.shape[0]
    return (
        scale.new_empty(count),
        scale.new_empty(count if entropy else 0),
        scale.new_empty(ids.shape[0]),
        scale.new_empty(2, count if full_rows else 0),
    )


def _backward_shapes(
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    offsets: Tensor,
    targets: Tensor,
    scale: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    of_hidden, of_weight, of_bias = rest[-3:]
    into = (
        like.new_empty(like.shape if wanted else (0,))
        for like, wanted in ((hidden, of_hidden), (weight, of_weight), (weight[:, 0], of_bias))
    )
    return *into, scale.new_empty(scale.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.vocab_size, ctx.full_rows, ctx.entropy = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None, *_state: None
) -> tuple[Tensor | None, ...]:
    check_mode(of_logprobs, of_entropies)
    of_hidden, of_weight, of_bias, _, _, _, of_scale, *_ = ctx.needs_input_grad
    in_hidden, in_weight, in_bias, in_scale = torch.ops.rollgen.support_logprobs_from_hidden_backward(
        of_logprobs,
        of_entropies if ctx.entropy else None,
        *ctx.saved_tensors,
        ctx.vocab_size,
        ctx.full_rows,
        of_hidden,
        of_weight,
        of_bias,
    )
    return (
        in_hidden if of_hidden else None,
        in_weight if of_weight else None,
        in_bias if of_bias else None,
        *[None] * 3,
        in_scale if of_scale else None,
        *[None] * 4,
    )


torch.library.define(
    "rollgen::support_logprobs_from_hidden",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor offsets, Tensor targets, Tensor scale, "
    "Tensor rows, SymInt vocab_size, bool full_rows, bool entropy) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("rollgen::support_logprobs_from_hidden", "default", _forward)
torch.library.register_fake("rollgen::support_logprobs_from_hidden", _forward_shapes)
torch.library.register_autograd("rollgen::support_logprobs_from_hidden", _differentiate, setup_context=_save)

torch.library.define(
    "rollgen::support_logprobs_from_hidden_backward",
    "(Tensor? of_logprobs, Tensor? of_entropies, Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, "
    "Tensor offsets, Tensor targets, Tensor scale, Tensor rows, Tensor entropies, Tensor listed, Tensor whole, "
    "SymInt vocab_size, bool full_rows, bool of_hidden, bool of_weight, bool of_bias) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.impl("rollgen::support_logprobs_from_hidden_backward", "default", _backward)
torch.library.register_fake("rollgen::support_logprobs_from_hidden_backward", _backward_shapes)
torch.library.register_autograd("rollgen::support_logprobs_from_hidden_backward", refuse)
