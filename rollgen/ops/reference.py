"""Plain dense twin of `logprobs.py`: the definition in a few lines of torch, at [N, V] cost. For tests and readers."""

from __future__ import annotations

import torch
from torch import Tensor

from rollgen.ops.logprobs import check_shapes, temperature_rows
from rollgen.ops.support import Support


def support_logprobs(
    logits: Tensor,
    support: Support,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """What `rollgen.ops.support_logprobs` computes, by masking the dense logits."""
    check_shapes(logits, support, targets, rows)
    mask = support.to_bool(logits.shape[1])
    scale = temperature_rows(temperature, logits, len(support)).unsqueeze(1)
    scaled = (logits if rows is None else logits[rows]).to(scale.dtype) / scale
    logprobs = scaled.masked_fill(~mask, -torch.inf).log_softmax(1)
    inside = (targets >= 0) & (targets < logits.shape[1])
    column = targets.where(inside, 0).unsqueeze(1)
    found = inside & mask.gather(1, column).squeeze(1)
    return logprobs.gather(1, column).squeeze(1).masked_fill(~found, -torch.inf)
