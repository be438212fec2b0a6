"""What the driver makes of the news: what cannot be written is told like everything else that goes wrong."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.jobs import some_job

from rollgen.cluster.board import Alive, Committed, Died, Failed, Loaded, Resampled, Rested, Started
from rollgen.cluster.books import Books
from rollgen.cluster.delivery import delivery_of
from rollgen.cluster.receipts import Positions, Receipt
from rollgen.config import RunConfig
from rollgen.engines.base import SampleRequest
from rollgen.errors import DatasetError, EngineError, ResumeRefused, TooManyFailures
from rollgen.format.commit import WriterSlot, start_section
from rollgen.format.failures import read_failures
from rollgen.format.journal import JournalLine, read_journal
from rollgen.format.manifest import Manifest
from rollgen.loop.crew import Job
from rollgen.loop.stop import Stop
from rollgen.preflight import plan_run
from rollgen.prompts.plan import Plan


@pytest.fixture
def job(runs: Any, tmp_path: Path, make_manifest: Callable[..., Manifest]) -> Iterator[Job]:
    """Five prompts, two samples each, of which one may fail."""
    config = RunConfig.model_validate({"model": str(runs.model), "n": 2, "max_restarts": 1})
    preflight = plan_run([runs.prompts], config, tmp_path / "plan.parquet")
    plan = Plan(tmp_path / "plan.parquet")
    with WriterSlot(tmp_path / "books", "w0") as slot:
        yield some_job(slot, preflight, make_manifest(), plan)


class Clock:
    """Stands still, unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """That of the books."""
    return Clock()


@pytest.fixture
def books(job: Job, clock: Clock) -> Books:
    """Those of the job, which has one replica."""
    positions = Positions(job.owed.plan.offsets, [])
    return Books(job, positions, replicas=1, journal=delivery_of(job, positions).journal, clock=clock)


@pytest.fixture
def wait(books: Books, clock: Clock) -> Callable[..., None]:
    """`wait(seconds, name, ...)`: look at the news every second, while these give signs of life."""

    def looks(seconds: int, *alive: str) -> None:
        for _ in range(seconds):
            clock.now += 1
            books.enter([(name, Alive()) for name in alive])

    return looks


def committed(*positions: int) -> Committed:
    """News of a shard with these samples."""
    line = JournalLine("part-r0123456789abcdef-000000.parquet", 9, "a", "b", len(positions), tokens=5, mask_ids=7)
    return Committed(Receipt(line, np.array(positions), masked_tokens=5, length_finishes=1))


def test_a_shard_counts_once(books: Books, job: Job) -> None:
    """However often it is told of."""
    books.enter([("a", committed(0, 1)), ("b", committed(0, 1))])
    assert (job.stats.stored, job.stats.tokens, len(job.owed)) == (2, 5, 8)
    assert len(read_journal(job.slot.directory).committed) == 1


def test_a_journal_that_cannot_be_written(books: Books, job: Job) -> None:
    """One line, which says what and where; the shard counts as not told of."""
    journal = job.slot.directory / "journal" / "w0.jsonl"
    journal.mkdir()
    with pytest.raises(DatasetError, match=r"journal line of part-r0123456789abcdef-000000.parquet cannot be written"):
        books.enter([("a", committed(0))])
    journal.rmdir()
    books.enter([("a", committed(0))])
    assert job.stats.stored == 1


def test_too_many_failures(books: Books, job: Job) -> None:
    """The second one ends it; both are recorded, one that is told twice counts once."""
    prompts = list(job.owed.plan.rows())
    told = [Failed(SampleRequest(prompts[index], 1), "engine", "does not fit") for index in (0, 0, 3)]
    books.enter([("a", each) for each in told[:2]])
    assert books.problem is None
    books.enter([("a", told[2])])
    assert isinstance(books.problem, TooManyFailures)
    assert str(books.problem).startswith(
        "2 samples failed, more than --max-failures 1 allows, the last one (p3, 1) for: does not fit; see failures/"
    )
    assert [failure.prompt_index for failure in read_failures(job.slot.directory)] == [0, 3]


def test_what_failed_and_was_then_made_has_not_failed(books: Books, job: Job) -> None:
    """By a replica that took the task over."""
    [prompt, *_] = job.owed.plan.rows()
    books.enter([("a", Failed(SampleRequest(prompt, 0), "engine", "x")), ("b", committed(0))])
    assert (job.stats.failed, job.stats.stored) == (0, 1)


