"""Support: every dense form, every way of picking rows, against rows written out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rollgen.errors import UsageError
from rollgen.ops import Support

# Vocabulary of 10: ids 0 and 9 are the edges, row 2 is not truncated, row 3 crosses the byte border of a bitmask.
ROWS = [[3], [0, 9], [], [7, 8]]
VOCAB_SIZE = 10


def make(rows: list[list[int]], vocab_size: int = VOCAB_SIZE) -> Support:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Support(torch.tensor([i for row in rows for i in row], dtype=torch.int32), offsets, vocab_size)


def listed(support: Support) -> list[list[int]]:
    edges = support.offsets.tolist()
    return [support.ids[start:stop].tolist() for start, stop in pairwise(edges)]


def test_length_and_lengths() -> None:
    """A row of length 0 counts like any other, and marks the support as having full rows."""
    support = make(ROWS)
    assert len(support) == 4
    assert support.lengths.tolist() == [1, 2, 0, 2]
    assert support.rows().tolist() == [0, 1, 1, 3, 3]
    assert support.has_full_rows is True
    assert make(ROWS[:2]).has_full_rows is False


@pytest.mark.parametrize("width", [None, 10, 13], ids=["own", "equal", "wider"])
def test_to_bool(width: int | None) -> None:
    """A full row is true below the model's vocabulary only; ids of a padded vocabulary are false."""
    mask = make(ROWS).to_bool(width)
    assert mask.dtype == torch.bool
    assert mask.shape == (4, width or 10)
    assert [row.nonzero().squeeze(1).tolist() for row in mask] == [[3], [0, 9], list(range(10)), [7, 8]]


def test_to_bitmask_bytes() -> None:
    """Id i is bit i % 8 of byte i // 8: 3 -> 8; 0 -> 1 and 9 -> 2; all ten -> 255 and 3; 7 -> 128 and 8 -> 1."""
    mask = make(ROWS).to_bitmask()
    assert mask.dtype == torch.uint8
    assert mask.tolist() == [[8, 0], [1, 2], [255, 3], [128, 1]]


@pytest.mark.parametrize("width", [10, 15, 16, 17])
def test_bitmask_is_packed_bool(width: int) -> None:
    """Unpacking the bitmask gives `to_bool` at any width, with zeros in the bits that fill the last byte."""
    support = make(ROWS)
    packed = support.to_bitmask(width)
    assert packed.shape == (4, (width + 7) // 8)
    bits = packed.unsqueeze(2) >> torch.arange(8) & 1
    unpacked = bits.flatten(1).bool()
    assert torch.equal(unpacked[:, :width], support.to_bool(width))
    assert not unpacked[:, width:].any()


def test_to_padded_ids() -> None:
    """Rows are padded to the longest; a full row is padding throughout."""
    padded = make(ROWS).to_padded_ids(-7)
    assert padded.dtype == torch.int32
    assert padded.tolist() == [[3, -7], [0, 9], [-7, -7], [7, 8]]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        pytest.param(slice(1, 3), [[0, 9], []], id="slice"),
        pytest.param(slice(None), ROWS, id="all"),
        pytest.param(slice(-2, None), [[], [7, 8]], id="negative"),
        pytest.param(slice(3, 1), [], id="backward slice is empty"),
        pytest.param(slice(9, 12), [], id="beyond the end is empty"),
        pytest.param(torch.tensor([3, 0, 3]), [[7, 8], [3], [7, 8]], id="index with repeats"),
        pytest.param(torch.tensor([-1]), [[7, 8]], id="negative index"),
        pytest.param(torch.tensor([True, False, True, False]), [[3], []], id="mask"),
        pytest.param(torch.tensor([], dtype=torch.int64), [], id="no index"),
    ],
)
def test_picking_rows(index: slice | torch.Tensor, expected: list[list[int]]) -> None:
    """Picked rows are re-based and know for themselves whether one of them is full."""
    picked = make(ROWS)[index]
    assert listed(picked) == expected
    assert picked.offsets[0] == 0
    assert picked.has_full_rows is ([] in expected)
    assert picked.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("index", [1, slice(0, 4, 2), torch.zeros(1, 1, dtype=torch.int64)], ids=["int", "step", "2-D"])
def test_other_indices_are_refused(index: object) -> None:
    """A single row would be a different type, and a stride is not a view: both are refused."""
    with pytest.raises(UsageError, match="indexed by a slice"):
        make(ROWS)[index]  # type: ignore[index]


def test_cat_of_slices_is_the_whole() -> None:
    """Cutting anywhere and joining again changes nothing."""
    support = make(ROWS)
    for cut in range(5):
        joined = Support.cat([support[:cut], support[cut:]])
        assert listed(joined) == ROWS
        assert joined.has_full_rows is True


@pytest.mark.parametrize("parts", [[], [make(ROWS), make(ROWS, 11)]], ids=["nothing", "two vocabularies"])
def test_cat_refuses(parts: list[Support]) -> None:
    """Supports of different vocabularies do not mean the same by a full row."""
    with pytest.raises(UsageError, match="one vocabulary"):
        Support.cat(parts)


def test_narrow_width_is_refused() -> None:
    """A dense form narrower than the vocabulary would drop ids."""
    with pytest.raises(UsageError, match="width of 9"):
        make(ROWS).to_bool(9)


def test_no_rows() -> None:
    """Every form of a support without rows is empty, not an error."""
    support = make([])
    assert support.to_bool().shape == (0, 10)
    assert support.to_bitmask().shape == (0, 2)
    assert support.to_padded_ids().shape == (0, 0)
    assert support.has_full_rows is False


def test_to_device() -> None:
    """`to` moves both tensors; the meta device stands for any other, and would fail on a hidden look at values."""
    moved = make(ROWS).to("meta")
    assert moved.device.type == moved.offsets.device.type == "meta"
    assert moved.has_full_rows is True
    assert moved.to_bool().shape == (4, 10)
    assert moved.to_bitmask().shape == (4, 2)
