"""Support: every dense form, every way of picking rows, against rows written out by hand.

What must not wait for a CUDA device runs on the meta device here: it has no values, so that a look at one fails.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.errors import UsageError
from rollgen.ops import Support

# Vocabulary of 10: ids 0 and 9 are the edges, row 2 is not truncated, row 3 crosses the byte border of a bitmask.
ROWS = [[3], [0, 9], [], [7, 8]]
VOCAB_SIZE = 10
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(rows: list[list[int]], vocab_size: int = VOCAB_SIZE) -> Support:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Support(torch.tensor([i for row in rows for i in row], dtype=torch.int32), offsets, vocab_size)


def listed(support: Support) -> list[list[int]]:
    edges = support.offsets.tolist()
    return [support.ids[start:stop].tolist() for start, stop in pairwise(edges)]


class Case(NamedTuple):
    """A support, a width of the logits, a width of padded ids and a number of rows to take at a time."""

    rows: list[list[int]]
    vocab_size: int
    width: int
    columns: int
    chunk: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab_size = draw(st.integers(1, 40))
    rows = draw(st.lists(st.sets(st.integers(0, vocab_size - 1), max_size=12).map(sorted), max_size=12))
    longest = max(map(len, rows), default=0)
    width = vocab_size + draw(st.integers(0, 24))
    return Case(rows, vocab_size, width, longest + draw(st.integers(0, 3)), draw(st.integers(1, 6)))


def bool_rows(case: Case) -> list[list[bool]]:
    return [[i in row if row else i < case.vocab_size for i in range(case.width)] for row in case.rows]


def bitmask_rows(case: Case) -> list[list[int]]:
    packed = [[0] * ((case.width + 7) // 8) for _ in case.rows]
    for row, bits in zip(bool_rows(case), packed, strict=True):
        for i, allowed in enumerate(row):
            bits[i // 8] |= allowed << i % 8
    return packed


def padded_rows(case: Case) -> list[list[int]]:
    return [row + [-1] * (case.columns - len(row)) for row in case.rows]


Dense = Callable[[Support, Case, torch.Tensor | None], torch.Tensor]
FORMS: dict[str, tuple[Dense, Callable[[Case], list[list[int]] | list[list[bool]]]]] = {
    "bool": (lambda support, case, out: support.to_bool(case.width, out=out), bool_rows),
    "bitmask": (lambda support, case, out: support.to_bitmask(case.width, out=out), bitmask_rows),
    "padded ids": (lambda support, case, out: support.to_padded_ids(width=case.columns, out=out), padded_rows),
}


@pytest.mark.parametrize("form", FORMS)
@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_dense_forms(form: str, case: Case) -> None:
    """Whole, into a buffer full of garbage, and chunk by chunk into the same buffer: what a plain loop makes."""
    dense, expect = FORMS[form]
    support = make(case.rows, case.vocab_size)
    whole = dense(support, case, None)
    assert whole.tolist() == expect(case)

    buffer = torch.full_like(whole, 1)  # of 1s: true, bit 0, id 1
    assert dense(support, case, buffer) is buffer
    assert torch.equal(buffer, whole)

    for start in range(0, len(support), case.chunk):
        part = support[start : start + case.chunk]
        chunk = dense(part, case, buffer[: len(part)])
        assert torch.equal(chunk, whole[start : start + case.chunk])


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


def test_padded_ids_narrower_than_a_row_are_refused() -> None:
    """Nothing is cut off in silence."""
    with pytest.raises(UsageError, match="1 columns cannot hold a row of 2 ids"):
        make(ROWS).to_padded_ids(width=1)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        pytest.param(torch.empty(3, 10, dtype=torch.bool), r"\[3, 10\]", id="rows"),
        pytest.param(torch.empty(4, 11, dtype=torch.bool), r"\[4, 11\]", id="columns"),
        pytest.param(torch.empty(40, dtype=torch.bool), r"\[40\]", id="flat"),
        pytest.param(torch.empty(4, 10, dtype=torch.uint8), "torch.uint8", id="dtype"),
        pytest.param(torch.empty(4, 12, dtype=torch.bool)[:, :10], "not contiguous$", id="columns of a wider one"),
        pytest.param(torch.empty(4, 10, dtype=torch.bool, device="meta"), "on meta$", id="device"),
    ],
)
def test_another_out_is_refused(out: torch.Tensor, message: str) -> None:
    """A result is never resized, cast, or written through a copy that the caller would not see."""
    with pytest.raises(UsageError, match=message):
        make(ROWS).to_bool(out=out)


def test_places_beyond_an_int32() -> None:
    """Row 2 of a matrix 2^31 wide begins at 2^32; 16,384 rows of 152k ids are beyond 2^31 elements already."""
    places = make([[3], [0, 9], [7]]).places(2**31)
    assert places.dtype == torch.int64
    assert places.tolist() == [3, 2**31, 2**31 + 9, 2**32 + 7]


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


@pytest.mark.parametrize(
    ("index", "message"),
    [
        pytest.param(torch.tensor([4]), "row 4 of a Support of 4 rows", id="too large"),
        pytest.param(torch.tensor([0, -5]), "row -5 of a Support of 4 rows", id="too small"),
        pytest.param(torch.tensor([True, False]), r"not by torch.bool \[2\]", id="short mask"),
        pytest.param(torch.tensor([1, 0, 1, 0], dtype=torch.uint8), "not by torch.uint8", id="uint8"),
        pytest.param(torch.tensor([1, 0]).int(), "not by torch.int32", id="int32"),
        pytest.param(torch.tensor([1.0]), "not by torch.float32", id="float"),
    ],
)
def test_rows_that_there_are_not(index: torch.Tensor, message: str) -> None:
    """An index out of range, and a tensor that could be an index or a mask, are refused."""
    with pytest.raises(UsageError, match=message):
        make(ROWS)[index]


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
    """`to` moves both tensors, and the offsets stay on the host beside them."""
    support = make(ROWS)
    moved = support.to("meta", non_blocking=True)
    assert moved.device.type == moved.offsets.device.type == "meta"
    assert moved.has_full_rows is True
    assert moved.offsets_host is support.offsets


@pytest.mark.parametrize("form", FORMS)
def test_chunks_on_a_device_wait_for_nothing(form: str) -> None:
    """The loop of a training step, and of its parts each knows from the host alone whether it has full rows."""
    dense, _ = FORMS[form]
    moved = make(ROWS).to("meta")
    case = Case(ROWS, VOCAB_SIZE, width=13, columns=2, chunk=2)
    buffer = torch.empty_like(dense(moved, case, None))
    parts = [moved[start : start + case.chunk] for start in range(0, len(moved), case.chunk)]
    assert [part.has_full_rows for part in parts] == [False, True]
    assert [dense(part, case, buffer[: len(part)]).shape for part in parts] == [buffer[:2].shape] * 2


def test_rows_are_joined_and_picked_on_a_device_without_a_wait() -> None:
    """Lengths come from the host's offsets; an index on the host needs nothing from the device."""
    moved = make(ROWS).to("meta")
    assert Support.cat([moved, moved]).offsets_host.tolist() == [0, 1, 3, 3, 5, 6, 8, 8, 10]
    picked = moved[torch.tensor([3, 0])]
    assert picked.offsets_host.tolist() == [0, 2, 3]
    assert picked.ids.shape == (3,)
    assert picked.to_padded_ids().shape == (2, 2)


