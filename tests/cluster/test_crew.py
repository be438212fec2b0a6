"""Whole runs on a local Ray, with fake engines: every planned sample is stored once, whatever dies."""

from __future__ import annotations

import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
from models.cluster_engines import FAILING, POISON
from models.runs import Recorder, keys

from rollgen.errors import EngineError, UsageError
from rollgen.format.failures import read_failures
from rollgen.format.journal import list_shards, read_journal
from rollgen.loop.report import RunStats
from rollgen.verify.dataset import verify_dataset

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
"""One after the other: clusters of one machine would see each other."""

PROMPTS, N = 20, 3


def stored(out: Path) -> list[tuple[int, int]]:
    """All stored keys, sorted, duplicates kept."""
    tables = [pq.read_table(path, columns=["prompt_index", "sample_index"]) for path in list_shards(out)]
    return sorted(key for table in tables for key in zip(*(c.to_pylist() for c in table.columns), strict=True))


def check_whole(out: Path, n: int = N) -> None:
    """Exactly what is planned, each shard with its journal line, nothing half written."""
    assert stored(out) == keys(PROMPTS, n)
    assert read_journal(out).committed.keys() == {path.name for path in list_shards(out)}
    assert not list(out.glob("data/.tmp-*"))


def test_every_sample_is_stored_once(ray_runs: Any) -> None:
    """60 samples of two replicas: the totals are those of the shards, and nothing is owed to another start."""
    stats = ray_runs()
    check_whole(ray_runs.out)
    assert (stats.stored, stats.failed, stats.restarts, stats.exit_code) == (60, 0, 0, 0)
    table = pq.read_table(ray_runs.out / "data")
    tokens = sum(table["response_length"].to_pylist())
    assert (stats.tokens, stats.mask_ids, stats.masked_tokens) == (tokens, 2 * tokens, tokens)
    assert stats.length_finishes == table["finish_reason"].to_pylist().count("length")
    assert ray_runs.reporter.phases == ["check", "load", "generate"]
    assert ray_runs.reporter.last is stats
    assert ray_runs(resume=True).stored == 0


def test_failures_are_recorded_and_owed_to_the_next_attempt(ray_runs: Any) -> None:
    """One sample of 60 fails: exit 3, one failure line; no other attempt of this one."""
    stats = ray_runs("failing")
    assert (stats.stored, stats.failed, stats.owed, stats.exit_code) == (59, 1, 1, 3)
    [failure] = read_failures(ray_runs.out)
    assert (failure.prompt_index, failure.sample_index, failure.stage, failure.error) == (
        *FAILING,
        "engine",
        "does not fit",
    )


def test_a_dead_engine_is_started_again(ray_runs: Any) -> None:
    """The replica ends itself, Ray starts it again, and what it had finished is not made twice."""
    stats = ray_runs("fragile")
    check_whole(ray_runs.out)
    assert (stats.stored, stats.restarts, stats.exit_code) == (60, 1, 0)
    [note] = ray_runs.reporter.notes
    assert "the device fell off the bus" in note
    assert "Ray starts it again (9 more restarts are allowed)" in note


class Ordered(Recorder):
    """Phases among the notes."""

    def phase(self, name: str) -> None:
        super().phase(name)
        self.notes.append(name)


