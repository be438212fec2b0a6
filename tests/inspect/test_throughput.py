"""The history of a dataset's speed, by the times of its files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from models.times import STARTED, set_times, write_log

from rollgen.format.manifest import read_manifest, replace_manifest
from rollgen.format.reader import open_dataset
from rollgen.inspect.throughput import POINTS, Throughput, throughput

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def history(directory: Path) -> Throughput | None:
    return throughput(open_dataset(directory))


def tokens_of_shards(directory: Path) -> list[int]:
    return [shard.line.tokens for shard in open_dataset(directory).shards if shard.line is not None]


def test_rates_add_up(make_dataset: Callable[..., Any]) -> None:
    """Commits 10, 30 and 50 seconds after the start: three levels over 50 parts of a second each."""
    directory, _ = make_dataset(0)
    set_times(directory, [10, 30, 50])
    found = history(directory)
    assert found is not None
    one, two, three = tokens_of_shards(directory)
    assert (found.seconds, found.tokens) == (pytest.approx(50), one + two + three)
    assert found.rates == pytest.approx([one / 10] * 10 + [two / 20] * 20 + [three / 20] * 20)
    assert found.mean == pytest.approx(found.tokens / 50)


def test_parts_are_few(make_dataset: Callable[..., Any]) -> None:
    """A long run has no more of them, and still all its tokens."""
    directory, _ = make_dataset(0)
    set_times(directory, [1000, 5000, 9000])
    found = history(directory)
    assert found is not None
    assert len(found.rates) == POINTS
    assert np.mean(found.rates) * found.seconds == pytest.approx(found.tokens)


@pytest.fixture
def resumed(make_dataset: Callable[..., Any]) -> Path:
    """A second attempt began 1000 seconds after the first."""
    directory: Path = make_dataset(0).directory
    manifest = read_manifest(directory)
    again = manifest.attempts[0].model_copy(update={"started_at": "2026-01-02T03:20:45+00:00"})
    replace_manifest(directory, manifest.model_copy(update={"attempts": [*manifest.attempts, again]}))
    return directory


def test_pauses_are_left_out(resumed: Path) -> None:
    """The second attempt takes 10 seconds for its shard; the logs say when each of them sampled."""
    directory = resumed
    write_log(directory, "w0", 0, ended=30)
    write_log(directory, "w0", 1000)
    set_times(directory, [10, 30, 1010], manifest=1000)
    found = history(directory)
    assert found is not None
    one, two, three = tokens_of_shards(directory)
    assert found.seconds == pytest.approx(40)
    assert found.rates == pytest.approx([one / 10] * 10 + [two / 20] * 20 + [three / 10] * 10)


def test_writers_beside_each_other(make_dataset: Callable[..., Any], commit: Callable[..., None]) -> None:
    """What two make at the same time adds up."""
    directory, completions = make_dataset(0)
    commit(directory, completions[:4], "w1")  # the same keys again, which is no matter here
    set_times(directory, [10, 20, 30, 15])
    found = history(directory)
    assert found is not None
    one, two, three, other = tokens_of_shards(directory)
    beside = [other / 15] * 15 + [0] * 15
    alone = [one / 10] * 10 + [two / 10] * 10 + [three / 10] * 10
    assert found.rates == pytest.approx([a + b for a, b in zip(alone, beside, strict=True)])


def test_a_copy_tells_nothing(make_dataset: Callable[..., Any]) -> None:
    """The files were written long after the start that the manifest records."""
    assert history(make_dataset(0).directory) is None


@pytest.mark.parametrize("logs", [False, True])
def test_a_copy_that_was_resumed_tells_nothing(resumed: Path, logs: bool) -> None:
    """The first two shards have the time of the copy, after their attempt and before the one that goes on."""
    if logs:
        write_log(resumed, "w0", 0, ended=30)
        write_log(resumed, "w0", 1000)
    set_times(resumed, [900, 900.1, 1010], manifest=1000)
    assert history(resumed) is None


@pytest.mark.parametrize(("ended", "told"), [(None, True), (50, True), (40, False)])
def test_commits_lie_in_what_the_log_says(make_dataset: Callable[..., Any], ended: float | None, told: bool) -> None:
    """The last shard is of second 50: after the end of the log it was fetched again. A log may be behind if it has no
    end."""
    directory, _ = make_dataset(0)
    write_log(directory, "w0", 0, ended=ended)
    set_times(directory, [10, 30, 50])
    assert (history(directory) is not None) is told


@pytest.mark.parametrize("later", [0, 60])
def test_a_copy_of_a_run_that_goes_on_tells_nothing(make_dataset: Callable[..., Any], later: float) -> None:
    """Its shards, commits of ten hours, and its log have the time of the copy, within what the log may be silent."""
    directory, _ = make_dataset(0)
    write_log(directory, "w0", 35_950)
    (log,) = (directory / "logs").iterdir()
    set_times(directory, [35_970, 35_980, 35_990], manifest=0)
    assert history(directory) is not None
    os.utime(log, (STARTED + 35_950 + later,) * 2)
    assert (history(directory) is None) is bool(later)


@pytest.mark.parametrize(
    ("commits", "told"),
    [([40, 40.01, 40.02], False), ([40, 40, 40], False), ([40, 41, 43], True), ([1, 1.05, 40], True)],
    ids=["a copy", "at one time", "a short end", "a short beginning"],
)
def test_commits_that_come_all_at_once(make_dataset: Callable[..., Any], commits: list[float], told: bool) -> None:
    """In a copy from soon after the start, without logs: ten samples in 40 seconds, and hundreds in the next one."""
    directory, _ = make_dataset(0)
    set_times(directory, commits)
    assert (history(directory) is not None) is told


def test_a_shard_that_was_fetched_again_tells_nothing(make_dataset: Callable[..., Any]) -> None:
    """It is newer than the one that was committed after it."""
    directory, _ = make_dataset(0)
    set_times(directory, [10, 60, 50])
    assert history(directory) is None


def test_rewritten_shards_tell_nothing(make_dataset: Callable[..., Any]) -> None:
    """A compaction's shards have its time."""
    from rollgen.curate.compact import compact

    directory, _ = make_dataset(0)
    set_times(directory, [10, 30, 50])
    assert compact(directory).replaced
    set_times(directory, [60] * len(open_dataset(directory).shards))
    assert history(directory) is None


def test_nothing_is_stored_yet(empty_dataset: Path) -> None:
    """No commit, no speed."""
    set_times(empty_dataset, [])
    assert history(empty_dataset) is None
