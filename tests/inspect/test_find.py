"""Rows are found by their key, and only row groups that may hold it are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rollgen.errors import DatasetError, UsageError
from rollgen.format.journal import list_shards
from rollgen.format.reader import open_dataset
from rollgen.format.schema import PLAN_FILE
from rollgen.inspect.find import Reading, find_sample, may_hold, ranges, readings, stored_rows

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("a", [Reading("a")]),
        ("a:3", [Reading("a:3"), Reading("a", 3)]),
        ("a:b:3", [Reading("a:b:3"), Reading("a:b", 3)]),
        ("a:3@1", [Reading("a:3@1"), Reading("a", 3, 1)]),
        ("a:1:3@0", [Reading("a:1:3@0"), Reading("a:1", 3, 0)]),
        ("a@1", [Reading("a@1")]),
        ("a:", [Reading("a:")]),
        (":3", [Reading(":3"), Reading("", 3)]),
        ("a:-1", [Reading("a:-1")]),
        ("a:٣", [Reading("a:٣")]),
        ("a\nb:0", [Reading("a\nb:0"), Reading("a\nb", 0)]),
    ],
)
def test_readings(reference: str, expected: list[Reading]) -> None:
    """The whole as an id comes first; a number behind the last colon is taken off second."""
    assert list(readings(reference)) == expected


@pytest.mark.parametrize("planned", [True, False], ids=["by the plan", "by statistics"])
def test_every_sample_is_found(make_dataset: Callable[..., Any], planned: bool) -> None:
    """The row that is found is the one with the key, in all three shards."""
    directory, completions = make_dataset(0)
    if not planned:
        (directory / PLAN_FILE).unlink()
    dataset = open_dataset(directory)
    for completion in completions:
        found = find_sample(dataset, f"{completion.prompt_id}:{completion.sample_index}")
        with found.location.shard.open() as reader:
            table = reader.file.read_row_group(found.location.row_group).slice(found.location.row, 1)
        assert table["seed"].to_pylist() == [completion.seed]
        assert (found.samples, found.generations) == ((0, 1, 2), (0,))


def test_the_first_stored_sample_is_the_default(
    make_dataset: Callable[..., Any], make_completion: Callable[..., Any], commit: Callable[..., None]
) -> None:
    """Of p0, sample 0 is the first; of a prompt with sample 3 alone, that."""
    directory, _ = make_dataset(0)
    assert find_sample(open_dataset(directory), "p0").location.sample_index == 0
    (directory / PLAN_FILE).unlink()
    commit(directory, [make_completion(20, 3, prompt_id="late")])
    assert find_sample(open_dataset(directory), "late").location.sample_index == 3


def test_an_id_with_a_number_of_its_own(
    make_dataset: Callable[..., Any], make_completion: Callable[..., Any], commit: Callable[..., None]
) -> None:
    """`p0:1` is a prompt here: it wins over sample 1 of p0, which a generation still reaches."""
    directory, _ = make_dataset(0)
    (directory / PLAN_FILE).unlink()
    commit(directory, [make_completion(20, 0, prompt_id="p0:1")])
    dataset = open_dataset(directory)
    keys = [find_sample(dataset, ref).location for ref in ("p0:1", "p0:1:0", "p0:1@0", "p0:2")]
    assert [(key.prompt_id, key.sample_index) for key in keys] == [("p0:1", 0), ("p0:1", 0), ("p0", 1), ("p0", 2)]


def test_the_current_generation_is_the_default(make_again: Callable[..., Any]) -> None:
    """A sample that was made again is shown as it is now; `@0` is what it was."""
    dataset = open_dataset(make_again().directory)
    assert find_sample(dataset, "p0:0").location.generation == 1
    assert find_sample(dataset, "p0:0@0").location.generation == 0
    assert find_sample(dataset, "p0:0").generations == (0, 1)
    assert find_sample(dataset, "p0:1").generations == (0,)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("p0:9", "--sample: sample 9 of 'p0' is not stored; stored: 0-2"),
        ("p0:0@4", "--sample: generation 4 of sample 0 of 'p0' is not stored; stored: 0"),
        ("P11:1", "--sample: no prompt 'P11' in this dataset; did you mean 'p11'?"),
        ("1", "--sample: no prompt '1' in this dataset; did you mean 'p1', 'p10', 'p11'?"),
        (
            "zebra",
            "--sample: no prompt 'zebra' in this dataset; ids are those of the prompt rows, like 'p0', 'p1', 'p2'",
        ),
    ],
)
@pytest.mark.parametrize("planned", [True, False], ids=["by the plan", "by statistics"])
def test_what_is_not_there(make_dataset: Callable[..., Any], planned: bool, reference: str, expected: str) -> None:
    """The error says what is stored instead, or which ids come close."""
    directory, _ = make_dataset(0)
    if not planned:
        (directory / PLAN_FILE).unlink()
    with pytest.raises(UsageError) as error:
        find_sample(open_dataset(directory), reference)
    assert str(error.value) == expected


def test_a_planned_prompt_without_samples(make_dataset: Callable[..., Any]) -> None:
    """Not a mistyped id: there is nothing yet. `bad` is a row that was skipped."""
    with pytest.raises(UsageError, match="nothing of prompt 'bad' is stored yet; see `rollgen status`"):
        find_sample(open_dataset(make_dataset(0).directory), "bad")


def test_only_what_may_hold_the_key_is_read(make_dataset: Callable[..., Any]) -> None:
    """Every shard is one row group of four prompts: with one damaged, the prompts of the others are still found."""
    directory, _ = make_dataset(0)
    dataset = open_dataset(directory)
    damage_pages(list_shards(directory)[1])
    assert find_sample(dataset, "p3").location.shard.path.name == "part-w0-000000.parquet"
    assert find_sample(dataset, "p8").location.shard.path.name == "part-w0-000002.parquet"
    with pytest.raises(DatasetError, match=r"part-w0-000001\.parquet: row group 0: "):
        find_sample(dataset, "p4")


def test_rows_of_many_prompts(make_dataset: Callable[..., Any]) -> None:
    """Every sample of the prompts asked for, and no other; of no prompt, none."""
    dataset = open_dataset(make_dataset(0).directory)
    rows = stored_rows(dataset.shards, {"p1", "p9"}, {1, 9})
    assert [(row.prompt_id, row.sample_index) for row in rows] == [(p, k) for p in ("p1", "p9") for k in range(3)]
    assert list(stored_rows(dataset.shards, (), None)) == []


@pytest.mark.parametrize(
    ("values", "expected"), [([0, 3], False), ([0, 4], True), ([7], True), ([5], True), ([8, 9], False), ([], False)]
)
def test_statistics(make_dataset: Callable[..., Any], values: list[int], expected: bool) -> None:
    """The second shard holds prompts 4 to 7."""
    with open_dataset(make_dataset(0).directory).shards[1].open() as reader:
        assert may_hold(reader.parquet.bounds(0, "prompt_index"), values) is expected
        assert reader.parquet.bounds(0, "finish_reason") is None  # has no statistics
        assert may_hold(None, values)


@pytest.mark.parametrize(("numbers", "expected"), [([3], "3"), ([0, 1, 2, 7, 9, 10], "0-2, 7, 9-10"), ([], "")])
def test_ranges(numbers: list[int], expected: str) -> None:
    """Runs are shortened."""
    assert ranges(numbers) == expected


def damage_pages(path: Any) -> None:
    """Flip a byte of the first column's first page; the footer stays as the journal knows it."""
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)
