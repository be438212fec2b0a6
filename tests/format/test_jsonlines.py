"""JSON lines outlive a crash: a torn last line is skipped and cut off, other damage is an error with its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.errors import DatasetError
from rollgen.format.jsonlines import MAX_LINE_BYTES, append_line, parse_object, read_lines, truncate_torn_tail


@dataclass(frozen=True)
class Pair:
    name: str
    value: int


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("durable", [False, True])
def test_lines_come_back_numbered_from_1(tmp_path: Path, durable: bool) -> None:
    """What was appended, in order, with the line number that an editor shows."""
    lines = [Pair("a", 1), Pair("new\nline \u2028 and \x00", -(2**63)), Pair("", 0)]
    for line in lines:
        append_line(tmp_path / "log", line, durable=durable)
    assert list(read_lines(tmp_path / "log", Pair)) == list(enumerate(lines, 1))
    assert (tmp_path / "log").read_bytes().count(b"\n") == 3


TWO = b'{"name": "a", "value": 1}\n{"name": "b", "value": 2}\n'


@given(st.integers(0, len(TWO)))
def test_a_file_cut_anywhere_reads_as_its_complete_lines(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    """A crash may leave any prefix. Repaired, it reads the same and takes further lines."""
    path = write(tmp_path_factory.mktemp("cut") / "log", TWO[:size])
    complete = [(1, Pair("a", 1)), (2, Pair("b", 2))][: TWO[:size].count(b"\n")]
    assert list(read_lines(path, Pair)) == complete
    truncate_torn_tail(path)
    assert path.read_bytes() == TWO[: TWO[:size].rfind(b"\n") + 1]
    append_line(path, Pair("c", 3), durable=False)
    assert list(read_lines(path, Pair)) == [*complete, (len(complete) + 1, Pair("c", 3))]


def test_a_missing_file_has_no_torn_tail(tmp_path: Path) -> None:
    """The first writer of all: nothing to cut, nothing created."""
    truncate_torn_tail(tmp_path / "log")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"null",
        b"7",
        b'["name", "value"]',
        b'{"name": "a"}',
        b"\xff\xfe",
        b'{"name": "a", "value": 1}' * 2,
        b"[" * 100_000,
        b"\x00" * 100,
    ],
    ids=["blank", "torn", "null", "number", "array", "short", "not UTF-8", "joined", "deep", "zeros"],
)
def test_damage_is_named_by_file_and_line(tmp_path: Path, damaged: bytes) -> None:
    """The lines before are given; the damaged one stops the reading, whatever follows it."""
    path = write(tmp_path / "log", TWO + damaged + b"\n" + TWO)
    lines = read_lines(path, Pair)
    assert [next(lines)[0], next(lines)[0]] == [1, 2]
    with pytest.raises(DatasetError, match=rf"^{path}:3: damaged line; `rollgen repair` takes it out$"):
        next(lines)


def test_keys_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    """A later MINOR version may add keys."""
    path = write(tmp_path / "log", b'{"name": "a", "value": 1, "more": [2]}\n')
    assert list(read_lines(path, Pair)) == [(1, Pair("a", 1))]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 1}', "a key occurs twice"),
        ('{"a": {"b": 1, "b": 2}}', "a key occurs twice"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[1]", "not an object"),
        ("", "Expecting value"),
    ],
    ids=lambda text: text[:20],
)
def test_objects_that_readers_could_take_differently(text: str, problem: str) -> None:
    """Refused, and not read in one of several ways."""
    with pytest.raises(ValueError, match=problem):
        parse_object(text.encode())


def test_a_line_that_does_not_end(tmp_path: Path) -> None:
    """It is damage once it is longer than any line, whatever follows; what comes before it counts."""
    path = tmp_path / "log"
    append_line(path, Pair("a", 1), durable=False)
    with path.open("ab") as file:
        file.truncate(file.tell() + 3 * MAX_LINE_BYTES)
    lines = read_lines(path, Pair)
    assert next(lines) == (1, Pair("a", 1))
    with pytest.raises(DatasetError, match="log:2: damaged line"):
        next(lines)


def test_a_long_torn_tail_is_cut_off(tmp_path: Path) -> None:
    """Longer than what is looked at in one step; without any line the file is empty then."""
    path = tmp_path / "log"
    for start in (b"a\nb\n", b""):
        path.write_bytes(start + b"x" * 200_000)
        truncate_torn_tail(path)
        assert path.read_bytes() == start


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    """Python would read the first two as infinities, which JSON cannot hold again."""
    with pytest.raises(ValueError, match=f"{number} is not JSON"):
        parse_object(f'{{"a": [{number}]}}'.encode())
