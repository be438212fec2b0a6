"""Unique ids over many rows."""

import numpy as np
import pytest

from rollgen.prompts import ids
from rollgen.prompts.ids import IdTable
from rollgen.prompts.parameters import Parameters
from rollgen.prompts.rows import Row
from rollgen.prompts.sources import Line
from rollgen.rollouts import Sampling

PARAMETERS = Parameters(Sampling(), n=1, seed=0)


@pytest.fixture
def name_rows():
    """`name_rows([id, ...])`: names and duplicates of rows; an int stands for a row without an id, with that hash."""

    def name(given, hash_id=ids.hash_id):
        rows = [
            Row(None if isinstance(i, int) else i, i if isinstance(i, int) else 0, "", "", PARAMETERS, None)
            for i in given
        ]
        table = IdTable(hash_id)
        for row in rows:
            table.add(row)
        table.freeze()
        lines = [Line("data/p.jsonl:", number, b"") for number in range(1, len(rows) + 1)]
        duplicates = {index: duplicate for index, _, duplicate in table.duplicates(zip(lines, rows, strict=True))}
        names = [table.name(index, row) for index, row in enumerate(rows)]
        for index, duplicate in duplicates.items():
            names[index] = duplicate.prompt_id
        return names, duplicates

    return name


def test_rows_without_ids_are_numbered_by_content(name_rows):
    """The count is per content and in file order, so an appended row renames none."""
    names, duplicates = name_rows([255, 16, 255, 255])
    assert names == ["00000000000000ff-0", "0000000000000010-0", "00000000000000ff-1", "00000000000000ff-2"]
    assert not duplicates
    assert name_rows([255, 16, 255, 255, 16])[0][:4] == names


def test_duplicate_ids_name_the_first_line(name_rows):
    """The later row is the duplicate, and gets the first free name."""
    names, duplicates = name_rows(["a", "b", "a", "a#2", "a"])
    assert names == ["a", "b", "a#3", "a#2", "a#4"]
    assert sorted(duplicates) == [2, 4]
    assert "id 'a' is also at p.jsonl:1" in duplicates[2].problem(full_path=False)


def test_a_made_id_may_collide_with_a_given_one(name_rows):
    """Ids copied out of a dataset look like made ones."""
    names, duplicates = name_rows(["00000000000000ff-0", 255, 255])
    assert names == ["00000000000000ff-0", "00000000000000ff-0#2", "00000000000000ff-1"]
    assert "the id made for this row" in duplicates[1].problem(full_path=True)


def test_colliding_hashes_refuse_nothing(name_rows):
    """With the length for a hash, all four ids collide, and the texts decide."""
    names, duplicates = name_rows(["a", "b", "c", "b"], hash_id=len)
    assert names == ["a", "b", "c", "b#2"]
    assert list(duplicates) == [3]


def test_memory_is_13_bytes_a_row():
    """8 bytes of hash, 1 of origin, 4 of occurrence, whatever the length of the ids."""
    table = IdTable()
    for index in range(1000):
        table.add(Row("x" * 1000 + str(index), 0, "", "", PARAMETERS, None))
    table.freeze()
    assert table.nbytes == 13_000


def test_occurrences_count_earlier_equals():
    """Against the obvious loop, on values that repeat a lot."""
    hashes = np.random.default_rng(0).integers(0, 20, 500).astype(np.uint64)
    expected = [int((hashes[:index] == value).sum()) for index, value in enumerate(hashes)]
    assert ids._occurrences(hashes).tolist() == expected
    assert ids._occurrences(hashes[:0]).tolist() == []
