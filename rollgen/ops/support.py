"""`Support`: for each of N tokens the vocabulary ids that could be sampled, as CSR tensors on any device.

A mean support holds 8 to 15 ids, so CSR is about 60 bytes a token where a boolean row of a 152k vocabulary is 152 KB:
keep this form, and ask for a dense one chunk by chunk, each written over the last:

    buffer = torch.empty(4096, V, dtype=torch.bool, device=support.device)
    for start in range(0, len(support), 4096):
        part = support[start : start + 4096]
        mask = part.to_bool(V, out=buffer[: len(part)])

That loop never waits for the device: the offsets, 8 bytes a row, are on the host too, and tell where a slice begins,
how long its rows are and whether one is full. Two things wait, and only for tensors that live on the device: an index
tensor, and offsets of which no host copy is given to the constructor.

Axes: N rows (tokens), nnz ids over all rows, V vocabulary of the logits, K longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rollgen.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Support:
    """Row n is `ids[offsets[n]:offsets[n + 1]]`. A row of length 0 is *not truncated*: every id below `vocab_size`.

    Raises UsageError for tensors of another form. What they hold is trusted: results over rows that are not as said
    here are wrong without a word. Of a source that is not rollgen's own, `check()` it once.
    """

    ids: Tensor
    """int32 [nnz], strictly increasing inside a row, all below `vocab_size`."""
    offsets: Tensor
    """int64 [N + 1], from 0 to nnz."""
    vocab_size: int
    """Of the model that sampled. The logits may be wider (padded): further ids are outside every support."""
    has_full_rows: bool | None = None
    """Whether any row is not truncated; None: look in the host's offsets."""
    offsets_host: Tensor = None  # type: ignore[assignment]
    """The offsets on the CPU: `offsets` itself when that is where they are. None: copied now, which waits."""

    def __post_init__(self) -> None:
        _check_form("ids", self.ids, torch.int32)
        _check_form("offsets", self.offsets, torch.int64)
        if self.offsets.numel() == 0:
            raise UsageError("offsets of no rows are [0], not empty")
        if self.offsets.device != self.ids.device:
            raise UsageError(f"ids on {self.ids.device}, offsets on {self.offsets.device}: move one with .to()")
        if self.vocab_size < 1:
            raise UsageError(f"vocab_size must be 1 or more, not {self.vocab_size}")
        if self.offsets.is_cpu:
            object.__setattr__(self, "offsets_host", self.offsets)
        elif self.offsets_host is None:
            object.__setattr__(self, "offsets_host", self.offsets.cpu())
        if self.has_full_rows is None:
            object.__setattr__(self, "has_full_rows", bool((self.offsets_host.diff() == 0).any()))

    def __repr__(self) -> str:
        return f"Support({len(self)} rows, {self.ids.numel()} ids below {self.vocab_size}, {self.device})"

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without what a slice leaves of the tensors it views, and the offsets once."""
        host = None if self.offsets.is_cpu else _own(self.offsets_host)
        return type(self), (_own(self.ids), _own(self.offsets), self.vocab_size, self.has_full_rows, host)

    def check(self) -> Self:
        """Itself. Waits for the device. Raises UsageError for contents that are not as said, naming the first row."""
        self._check_offsets()
        ids, lengths = self.ids.cpu(), self.offsets_host.diff()
        row = torch.repeat_interleave(lengths, output_size=ids.numel())
        bad = (ids < 0) | (ids >= self.vocab_size)
        bad[1:] |= (ids.diff() <= 0) & (row.diff() == 0)
        if bad.any():
            place = _first(bad)
            rule = f"ids must increase and lie below {self.vocab_size}"
            raise UsageError(f"row {row[place].item()}: {rule}, which {ids[place].item()} does not")
        if self.has_full_rows != bool((lengths == 0).any()):
            raise UsageError(f"has_full_rows is {self.has_full_rows}, which row lengths contradict")
        return self

    def _check_offsets(self) -> None:
        host, backwards = self.offsets_host, self.offsets_host.diff() < 0
        if not torch.equal(self.offsets.cpu(), host):
            raise UsageError("offsets_host differs from offsets")
        if host[0] != 0 or host[-1] != self.ids.numel():
            got = f"{host[0].item()} to {host[-1].item()}"
            raise UsageError(f"offsets must run from 0 to the {self.ids.numel()} ids there are, not from {got}")
        if backwards.any():
            raise UsageError(f"row {_first(backwards)}: its offsets run backwards")

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
        return torch.repeat_interleave(self.lengths, output_size=self.ids.numel())

    def places(self, width: int) -> Tensor:
        """int64 [nnz], where each id stands in a flattened [N, width]: row * width + id, which overflows an int32."""
        return self.rows() * width + self.ids

    def __getitem__(self, index: slice | Tensor) -> Support:
        """Some rows, as a slice of step 1 (ids are views), an int64 index tensor [M] or a bool mask [N].

        A slice never waits for the device, an index tensor does when it lives there. Raises UsageError for anything
        else, and for rows that there are not.
        """
        if isinstance(index, Tensor) and index.dim() == 1:
            return self._select(self._numbers(index.cpu()))
        if isinstance(index, slice) and index.step in (None, 1):
            return self._slice(*index.indices(len(self)))
        raise UsageError(f"a Support is indexed by a slice of step 1 or a 1-D tensor, not by {index!r}")

    def _numbers(self, index: Tensor) -> Tensor:
        """int64 [M] or bool [N] -> int64 [M], rows that there are."""
        count = len(self)
        if index.dtype == torch.bool and index.numel() == count:
            return index.nonzero().squeeze(1)
        if index.dtype != torch.int64:
            raise UsageError(f"a Support of {count} rows is indexed by int64 or bool [{count}], not by {_form(index)}")
        outside = index[(index < -count) | (index >= count)]
        if outside.numel():
            raise UsageError(f"row {outside[0].item()} of a Support of {count} rows")
        return index

    def _slice(self, start: int, stop: int, _step: int) -> Support:
        rows = slice(start, max(start, stop) + 1)
        host = self.offsets_host[rows]
        first, last = int(host[0]), int(host[-1])
        return self._part(self.ids[first:last], self.offsets[rows] - first, host - first)

    def _select(self, index: Tensor) -> Support:
        host = _offsets_of(self.offsets_host.diff()[index])
        # Position of each id: where its old row starts, plus its place inside the new row.
        shift = (self.offsets_host[:-1][index] - host[:-1]).to(self.device, non_blocking=True)
        offsets = host.to(self.device, non_blocking=True)
        places = torch.repeat_interleave(shift, offsets.diff(), output_size=int(host[-1]))
        places += torch.arange(places.numel(), device=self.device)
        return self._part(self.ids[places], offsets, host)

    def _part(self, ids: Tensor, offsets: Tensor, host: Tensor) -> Support:
        """Some of the rows: none is full if none was, else the host's offsets tell."""
        return Support(ids, offsets, self.vocab_size, None if self.has_full_rows else False, host)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Support:
        """The same support on another device."""
        ids = self.ids.to(device, non_blocking=non_blocking)
        offsets = self.offsets_host if ids.is_cpu else self.offsets.to(device, non_blocking=non_blocking)
        return Support(ids, offsets, self.vocab_size, self.has_full_rows, self.offsets_host)

    def pin_memory(self) -> Support:
        """A copy in page-locked memory, from which `.to("cuda", non_blocking=True)` overlaps with compute."""
        return Support(self.ids.pin_memory(), self.offsets.pin_memory(), self.vocab_size, self.has_full_rows)

    @classmethod
    def cat(cls, supports: Sequence[Self]) -> Support:
        """The rows of all supports, in order. Raises UsageError for none, or for different vocabularies."""
        sizes = {support.vocab_size for support in supports}
        if len(sizes) != 1:
            raise UsageError(f"only supports of one vocabulary can be joined, these have {sorted(sizes) or 'none'}")
        ids = torch.cat([support.ids for support in supports])
        host = _offsets_of(torch.cat([support.offsets_host.diff() for support in supports]))
        has_full_rows = any(support.has_full_rows for support in supports)
        return Support(ids, host.to(ids.device, non_blocking=True), sizes.pop(), has_full_rows, host)

    def to_bool(self, vocab_size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """bool [N, V], true at the ids of the support. Default V: the model's vocabulary.

        `out`, here and below: a contiguous tensor of the result's shape, dtype and device, whose contents are replaced
        and which is returned. Raises UsageError for one that is not, and for a V below the model's.
        """
        width = self._width(vocab_size)
        mask = self._destination(out, width, torch.bool)
        if self.has_full_rows:
            mask[:, : self.vocab_size].copy_(self._is_full())
            mask[:, self.vocab_size :].zero_()
        else:
            mask.zero_()
        mask.view(-1).index_fill_(0, self.places(width), True)
        return mask

    def to_bitmask(self, vocab_size: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """uint8 [N, ceil(V / 8)]: id i is bit i % 8 (least significant first) of byte i // 8."""
        width = -(-self._width(vocab_size) // 8)
        mask = self._destination(out, width, torch.uint8)
        if self.has_full_rows:
            torch.mul(self._is_full(), self._full_bits(width), out=mask)
        else:
            mask.zero_()
        bits = torch.ones_like(self.ids, dtype=torch.uint8) << (self.ids & 7)
        # Ids differ inside a row, so adding their bits is or-ing them.
        mask.view(-1).index_add_(0, self.rows() * width + (self.ids >> 3), bits.to(torch.uint8))
        return mask

    def to_padded_ids(self, fill: int = -1, *, width: int | None = None, out: Tensor | None = None) -> Tensor:
        """int32 [N, K], each row's ids and then `fill`. Default K (`width`): the longest row.

        A row that is not truncated is `fill` throughout: its ids are not listed. Raises UsageError for a width that
        does not hold the longest row; in a compiled graph, to which lengths are data, `width` has to be given, and
        that error is torch's.
        """
        columns = self._longest() if width is None else width
        if width is not None:
            self._check_longest(width)
        padded = self._destination(out, columns, torch.int32).fill_(fill)
        starts = torch.arange(len(self), device=self.device) * columns - self.offsets[:-1]
        place = starts[self.rows()] + torch.arange(self.ids.numel(), device=self.device)
        padded.view(-1).index_copy_(0, place, self.ids)
        return padded

    def _longest(self) -> int:
        return int(self.offsets_host.diff().max()) if len(self) else 0

    def _check_longest(self, width: int) -> None:
        if torch.compiler.is_compiling():
            fits = (self.offsets_host.diff() <= width).all()
            torch._assert_async(fits, "width cannot hold the longest row")
        elif (longest := self._longest()) > width:
            raise UsageError(f"{width} columns cannot hold a row of {longest} ids")

    def _destination(self, out: Tensor | None, width: int, dtype: torch.dtype) -> Tensor:
        """[N, width] to be written to, of any contents."""
        shape = (len(self), width)
        if out is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if out.shape != shape or out.dtype != dtype or out.device != self.device or not out.is_contiguous():
            got = f"{out.dtype} {list(out.shape)} on {out.device}" + ("" if out.is_contiguous() else ", not contiguous")
            raise UsageError(f"out must be contiguous {dtype} {list(shape)} on {self.device}, not {got}")
        return out

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


def _check_form(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype:
        raise UsageError(f"{name} must be 1-D {dtype}, not {_form(tensor)}")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that views a part of something larger."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _first(flags: Tensor) -> int:
    """The place of the first true one."""
    return int(flags.nonzero()[0])