def test_pickled_once() -> None:
    """What a DataLoader worker sends holds the offsets once, and still knows them to be the host's."""
    back = pickle.loads(pickle.dumps(make(ROWS)))
    assert listed(back) == ROWS
    assert back.offsets_host is back.offsets


@pytest.mark.parametrize("pickler", [pickle, ForkingPickler], ids=["pickle", "to a DataLoader's parent"])
def test_a_slice_is_pickled_alone(pickler: Any) -> None:
    """Two rows of 10,000 leave what they view behind; a whole support is not copied first."""
    whole = make([[1, 2, 3]] * 10_000)
    back = pickle.loads(pickler.dumps(whole[:2]))
    assert listed(back) == [[1, 2, 3]] * 2
    assert back.ids.untyped_storage().nbytes() == 6 * 4
    assert len(pickle.dumps(whole[:2])) < 2000
    _, (ids, offsets, *_) = whole.__reduce__()
    assert ids is whole.ids
    assert offsets is whole.offsets


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"ids": torch.tensor([3, 0, 9, 7, 8])}, "ids must be 1-D torch.int32", id="int64 ids"),
        pytest.param({"ids": torch.zeros(1, 5).int()}, r"not torch.int32 \[1, 5\]", id="2-D ids"),
        pytest.param({"offsets": torch.tensor([0, 5]).int()}, "offsets must be 1-D torch.int64", id="int32 offsets"),
        pytest.param({"offsets": torch.tensor([]).long()}, r"are \[0\], not empty", id="no offset"),
        pytest.param({"ids": torch.zeros(5, device="meta").int()}, "ids on meta, offsets on cpu", id="devices"),
        pytest.param({"vocab_size": 0}, "must be 1 or more, not 0", id="no vocabulary"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str) -> None:
    """A tensor of another dtype or shape would be read as something else."""
    support = make(ROWS)
    with pytest.raises(UsageError, match=message):
        Support(**{"ids": support.ids, "offsets": support.offsets, "vocab_size": VOCAB_SIZE} | changes)


def test_check_passes_what_is_right() -> None:
    """With and without full rows, without rows, and as parts."""
    support = make(ROWS)
    for right in (support, support[1:], support[:2], support[torch.tensor([3, 0])], make([])):
        assert right.check() is right


