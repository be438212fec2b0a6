"""The failure log: one line for each sample that could not be made, by every writer, across crashes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollgen.errors import DatasetError
from rollgen.format.failures import FailureLog, read_failures


def test_failures_of_all_writers_are_read(tmp_path: Path) -> None:
    """In the order of the writers' names, then of recording."""
    logs = {writer: FailureLog(tmp_path, writer) for writer in ("w1", "w0")}
    logs["w1"].record("p1", 1, 0, "capture", "no mask")
    logs["w0"].record("p0", 0, 0, "input", "prompts.jsonl:1: empty")
    logs["w0"].record("p0", 0, 1, "invariant", "token 0: 👋 is not in its support")
    found = [(f.prompt_id, f.prompt_index, f.sample_index, f.stage, f.error) for f in read_failures(tmp_path)]
    assert found == [
        ("p0", 0, 0, "input", "prompts.jsonl:1: empty"),
        ("p0", 0, 1, "invariant", "token 0: 👋 is not in its support"),
        ("p1", 1, 0, "capture", "no mask"),
    ]


def test_time_is_utc(tmp_path: Path) -> None:
    """ISO 8601 to the second, of now."""
    before = datetime.now(UTC).replace(microsecond=0)
    FailureLog(tmp_path, "w0").record("p", 0, 0, "engine", "out of memory")
    [failure] = read_failures(tmp_path)
    written = datetime.fromisoformat(failure.time)
    assert written.tzinfo == UTC
    assert before <= written <= datetime.now(UTC)


def test_a_line_is_one_line_of_json(tmp_path: Path) -> None:
    """Errors with newlines stay on their line, so that `grep` and `jq` work."""
    FailureLog(tmp_path, "w0").record("p", 0, 0, "engine", "first\nsecond")
    [line] = (tmp_path / "failures" / "w0.jsonl").read_text().splitlines()
    assert json.loads(line)["error"] == "first\nsecond"


def test_lines_without_a_generation_are_of_the_plan(tmp_path: Path) -> None:
    """Format 1.0 wrote none; a retry's line says which one."""
    log = FailureLog(tmp_path, "w0")
    log.record("p", 0, 0, "engine", "one")
    log.record("p", 0, 0, "engine", "two", generation=2)
    path = tmp_path / "failures" / "w0.jsonl"
    path.write_text(path.read_text().replace(', "generation": 0', ""))
    assert [(failure.error, failure.generation) for failure in read_failures(tmp_path)] == [("one", 0), ("two", 2)]


def test_a_torn_line_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    """A reader skips it, and a later line does not run into it."""
    FailureLog(tmp_path, "w0").record("p", 0, 0, "engine", "one")
    path = tmp_path / "failures" / "w0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"prompt_id": "q", "pro')
    assert [failure.error for failure in read_failures(tmp_path)] == ["one"]
    FailureLog(tmp_path, "w0").record("p", 0, 1, "engine", "two")
    assert [failure.error for failure in read_failures(tmp_path)] == ["one", "two"]


def test_nothing_failed(tmp_path: Path) -> None:
    """No directory, or an empty one: no failures."""
    assert list(read_failures(tmp_path)) == []
    FailureLog(tmp_path, "w0")
    assert list(read_failures(tmp_path)) == []


def test_damage_is_named(tmp_path: Path) -> None:
    """File and line."""
    FailureLog(tmp_path, "w0").record("p", 0, 0, "engine", "one")
    path = tmp_path / "failures" / "w0.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(DatasetError, match=rf"^{path}:1: damaged line"):
        list(read_failures(tmp_path))
