"""log pi_theta of sampled tokens, normalised over the support that pi_old sampled from.

    log pi(a) = z_a / T - log sum_{v in S} exp(z_v / T)        z raw logits, T temperature, S support

Only the logits inside the supports are read: a gather of nnz numbers, then a log-sum-exp per CSR segment with the
segment's maximum subtracted, in float32 (float64 for float64 logits) whatever the dtype of the logits. A logit outside
the support is never touched, so it can neither overflow nor turn 0 * inf into NaN. The gradient is exact: softmax over
the support, and zeros elsewhere; autograd allocates one dense [M, V] for it. Forward cost and memory grow with nnz and
not with V. `reference.py` is the plain dense twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.ops.support import Support


def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Log-probability of each target, normalised over its row of the support.

    logits       float [M, V], raw: not divided by the temperature. V may exceed `support.vocab_size`
    support      N rows
    targets      int64 [N], the sampled ids
    temperature  a number, or float [N]: divides the logits
    rows         int64 [N], the row of `logits` for each row of the support, so that no rows need be copied out of a
                 larger tensor. Default: row n for n, and M = N

    Returns float32 [N] (float64 for float64 logits). For finite logits a support of one id gives exactly 0 and no
    gradient, a row that is not truncated the ordinary log-softmax over the ids below `support.vocab_size`, a target
    outside its support -inf and no gradient. Raises UsageError when shapes or dtypes do not fit together.
    """
    check_shapes(logits, support, targets, rows)
    scale = temperature_rows(temperature, logits, len(support))
    result = _truncated(logits, support, targets, scale, rows)
    if support.has_full_rows:
        full = (support.lengths == 0).nonzero().squeeze(1)
        places = full if rows is None else rows[full]
        values = _full(logits[places, : support.vocab_size], targets[full], scale[full])
        result = result.index_copy(0, full, values)
    return result


def check_shapes(logits: Tensor, support: Support, targets: Tensor, rows: Tensor | None) -> None:
    """Raise UsageError for arguments that do not fit together; a gather would silently read another row."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise UsageError(f"logits must be float [M, V], not {logits.dtype} {list(logits.shape)}")
    if logits.shape[1] < support.vocab_size:
        raise UsageError(f"logits have {logits.shape[1]} columns, the supports are over {support.vocab_size} ids")
    if targets.shape != (len(support),):
        raise UsageError(f"targets are {list(targets.shape)}, the support has {len(support)} rows")
    if targets.dtype != torch.int64 or (rows is not None and rows.dtype != torch.int64):
        raise UsageError("targets and rows must be int64: places in [M, V] overflow anything smaller")
    count = logits.shape[0] if rows is None else rows.numel()
    if count != len(support):
        raise UsageError(f"{count} rows of logits for {len(support)} rows of support")


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.promote_types(logits.dtype, torch.float32)


def temperature_rows(temperature: float | Tensor, logits: Tensor, count: int) -> Tensor:
    """The temperature of each row, [count], in the dtype that is accumulated in."""
    if isinstance(temperature, Tensor):
        return temperature.to(accumulation_dtype(logits)).expand(count)
    if not temperature > 0:
        raise UsageError(f"temperature must be above 0, not {temperature}")
    return torch.full((count,), temperature, dtype=accumulation_dtype(logits), device=logits.device)


def _truncated(logits: Tensor, support: Support, targets: Tensor, scale: Tensor, rows: Tensor | None) -> Tensor:
    """[N]; -inf where the row lists no id at all."""
    row = support.rows()
    place = (row if rows is None else rows[row]) * logits.shape[1] + support.ids
    scaled = logits.reshape(-1).index_select(0, place).to(scale.dtype) / scale[row]

    # One id of a segment is the target, so its logit comes out of the same gather, and both gradients are added
    # before they are rounded to the dtype of the logits.
    is_target = support.ids == targets[row]
    zeros = scaled.new_zeros(len(support))
    target = zeros.index_add(0, row, scaled.masked_fill(~is_target, 0))
    found = zeros.index_add(0, row, is_target.to(zeros.dtype)) > 0

    largest = torch.full_like(zeros, -torch.inf).scatter_reduce(0, row, scaled.detach(), "amax")
    total = zeros.index_add(0, row, (scaled - largest[row]).exp())
    # The difference of target and largest first: for a single id it is 0, and log(1) is 0 too.
    value = (target - largest) - total.masked_fill(support.lengths == 0, 1).log()
    return value.masked_fill(~found, -torch.inf)


def _full(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """[F], the ordinary log-softmax of logits [F, V] at the targets."""
    scaled = logits.to(scale.dtype) / scale.unsqueeze(1)
    scaled = scaled - scaled.detach().amax(1, keepdim=True)  # the difference of two large numbers would cost digits
    inside = (targets >= 0) & (targets < logits.shape[1])
    target = scaled.gather(1, targets.where(inside, 0).unsqueeze(1)).squeeze(1)
    return (target - scaled.logsumexp(1)).masked_fill(~inside, -torch.inf)
