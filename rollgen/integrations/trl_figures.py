"""pi_theta / pi_old over the tokens of the loss, as TRL logs it with `use_vllm=True`, before any clipping.

Every token counts the same, in whichever micro-batch, step or process it was, and extremes are those of all tokens:
sums, counts and extremes are kept from one log entry to the next, not means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping


def partial_figures(difference: Tensor) -> Tensor:
    """[1, 6] of the tokens of one micro-batch and process, `difference` [N] being log pi_theta - log pi_old.

    How many, then sum and maximum of the difference's size, then sum, minimum and maximum of the ratio.
    """
    if not len(difference):
        return difference.new_tensor([[0, 0, -torch.inf, 0, torch.inf, -torch.inf]])
    size, ratio = difference.abs(), difference.exp()
    figures = [size.sum(), size.amax(), ratio.sum(), ratio.amin(), ratio.amax()]
    return torch.stack([difference.new_tensor(float(len(difference))), *figures]).unsqueeze(0)


class RatioFigures:
    """Of all micro-batches that were added since they were last taken."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.float64]] = []

    def add(self, partial: Tensor) -> None:
        """[P, 6], `partial_figures` of P processes."""
        self._parts.append(partial.double().cpu().numpy())

    def take(self) -> Mapping[str, float]:
        """By TRL's names, and begin anew; nothing where there was no token."""
        if not self._parts:
            return {}
        count, size, largest, ratio, lowest, highest = np.concatenate(self._parts).T
        self._parts.clear()
        if not (tokens := count.sum()):
            return {}
        return {
            "sampling/sampling_logp_difference/mean": float(size.sum() / tokens),
            "sampling/sampling_logp_difference/max": float(largest.max()),
            "sampling/importance_sampling_ratio/min": float(lowest.min()),
            "sampling/importance_sampling_ratio/mean": float(ratio.sum() / tokens),
            "sampling/importance_sampling_ratio/max": float(highest.max()),
        }
