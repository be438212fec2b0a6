"""Plain dense twins of `logprobs.py` and `hidden.py`: the definitions in a few lines of torch, at [N, V] cost.

For tests and readers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollgen.ops.arguments import (
    SupportLogprobs,
    accumulation_dtype,
    check_hidden,
    check_logits,
    check_values,
    row_places,
    temperature_rows,
)
from rollgen.ops.support import Support


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
    """What `rollgen.ops.support_logprobs` computes, by masking the dense logits."""
    check_logits(logits, support, targets, rows)
    temperatures = temperature_rows(temperature, logits, len(support))
    check_values(row_places(rows, support), temperatures, logits.shape[0])
    mask, scale = support.to_bool(logits.shape[1]), temperatures.unsqueeze(1)
    logits = logits.to(scale.dtype)  # first: a row that is used twice sums its gradients before they are rounded
    scaled = (logits if rows is None else logits[rows]) / scale
    masked = scaled.masked_fill(~mask, -torch.inf)
    logprobs = masked.log_softmax(1)
    inside = (targets >= 0) & (targets < logits.shape[1])
    column = targets.where(inside, 0).unsqueeze(1)
    found = inside & mask.gather(1, column).squeeze(1)
    values = logprobs.gather(1, column).squeeze(1).masked_fill(~found, -torch.inf)
    if not (entropy or kept_mass):
        return values
    probabilities = logprobs.exp()
    entropies = -(probabilities * logprobs.masked_fill(probabilities == 0, 0)).sum(1)
    masses = masked.logsumexp(1) - scaled[:, : support.vocab_size].logsumexp(1)
    full = support.lengths == 0
    return SupportLogprobs(values, entropies if entropy else None, masses.masked_fill(full, 0) if kept_mass else None)


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
    """What `rollgen.ops.support_logprobs_from_hidden` computes, by way of all the logits."""
    check_hidden(hidden, weight, bias, support, targets, rows)
    dtype = accumulation_dtype(hidden)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    return support_logprobs(logits, support, targets, temperature, rows=rows, entropy=entropy)
