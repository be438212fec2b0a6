"""Group-relative advantages: how much better an answer is than the others to the same prompt.

    mean            r - mean(r)                      Dr. GRPO, arXiv 2503.20783: no bias towards easy or hard prompts
    mean_std        (r - mean(r)) / (std(r) + eps)   GRPO, arXiv 2402.03300; std with n - 1, as trainers have it
    leave_one_out   r - mean of the others           RLOO, arXiv 2402.14740: n / (n - 1) times the first

A group whose rewards are all the same, or that has one member, gives 0 in the first two. All sums are in float64; what
is no more than their rounding is 0.
"""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.rollouts import LARGEST_REWARD

AdvantageKind = Literal["mean", "mean_std", "leave_one_out"]

_EPS: Final = 1e-6


def group_advantages(rewards: Tensor, group: Tensor, kind: AdvantageKind = "mean", *, eps: float = _EPS) -> Tensor:
    """Advantages of B rollouts, float [B] of the dtype of `rewards`, float [B]; without gradient.

    `group` int64 [B] numbers the groups from 0, as `RolloutBatch.group` does. Groups must be whole: of a stream, with
    `group_by_prompt=True`. What is not in the batch nobody can see here, and a baseline over half a group is another
    one. `eps`, in units of the reward, keeps the division of "mean_std" finite.

    Raises UsageError for arguments that do not fit together and, on the CPU, for a reward that is not finite or that
    float32 cannot hold, an advantage that the dtype of `rewards` cannot hold, a group outside [0, B), and a group of
    one with "leave_one_out", which has no others. On a device that would wait for it: there the last gives NaN.
    """
    _check(rewards, group, kind, eps)
    values = rewards.detach().to(torch.float64)
    count = _sums(torch.ones_like(values), group)
    centred = values - _sums(values, group) / count
    # Rounding leaves some 1e-17 of a reward that is the mean: no sign to learn from, and eps would blow it up.
    rounding = count * torch.finfo(torch.float64).eps * _largest(values.abs(), group)
    centred = centred.masked_fill(centred.abs() <= rounding, 0)
    if kind == "mean_std":
        variance = _sums(centred.square(), group) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    elif kind == "leave_one_out":
        centred = centred * (count / (count - 1))
    advantages = centred.to(rewards.dtype)
    if rewards.is_cpu and not advantages.isfinite().all():
        worst = rewards[~advantages.isfinite()][0].item()
        raise UsageError(f"the advantage of a reward of {worst:g} is more than {rewards.dtype} holds: divide rewards")
    return advantages


def _sums(values: Tensor, group: Tensor) -> Tensor:
    """[B], at each place the sum over its group."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _largest(values: Tensor, group: Tensor) -> Tensor:
    """[B], at each place the largest of its group; none is negative."""
    return torch.zeros_like(values).scatter_reduce(0, group, values, "amax")[group]


def _check(rewards: Tensor, group: Tensor, kind: str, eps: float) -> None:
    if not (isinstance(rewards, Tensor) and isinstance(group, Tensor)):
        raise UsageError(f"rewards and group must be tensors, not {type(rewards).__name__} and {type(group).__name__}")
    if kind not in get_args(AdvantageKind):
        raise UsageError(f"kind must be one of {', '.join(map(repr, get_args(AdvantageKind)))}, not {kind!r}")
    if not (isinstance(eps, int | float) and 0 < eps < math.inf):
        raise UsageError(f"eps must be above 0 and finite, not {eps!r}")
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise UsageError(f"rewards must be float [B], not {rewards.dtype} {list(rewards.shape)}")
    if group.shape != rewards.shape or group.dtype != torch.int64:
        raise UsageError(f"group must be int64 {list(rewards.shape)}, not {group.dtype} {list(group.shape)}")
    if group.device != rewards.device:
        raise UsageError(f"rewards on {rewards.device}, group on {group.device}: move one with .to()")
    if rewards.is_cpu:
        _check_values(rewards, group, kind)


def _check_values(rewards: Tensor, group: Tensor, kind: str) -> None:
    if not rewards.isfinite().all():
        raise UsageError(f"rewards must be finite, one is {rewards[~rewards.isfinite()][0].item()}")
    too_large = rewards[rewards.abs() > LARGEST_REWARD]
    if too_large.numel():
        raise UsageError(f"rewards must be numbers that float32 can hold, one is {too_large[0].item():g}")
    outside = group[(group < 0) | (group >= group.numel())]
    if outside.numel():
        raise UsageError(f"groups are numbered from 0 to {group.numel() - 1} at most, one is {outside[0].item()}")
    if kind == "leave_one_out" and (single := (group.bincount() == 1).nonzero()).numel():
        raise UsageError(
            f"leave_one_out: group {single[0].item()} has one member, and so no others to compare it with; use groups "
            "that are whole (group_by_prompt=True) and have two samples or more"
        )
