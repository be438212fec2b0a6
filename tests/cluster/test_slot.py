"""The place of one task: shards that a second process finds, and two kinds of processes that must not publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollgen.cluster.receipts import Positions, Receipt, read_receipt
from rollgen.cluster.slot import Abandoned, Employer, Overtaken, TaskSlot
from rollgen.format.commit import WriterSlot, start_section
from rollgen.format.journal import JournalLine, list_shards, read_journal
from rollgen.format.manifest import Manifest
from rollgen.format.retries import RetryList
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

TASK = "r0123456789abcdef"
POSITIONS = Positions(np.array([0, 2, 4, 6]), [])
"""Of three prompts, two samples each."""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[WriterSlot]:
    """A writer that has tasks made for it."""
    with WriterSlot(tmp_path, "w0") as slot:
        yield slot


def task_slot(driver: WriterSlot, committed: list[JournalLine]) -> TaskSlot:
    """A place of TASK, as a replica that starts now has it."""
    employer = Employer(driver.directory, driver.writer, driver.attempt)
    return TaskSlot(employer, TASK, lambda path, line: committed.append(line))


@pytest.fixture
def write(driver: WriterSlot, make_manifest: Callable[..., Manifest]) -> Callable[..., None]:
    """`write(place, completion, ...)`: commit them as one shard."""

    def commit(place: TaskSlot, *completions: Completion) -> None:
        with ShardWriter(place, make_manifest(), commit_interval=math.inf) as writer:
            for completion in completions:
                writer.add(completion)

    return commit


def test_a_second_process_finds_what_the_first_has_stored(driver, write, make_completion) -> None:
    """Two shards of one task; whoever takes it up again goes on with the next number."""
    committed: list[JournalLine] = []
    first = task_slot(driver, committed)
    write(first, make_completion(0, 0))
    write(first, make_completion(0, 1), make_completion(1, 0))
    second = task_slot(driver, committed)
    assert [path.name for path in second.stored] == [f"part-{TASK}-000000.parquet", f"part-{TASK}-000001.parquet"]
    write(second, make_completion(1, 1))
    assert [line.file[-14:] for line in committed] == ["000000.parquet", "000001.parquet", "000002.parquet"]
    assert [line.rows for line in committed] == [1, 2, 1]
    assert not list(driver.directory.glob("data/.tmp-*"))
    assert read_journal(driver.directory).committed == {}, "lines are for the driver to write"


@pytest.mark.parametrize("end", [pytest.param("renew", id="the next round"), pytest.param("leave", id="driver gone")])
def test_nothing_is_published_for_an_attempt_that_is_over(driver, write, make_completion, end: str) -> None:
    """A replica that outlives its attempt is told so before it can store anything."""
    place = task_slot(driver, [])
    if end == "renew":
        with start_section(driver.directory):
            driver.renew()
    else:
        driver.__exit__()
    with pytest.raises(Abandoned):
        write(place, make_completion())
    assert list_shards(driver.directory) == []
    assert not list(driver.directory.glob("data/.tmp-*"))


def test_nothing_is_published_for_a_successor_of_the_driver(driver, write, make_completion) -> None:
    """The lock is held again, by another attempt."""
    place = task_slot(driver, [])
    driver.__exit__()
    with WriterSlot(driver.directory, "w0"), pytest.raises(Abandoned):
        write(place, make_completion())
    assert list_shards(driver.directory) == []


def test_the_slower_of_two_processes_of_a_task_gives_way(driver, write, make_completion) -> None:
    """Both make the same sample. The second to publish learns of the first, and looks again."""
    one, other = task_slot(driver, []), task_slot(driver, [])
    write(one, make_completion())
    with pytest.raises(Overtaken):
        write(other, make_completion())
    assert len(list_shards(driver.directory)) == 1
    assert task_slot(driver, []).stored == one.stored


def test_processes_do_not_share_temporary_files(driver) -> None:
    """Its name is that of the task and the process, and one that the next writer of the dataset clears away."""
    place = task_slot(driver, [])
    place.temporary().touch()
    driver.__exit__()
    with WriterSlot(driver.directory, "w0"):
        assert not place.temporary().exists()


def test_receipt_of_a_shard_with_and_without_its_line(driver, write, make_completion, make_manifest) -> None:
    """Three rows: 3 + 4 tokens with supports, 5 without; the last one was cut."""
    lines: list[JournalLine] = []
    place = task_slot(driver, lines)
    write(
        place,
        make_completion(0, 1, tokens=3),
        make_completion(1, 0, tokens=4),
        make_completion(2, 1, tokens=5, full=True, finish_reason="length"),
    )
    digest = make_manifest().config_digest
    receipts: list[Receipt] = [read_receipt(place.stored[0], line, digest, POSITIONS) for line in (lines[0], None)]
    for receipt in receipts:
        assert receipt.line == lines[0]
        assert receipt.positions.tolist() == [1, 2, 5]
        assert (receipt.masked_tokens, receipt.length_finishes) == (7, 1)


def test_positions_of_retries() -> None:
    """Three prompts of two samples: 0 to 5; a first retry of (0, 1) and (2, 0): 6 and 7; a second of (2, 0): 8."""
    lists = [([0, 2], [1, 0]), ([2], [0])]
    retries = [
        RetryList(number, np.array(prompts), np.array(samples, np.int32), np.full(len(prompts), 9, np.int32))
        for number, (prompts, samples) in enumerate(lists, 1)
    ]
    positions = Positions(np.array([0, 2, 4, 6]), retries)
    assert positions.count == 9
    found = positions.of(np.array([2, 0, 2, 2]), np.array([0, 1, 0, 1]), np.array([1, 1, 2, 0]))
    assert found.tolist() == [7, 6, 8, 5]
