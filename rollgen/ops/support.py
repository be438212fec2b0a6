"""`Support`: for each of N tokens the vocabulary ids that could be sampled, as CSR tensors on any device.

A mean support holds 8 to 15 ids, so CSR is about 60 bytes a token where a boolean row of a 152k vocabulary is 152 KB:
keep this form, and ask for a dense one (`to_bool`, `to_bitmask`, `to_padded_ids`) chunk by chunk: `support[0:512]`.

Axes: N rows (tokens), nnz ids over all rows, V vocabulary of the logits, K longest row. Nothing here waits for the
device except where a result's shape depends on its contents, which each docstring says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rollgen.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """Row n is `ids[offsets[n]:offsets[n + 1]]`. A row of length 0 is *not truncated*: every id below `vocab_size`."""

    ids: Tensor
    """int32 [nnz], strictly increasing inside a row, all below `vocab_size`."""
    offsets: Tensor
    """int64 [N + 1], from 0 to nnz."""
    vocab_size: int
    """Of the model that sampled. The logits may be wider (padded): further ids are outside every support."""
    has_full_rows: bool | None = None
    """Whether any row is not truncated; None: look now. Kept on the host: the usual case never waits for the device."""

    def __post_init__(self) -> None:
        if self.has_full_rows is None:
            object.__setattr__(self, "has_full_rows", bool((self.lengths == 0).any()))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.ids.device

    @property
    def lengths(self) -> Tensor:
        """int64 [N], ids in each row; 0 for a row that is not truncated."""
        return self.offsets.diff()

    def rows(self) -> Tensor:
        """int64 [nnz], the row of each id."""
        count = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(count, self.lengths, output_size=self.ids.numel())

    def __getitem__(self, index: slice | Tensor) -> Support:
        """Some rows, as a slice of step 1 (views, no copy) or an int64 or bool index tensor [M]. Waits for the device.

        Raises UsageError for anything else.
        """
        if isinstance(index, Tensor) and index.dim() == 1:
            return self._select(index.nonzero().squeeze(1) if index.dtype == torch.bool else index)
        if isinstance(index, slice) and index.step in (None, 1):
            return self._slice(*index.indices(len(self)))
        raise UsageError(f"a Support is indexed by a slice of step 1 or a 1-D tensor, not by {index!r}")

    def _slice(self, start: int, stop: int, _step: int) -> Support:
        offsets = self.offsets[start : max(start, stop) + 1]
        first, last = (int(edge) for edge in offsets[[0, -1]])
        return Support(self.ids[first:last], offsets - first, self.vocab_size, self._has_full_rows_in_part())

    def _select(self, index: Tensor) -> Support:
        lengths = self.lengths[index]
        offsets = _offsets_of(lengths)
        # Position of each id: where its old row starts, plus its place inside the new row.
        shift = self.offsets[:-1][index] - offsets[:-1]
        places = torch.repeat_interleave(shift, lengths)
        places += torch.arange(places.numel(), device=self.device)
        return Support(self.ids[places], offsets, self.vocab_size, self._has_full_rows_in_part())

    def _has_full_rows_in_part(self) -> bool | None:
        """For some of the rows: no if there is none at all, else to be looked up."""
        return None if self.has_full_rows else False

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Support:
        """The same support on another device."""
        ids = self.ids.to(device, non_blocking=non_blocking)
        offsets = self.offsets.to(device, non_blocking=non_blocking)
        return Support(ids, offsets, self.vocab_size, self.has_full_rows)

    def pin_memory(self) -> Support:
        """A copy in page-locked memory, from which `.to("cuda", non_blocking=True)` overlaps with compute."""
        return Support(self.ids.pin_memory(), self.offsets.pin_memory(), self.vocab_size, self.has_full_rows)

    @classmethod
    def cat(cls, supports: Sequence[Self]) -> Support:
        """The rows of all supports, in order. Raises UsageError for none, or for different vocabularies."""
        sizes = {support.vocab_size for support in supports}
        if len(sizes) != 1:
            raise UsageError(f"only supports of one vocabulary can be joined, these have {sorted(sizes) or 'none'}")
        return Support(
            torch.cat([support.ids for support in supports]),
            _offsets_of(torch.cat([support.lengths for support in supports])),
            sizes.pop(),
            any(support.has_full_rows for support in supports),
        )

    def to_bool(self, vocab_size: int | None = None) -> Tensor:
        """bool [N, V], true at the ids of the support. Default V: the model's vocabulary."""
        width = self._width(vocab_size)
        mask = torch.zeros(len(self), width, dtype=torch.bool, device=self.device)
        mask[self.rows(), self.ids.long()] = True
        if self.has_full_rows:
            mask[:, : self.vocab_size] |= self._is_full()
        return mask

    def to_bitmask(self, vocab_size: int | None = None) -> Tensor:
        """uint8 [N, ceil(V / 8)]: id i is bit i % 8 (least significant first) of byte i // 8."""
        width = -(-self._width(vocab_size) // 8)
        ids = self.ids.long()
        bits = torch.ones_like(ids) << (ids & 7)
        mask = torch.zeros(len(self) * width, dtype=torch.uint8, device=self.device)
        # Ids differ inside a row, so adding their bits is or-ing them.
        mask.index_add_(0, self.rows() * width + (ids >> 3), bits.to(torch.uint8))
        mask = mask.view(len(self), width)
        return torch.where(self._is_full(), self._full_bits(width), mask) if self.has_full_rows else mask

    def to_padded_ids(self, fill: int = -1) -> Tensor:
        """int32 [N, K], each row's ids and then `fill`; K is the longest row. Waits for the device.

        A row that is not truncated is `fill` throughout: its ids are not listed.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        padded = torch.full((len(self), longest), fill, dtype=torch.int32, device=self.device)
        rows = self.rows()
        padded[rows, torch.arange(rows.numel(), device=self.device) - self.offsets[rows]] = self.ids
        return padded

    def _width(self, vocab_size: int | None) -> int:
        width = self.vocab_size if vocab_size is None else vocab_size
        if width < self.vocab_size:
            raise UsageError(f"a width of {width} cannot hold a support over {self.vocab_size} ids")
        return width

    def _is_full(self) -> Tensor:
        """bool [N, 1]"""
        return (self.lengths == 0).unsqueeze(1)

    def _full_bits(self, width: int) -> Tensor:
        """uint8 [width], the bits of every id below `vocab_size`."""
        below = self.vocab_size - 8 * torch.arange(width, device=self.device)
        return ((1 << below.clamp(0, 8)) - 1).to(torch.uint8)


def _offsets_of(lengths: Tensor) -> Tensor:
    """int64 [N] -> int64 [N + 1], the running sum from 0."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