def test_a_replica_that_stands_still_is_started_again(ray_runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one, whose process is stopped. First it is said that nobody is there, then who it was."""
    monkeypatch.setattr("rollgen.cluster.books.LATELY_SECONDS", 10.0)
    monkeypatch.setattr("rollgen.cluster.crew.PATIENCE_SECONDS", 5.0)
    stats = ray_runs("stopped", replicas=1, stall_timeout=1, reporter=Ordered())
    check_whole(ray_runs.out)
    assert (stats.stored, stats.exit_code) == (60, 0)
    assert stats.restarts >= 1  # more where one that is well is silent for so long
    notes = ray_runs.reporter.notes
    dead = r"the replica on .*, process \d+ has died: no sign of life for \d+ s \(--stall-timeout\)"
    death, *_ = [place for place, note in enumerate(notes) if re.match(dead, note)]
    assert any(note.startswith("--ray: no sign of life of any replica for ") for note in notes[:death])


def test_poison_keeps_nothing_else_from_being_made(ray_runs: Any) -> None:
    """A sample that kills every process that makes it: all others are stored, then the run ends with an error."""
    with pytest.raises(EngineError, match="its process ended without a word"):
        ray_runs("poisoned", replicas=1)
    assert stored(ray_runs.out) == [key for key in keys(PROMPTS, N) if key != POISON]


def test_engines_that_never_start_end_the_run(ray_runs: Any) -> None:
    """Three times by one replica is enough."""
    with pytest.raises(EngineError, match=r"has died: out of memory; .*3 times without storing a sample"):
        ray_runs("unloadable", replicas=1)
    assert stored(ray_runs.out) == []


class Deserting(Recorder):
    """Takes the driver's board away when something is stored."""

    def progress(self, stats: RunStats) -> None:
        super().progress(stats)
        if stats.stored:
            for name in ray.util.list_named_actors():
                ray.kill(ray.get_actor(name))


def test_a_cluster_that_is_lost(ray_runs: Any) -> None:
    """As its head, or this node, is: told in one line, with what to do."""
    with pytest.raises(EngineError) as caught:
        ray_runs("slow", n=12, commit_interval=0.2, reporter=Deserting())
    assert str(caught.value) == (
        "Ray ended the job: its head, or its part on this node, does not answer any more; finished samples are stored, "
        "continue with --resume"
    )


def test_a_refusal_where_it_would_run_leaves_no_directory(ray_runs: Any) -> None:
    """Said by a process of the cluster, before anything is made."""
    with pytest.raises(UsageError, match="no such engine here"):
        ray_runs("refused")
    assert not ray_runs.out.exists()


def test_who_gives_up_has_a_crew_no_more(
    ray_runs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the engine is looked at, which takes so long that it is said: nothing is made."""
    monkeypatch.setattr("rollgen.cluster.crew.PATIENCE_SECONDS", 0.0)
    with pytest.raises(EngineError, match="interrupted while the cluster was waited for"):
        ray_runs("endless", given_up=lambda: "the node that was asked what the engine will be" in caplog.text)
    assert not ray_runs.out.exists()


def test_a_crew_that_nobody_has_leaves_the_cluster(ray_runs: Any) -> None:
    """The process joins it, makes a crew and loses it: Ray is shut down, and standard output is put back."""
    process = ray_runs.lose_crew()
    process.join(180)
    assert process.exitcode == 0


def test_interrupted_then_killed_then_continued(ray_runs: Any) -> None:
    """SIGTERM commits what is finished, kill -9 of the driver loses no shard, a third attempt makes just the rest."""
    n, out = 6, ray_runs.out
    first = ray_runs.start("third", n)
    wait_for_lines(out, 1, first)
    first.terminate()
    first.join(180)
    assert first.exitcode == 128 + signal.SIGTERM
    before = stored(out)
    assert read_journal(out).committed.keys() == {path.name for path in list_shards(out)}

    second = ray_runs.start("two_thirds", n)
    wait_for_lines(out, len(read_journal(out).committed) + 1, second)
    second.kill()
    second.join(180)
    assert 0 < len(before) < len(stored(out)) < PROMPTS * n

    stats = ray_runs(resume=True, n=n)
    assert stats.stored_before + stats.stored == PROMPTS * n
    check_whole(out, n)
    assert verify_dataset(out).is_clean


def wait_for_lines(out: Path, count: int, process: BaseProcess) -> None:
    """Until the journal has so many lines."""
    journal, deadline = out / "journal/w0.jsonl", time.monotonic() + 180
    while not journal.exists() or journal.read_bytes().count(b"\n") < count:
        assert process.exitcode is None
        assert time.monotonic() < deadline, "no commit in time"
        time.sleep(0.02)
