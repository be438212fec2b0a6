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

from rollgen.cluster.board import Committed, Died, Failed, Resampled, Started
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


@pytest.fixture
def books(job: Job) -> Books:
    """Those of the job, which has one replica."""
    positions = Positions(job.owed.plan.offsets, [])
    return Books(job, positions, replicas=1, journal=delivery_of(job, positions).journal)


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