@pytest.mark.parametrize(
    ("ids", "offsets", "full", "message"),
    [
        pytest.param([3, 0, 0], [0, 1, 3], False, "row 1: ids must .* which 0 does not", id="twice"),
        pytest.param([3, 9, 0], [0, 1, 3], False, "row 1: ids must .* which 0 does not", id="unsorted"),
        pytest.param([3, 0, 10], [0, 1, 3], False, "row 1: ids must .* below 10, which 10 does not", id="too large"),
        pytest.param([-1, 0, 9], [0, 1, 3], False, "row 0: ids must .* which -1 does not", id="negative"),
        pytest.param([3, 3, 10], [0, 2, 3], False, "row 0: .* which 3 does not", id="the first of two"),
        pytest.param([3, 0, 9], [0, 1, 2], False, "to the 3 ids there are, not from 0 to 2", id="ids left"),
        pytest.param([3, 0, 9], [1, 2, 3], False, "not from 1 to 3", id="late start"),
        pytest.param([3, 0, 9], [0, 2, 1, 3], False, "row 1: its offsets run backwards", id="backwards"),
        pytest.param([3, 0, 9], [0, 1, 3], True, "has_full_rows is True", id="no full row"),
        pytest.param([3, 0, 9], [0, 1, 1, 3], False, "has_full_rows is False", id="a full row"),
    ],
)
def test_check_names_the_row(ids: list[int], offsets: list[int], full: bool, message: str) -> None:
    """Each way in which contents can be wrong, with the first row that is."""
    support = Support(torch.tensor(ids, dtype=torch.int32), torch.tensor(offsets), VOCAB_SIZE, full)
    with pytest.raises(UsageError, match=message):
        support.check()


def test_check_compares_the_offsets_of_host_and_device() -> None:
    """The host's decide where a slice begins, the device's what is in it."""
    support = make(ROWS)
    object.__setattr__(support, "offsets_host", support.offsets + 1)
    with pytest.raises(UsageError, match="differs"):
        support.check()


def test_traced_whole() -> None:
    """torch.compile takes a Support as an argument and traces its dense forms without a break."""
    dense = torch.compile(lambda support: (support.to_bool(), support.to_bitmask()), backend="eager", fullgraph=True)
    for rows in (ROWS, ROWS[:2]):
        mask, bits = dense(make(rows))
        assert torch.equal(mask, make(rows).to_bool())
        assert torch.equal(bits, make(rows).to_bitmask())


def test_padded_ids_are_traced_at_a_given_width() -> None:
    """Lengths are data to a compiled graph: with a width it does not ask for them, and still does not cut rows."""
    dense = torch.compile(
        lambda support, width: support.to_padded_ids(width=width), backend="aot_eager", fullgraph=True
    )
    for rows in (ROWS, ROWS[:2]):
        assert torch.equal(dense(make(rows), 6), make(rows).to_padded_ids(width=6))
    with pytest.raises(RuntimeError, match="width cannot hold the longest row"):
        dense(make(ROWS), 1)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]], ids=["a full row", "no full row"])
def test_no_wait_for_cuda(rows: list[list[int]]) -> None:
    """From pinned memory to dense chunks, with every synchronisation an error; then the values."""
    pinned, width = make(rows).pin_memory(), 13
    buffers = [torch.empty(2, width, dtype=torch.bool, device="cuda") for _ in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = pinned.to("cuda", non_blocking=True)
        parts = [moved[start : start + 2] for start in range(0, len(moved), 2)]
        masks = [part.to_bool(width, out=buffer) for part, buffer in zip(parts, buffers, strict=False)]
        bits = [part.to_bitmask(width) for part in parts]
        ids = [part.to_padded_ids(width=2) for part in parts]
        picked = moved[torch.tensor([1, 0])].to_padded_ids()
        joined = Support.cat(parts).to_padded_ids()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole = make(rows)
    assert torch.equal(torch.cat(masks).cpu(), whole.to_bool(width))
    assert torch.equal(torch.cat(bits).cpu(), whole.to_bitmask(width))
    assert torch.equal(torch.cat(ids).cpu(), whole.to_padded_ids())
    assert torch.equal(joined.cpu(), whole.to_padded_ids())
    assert picked.cpu().tolist() == [[0, 9], [3, -1]]


@pytest.mark.gpu
@NEEDS_CUDA
def test_more_than_an_int32_of_elements() -> None:
    """2.2 GB of booleans in 16 rows: the ids of the last row lie beyond place 2^31."""
    width = 2**27 + 2**23
    support = make([[width - 1 - row] for row in range(16)], width).to("cuda")
    mask = support.to_bool()
    assert mask.numel() > 2**31
    assert mask.sum().item() == 16
    assert [mask[row, width - 1 - row].item() for row in (0, 15)] == [True, True]
