"""How fast a run is, by the times of its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.times import begin, set_times, write_log

from rollgen.format.commit import Part, WriterSlot
from rollgen.format.journal import list_shards
from rollgen.format.schema import JOURNAL_DIR
from rollgen.inspect.status import run_status


def as_written_by(directory: Path, *writers: str) -> None:
    """Rename the shards, of which there is a line each in the journal of `w0`."""
    journal = directory / JOURNAL_DIR / "w0.jsonl"
    for path, writer in zip(list_shards(directory), writers, strict=True):
        name = path.name.replace("w0", writer)
        path.rename(path.with_name(name))
        journal.write_text(journal.read_text().replace(path.name, name))


def test_rate_and_time_left(make_dataset: Callable[..., Any]) -> None:
    """Three commits 10, 30 and 50 seconds after the start: all tokens in 50 seconds. A third of 36 samples is left."""
    directory, completions = make_dataset(0)
    set_times(directory, [10, 30, 50])
    tokens = sum(len(completion.token_ids) for completion in completions)
    stopped = run_status(directory)
    assert stopped.tokens_per_second == pytest.approx(tokens / 50)
    assert stopped.seconds_left is None  # nobody is writing
    with WriterSlot(directory, "w0"):
        begin(directory)
        assert run_status(directory).seconds_left == pytest.approx(50 / 3)  # 12 owed of 36 stored in 50 s
    assert stopped.writers[0].last_commit == "2026-01-02T03:04:55+00:00"


def test_one_of_two_writers_has_begun(make_dataset: Callable[..., Any]) -> None:
    """The run goes on, at the speed of the one that is at work."""
    directory, completions = make_dataset(0)
    set_times(directory, [10, 30, 50])
    tokens = sum(len(completion.token_ids) for completion in completions)
    with WriterSlot(directory, "w0", Part(0, 2)), WriterSlot(directory, "w1", Part(1, 2)):
        begin(directory)
        status = run_status(directory)
    assert status.state == "running"
    assert status.tokens_per_second == pytest.approx(tokens / 50)


def test_rate_is_of_the_last_attempt(make_dataset: Callable[..., Any]) -> None:
    """Shards of earlier attempts are not counted: the third was made in 20 seconds."""
    directory, completions = make_dataset(0)
    set_times(directory, [-9000, -8000, 20])
    tokens = sum(len(completion.token_ids) for completion in completions[24:])
    assert run_status(directory).tokens_per_second == pytest.approx(tokens / 20)


def test_rate_is_of_the_last_commits(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 30 seconds looked at: the tokens of the last two, in the time since the first."""
    monkeypatch.setattr("rollgen.inspect.speed.RECENT_SECONDS", 30.0)
    directory, completions = make_dataset(0)
    set_times(directory, [100, 110, 130])
    tokens = sum(len(completion.token_ids) for completion in completions[12:])
    assert run_status(directory).tokens_per_second == pytest.approx(tokens / 30)


@pytest.mark.parametrize(
    ("commits", "manifest"),
    [([-3, -2, -1], 0.0), ([0, 0, 0], 0.0), ([10, 30, 50], 3600.0)],
    ids=["no commit yet", "no time has passed", "a copy"],
)
def test_no_rate_where_there_is_none(make_dataset: Callable[..., Any], commits: list[float], manifest: float) -> None:
    """None, rather than a number that was not measured: a copied directory has the times of the copy."""
    directory, _ = make_dataset(0)
    set_times(directory, commits, manifest=manifest)
    with WriterSlot(directory, "w0"):
        begin(directory)
        status = run_status(directory)
    assert (status.tokens_per_second, status.seconds_left) == (None, None)


def test_loading_is_no_part_of_the_speed(make_dataset: Callable[..., Any]) -> None:
    """A model that loads for 40 seconds after the attempt began: all tokens were made in the other 10."""
    directory, completions = make_dataset(0)
    set_times(directory, [45, 45, 50])
    write_log(directory, "w0", 40)
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert run_status(directory).tokens_per_second == pytest.approx(tokens / 10)


def test_parts_have_a_speed_each(make_dataset: Callable[..., Any]) -> None:
    """The third began 100 seconds after the others, whose time begins with theirs and not with the last start."""
    directory, completions = make_dataset(0)
    as_written_by(directory, "s0of3", "s1of3", "s2of3")
    set_times(directory, [10, 10, 20])
    for writer, seconds in (("s0of3", -90), ("s1of3", -40), ("s2of3", 0)):
        write_log(directory, writer, seconds)
    tokens = [sum(len(it.token_ids) for it in completions[third : third + 12]) for third in (0, 12, 24)]
    expected = tokens[0] / 100 + tokens[1] / 50 + tokens[2] / 20
    assert run_status(directory).tokens_per_second == pytest.approx(expected)


def test_tasks_of_a_cluster_are_one_writer(make_dataset: Callable[..., Any]) -> None:
    """Their driver keeps the journal and the log; their tokens were made in the 20 seconds since it began."""
    directory, completions = make_dataset(0)
    as_written_by(directory, *(f"r{number:016x}" for number in range(3)))
    set_times(directory, [40, 49, 50])
    write_log(directory, "w0", 30)
    status = run_status(directory)
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert status.tokens_per_second == pytest.approx(tokens / 20)
    assert [writer.name for writer in status.writers] == [f"r{number:016x}" for number in range(3)]


def test_a_log_that_says_nothing(make_dataset: Callable[..., Any]) -> None:
    """Logs are for people: one that is no text, or another kind of file, leaves the start of the attempt."""
    directory, completions = make_dataset(0)
    set_times(directory, [10, 30, 50])
    write_log(directory, "w0", 40)
    [log] = (directory / "logs").iterdir()
    log.write_bytes(b"\xff phase: generate\n")
    os.mkfifo(log.with_name("20260102T030406-w0.log"))
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert run_status(directory).tokens_per_second == pytest.approx(tokens / 50)
