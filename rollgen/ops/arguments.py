"""What the log-probability ops take and return: every check of their arguments, made once, before anything is read.

What a tensor holds is checked where that waits for no device: on the CPU. On a CUDA device it is not. There rows out of
range trip an assertion, negative ones count from the end, and results for a temperature of 0, inf or NaN are wrong.

Axes: N rows of the support (tokens), M rows of logits or hidden states, V vocabulary of the logits, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rollgen.errors import UsageError
from rollgen.ops.support import Support


class SupportLogprobs(NamedTuple):
    """What an op returns when more than the log-probabilities is asked for; None for what was not."""

    logprobs: Tensor
    """float [N], log pi_theta of each target, normalised over its support."""
    entropy: Tensor | None
    """float [N], nats, of pi_theta over the support: 0 for a single id."""
    log_kept_mass: Tensor | None
    """float [N], log of the share of the full softmax (over the ids below `vocab_size`, at the same temperature) that
    falls on the support: at most 0, and 0 for a row that is not truncated. The difference of two logs of sums: near 0,
    where the support keeps nearly all, it is good to an absolute 1e-7 or so in float32, not to a relative one."""


def check_logits(logits: Tensor, support: Support, targets: Tensor, rows: Tensor | None) -> None:
    """Raise UsageError for arguments that do not fit together; a gather would silently read another row."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise UsageError(f"logits must be float [M, V], not {logits.dtype} {list(logits.shape)}")
    if logits.shape[1] < support.vocab_size:
        raise UsageError(f"logits have {logits.shape[1]} columns, the supports are over {support.vocab_size} ids")
    _check_tokens("logits", logits, support, targets, rows)


def check_hidden(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support, targets: Tensor, rows: Tensor | None
) -> None:
    """`check_logits` for hidden states and the head that would turn them into logits."""
    if hidden.dim() != 2 or hidden.shape[1] == 0 or not hidden.is_floating_point():
        raise UsageError(f"hidden must be float [M, H], H 1 or more, not {hidden.dtype} {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise UsageError(f"weight must be [V, {hidden.shape[1]}] for this hidden, not {list(weight.shape)}")
    if weight.shape[0] < support.vocab_size:
        raise UsageError(f"weight has {weight.shape[0]} rows, the supports are over {support.vocab_size} ids")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias must be [{weight.shape[0]}] for this weight, not {list(bias.shape)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype, other.device) != (hidden.dtype, hidden.device):
            here, there = f"{hidden.dtype} on {hidden.device}", f"{other.dtype} on {other.device}"
            raise UsageError(f"hidden is {here}, {name} {there}: cast one, nothing is converted silently")
    _check_tokens("hidden", hidden, support, targets, rows)


def _check_tokens(name: str, source: Tensor, support: Support, targets: Tensor, rows: Tensor | None) -> None:
    if targets.shape != (len(support),):
        raise UsageError(f"targets are {list(targets.shape)}, the support has {len(support)} rows")
    if targets.dtype != torch.int64 or (rows is not None and rows.dtype != torch.int64):
        raise UsageError("targets and rows must be int64: places in [M, V] overflow anything smaller")
    if rows is not None and rows.dim() != 1:
        raise UsageError(f"rows must be [{len(support)}], not {list(rows.shape)}")
    count = source.shape[0] if rows is None else rows.numel()
    if count != len(support):
        raise UsageError(f"{count} rows of {name} for {len(support)} rows of support")
    if source.device != support.device:
        raise UsageError(f"{name} on {source.device}, the support on {support.device}: move one with .to()")


def accumulation_dtype(source: Tensor) -> torch.dtype:
    """float64 for float64 logits or hidden states, else float32."""
    return torch.promote_types(source.dtype, torch.float32)


def temperature_rows(temperature: float | Tensor, source: Tensor, count: int) -> Tensor:
    """The temperature of each row, [count], in the dtype that is accumulated in. Raises UsageError for a bad one."""
    dtype = accumulation_dtype(source)
    if isinstance(temperature, Tensor):
        if temperature.shape not in ((), (1,), (count,)):
            raise UsageError(f"temperature must be a number or [{count}], not {list(temperature.shape)}")
        if not temperature.is_floating_point() or temperature.device != source.device:
            got = f"{temperature.dtype} on {temperature.device}"
            raise UsageError(f"temperature must be a number or a float tensor on {source.device}, not {got}")
        return temperature.to(dtype).expand(count)
    limits = torch.finfo(dtype)
    if not limits.tiny <= temperature <= limits.max:
        raise _bad_temperature(temperature, dtype)
    # Not torch.full, for which the compiler would take the number for a constant.
    return torch.ones(count, dtype=dtype, device=source.device) * temperature


def check_values(places: Tensor, scale: Tensor, count: int) -> None:
    """Raise UsageError for rows that are not among `count`, and temperatures that divide nothing; on a CPU only."""
    if not places.is_cpu:
        return
    outside = places[(places < 0) | (places >= count)]
    if outside.numel():
        raise UsageError(f"rows must be 0 to {count - 1}, one is {outside[0].item()}")
    limits = torch.finfo(scale.dtype)
    bad = scale[~((scale >= limits.tiny) & (scale <= limits.max))]
    if bad.numel():
        raise _bad_temperature(bad[0].item(), scale.dtype)


def _bad_temperature(temperature: float, dtype: torch.dtype) -> UsageError:
    name = str(dtype).removeprefix("torch.")
    return UsageError(f"temperature must be a finite number above 0 in {name}, not {temperature}")


def check_mode(*inputs: float | Tensor | None) -> None:
    """Raise UsageError in forward-mode differentiation, which would take every derivative of an op for zero.

    Nothing is known of it while a graph is traced.
    """
    if torch.compiler.is_compiling():
        return
    duals = [forward_ad.unpack_dual(part) for part in inputs if isinstance(part, Tensor)]  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        raise UsageError("support_logprobs has no forward-mode derivative; for that use rollgen.ops.reference")


def row_places(rows: Tensor | None, support: Support) -> Tensor:
    """int64 [N], the row of logits or hidden states that belongs to each row of the support."""
    return torch.arange(len(support), device=support.device) if rows is None else rows