def test_deaths_are_counted(books: Books, job: Job) -> None:
    """One restart is allowed; a start without a word of the end before is a death too."""
    books.enter([("a", Started("here, process 1")), ("a", Resampled(2)), ("a", Started("here, process 2"))])
    assert (books.problem, job.stats.restarts, job.stats.resampled) == (None, 1, 2)
    books.enter([("a", Died("out of memory"))])
    assert isinstance(books.problem, EngineError)
    assert "the replica on here, process 2 has died: out of memory after 1 restarts" in str(books.problem)


def test_three_deaths_of_one_replica_are_enough(job: Job) -> None:
    """Without a sample in between: whatever another one does, and however many restarts are left."""
    positions = Positions(job.owed.plan.offsets, [])
    books = Books(job, positions, replicas=9, journal=delivery_of(job, positions).journal)
    books.enter([("a", Died("x")), ("a", Died("x")), ("b", Died("x")), ("b", committed(0)), ("b", Died("x"))])
    assert books.problem is None
    books.enter([("a", Died("x"))])
    assert "that is 3 times without storing a sample; finished samples are stored" in str(books.problem)


@pytest.mark.timeout(180)
def test_an_interrupted_round_waits_for_nobody(job: Job) -> None:
    """Not for whom is in the start section either: what has not been told of is found by the next attempt."""
    delivery = delivery_of(job, Positions(job.owed.plan.offsets, []))

    async def interrupted() -> None:
        with Stop(), start_section(job.slot.directory):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(ResumeRefused, match="another rollgen starts or leaves there"):
                list(delivery.untold([], []))

    asyncio.run(interrupted())


def test_a_replica_that_is_silent(books: Books, job: Job, wait: Callable[..., None]) -> None:
    """For the stall timeout of ten minutes: it counts as dead, once, and again when it has been started again."""
    books.enter([(name, each) for name in "ab" for each in (Started(f"node {name}, process 1"), Loaded())])
    wait(599, "b")
    assert books.silent == []
    wait(1, "b")
    assert books.silent == ["a"]
    books.lost("a")
    assert (books.problem, books.silent, job.stats.restarts) == (None, [], 1)
    assert job.reporter.notes == [
        "the replica on node a, process 1 has died: no sign of life for 600 s (--stall-timeout); Ray starts it again "
        "(0 more restarts are allowed)"
    ]
    books.enter([("a", Started("node a, process 2"))])
    assert job.stats.restarts == 1, "that is the start that was told of"
    wait(600, "b")
    assert books.silent == ["a"]
    books.lost("a")
    assert "process 2 has died: no sign of life for 600 s (--stall-timeout) after 1 restarts" in str(books.problem)


def test_who_was_let_go_has_not_died(books: Books, job: Job, wait: Callable[..., None]) -> None:
    """There was nothing left to do for it."""
    books.enter([("a", Started("x")), ("a", Loaded())])
    wait(600)
    books.let_go("a")
    assert (books.silent, books.problem, job.stats.restarts, job.reporter.notes) == ([], None, 0, [])


def test_the_rest_waits_for_those_who_were_heard_of_lately(books: Books, wait: Callable[..., None]) -> None:
    """Neither for one who has committed all it had, nor for one whose node is gone, for example."""
    books.enter([(name, Started(name)) for name in "abc"])
    wait(15, "a", "b")
    assert not books.at_rest
    books.enter([("a", Rested())])
    assert not books.at_rest
    books.enter([("b", Rested())])
    assert books.at_rest


def test_silence_is_that_of_all(books: Books, wait: Callable[..., None]) -> None:
    """From the beginning of a round, and from the last sign of life of any replica."""
    wait(50)
    assert books.silence == 50
    books.begin_round()
    wait(20)
    assert books.silence == 20
    books.enter([("a", Alive())])
    assert books.silence == 0
    wait(30)
    assert books.silence == 30


def test_time_that_the_driver_slept_is_no_silence(books: Books, clock: Clock, wait: Callable[..., None]) -> None:
    """It was stopped for an hour, and so was all of a local Ray, for example."""
    books.enter([("a", Started("x"))])
    clock.now += 3600
    wait(1)
    assert (books.silent, books.silence) == ([], 3)


def test_an_engine_that_loads_for_long(books: Books, job: Job, wait: Callable[..., None]) -> None:
    """Is told of once, for each process, and waited for: it is no death."""
    books.enter([("a", Started("here, process 1")), ("b", Started("there")), ("b", Loaded())])
    wait(599, "a", "b")
    assert job.reporter.notes == []
    wait(900, "a", "b")
    [note] = job.reporter.notes
    assert note.startswith("the replica on here, process 1 has been loading its engine for 600 s, and is waited for;")
    assert (books.silent, books.problem, job.stats.restarts) == ([], None, 0)
