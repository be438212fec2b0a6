"""Single samples as tensors, and files of tensors that `torch.load(weights_only=True)` reads.

For trainers whose files have a value or a tensor a sample: a loop over samples, never over tokens, but for what torch
does itself with lists of numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollgen.loader.samples import Samples, offsets_of

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array


def part(offsets: Int64Array, number: int) -> slice:
    """Where the values of a row are."""
    return slice(*offsets[number : number + 2].tolist())


def supports_of(samples: Samples, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of one sample's T tokens: int32 [nnz], and where each begins, int64 [T + 1]."""
    ids = samples.mask_ids[part(samples.mask_offsets, number)]
    lengths = samples.mask_lengths[part(samples.token_ids.offsets, number)]
    return torch.from_numpy(ids), torch.from_numpy(offsets_of(lengths))


def save(content: dict[str, Any], path: Path) -> None:
    """`torch.save`. Raises OSError when the disk does not take it, which torch hides behind a RuntimeError."""
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            raise _disk_error(error) or error from None


def _disk_error(error: BaseException | None) -> OSError | None:
    """The OSError that an exception was raised on top of, if there is one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
