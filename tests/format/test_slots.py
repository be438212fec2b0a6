"""Writers exclude each other, parts that go together do not, and starts wait: by locks that end with a process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from models.clocks import SleepersClock
from models.disk import NO_HARD_LINKS, no_hard_links
from models.slots import LINE, hold_slot, take_slot

from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format import locks
from rollgen.format.commit import WHOLE, Holder, Part, WriterSlot, live_writers, read_holder, start_section, writable


def test_one_process_at_a_time_has_a_slot(tmp_path: Path) -> None:
    """A second one is refused and told which lock; one of another part is free; only death releases the lock."""
    with hold_slot(tmp_path, "w0", Part(0, 2)) as holder:
        leftover = tmp_path / "data" / ".tmp-w0-000000"
        leftover.touch()
        with pytest.raises(ResumeRefused, match=r"journal/w0\.lock: another rollgen is writing this dataset; wait"):
            take_slot(tmp_path, "w0", Part(1, 2))
        assert leftover.exists(), "a live writer's temporary file was removed"
        take_slot(tmp_path, "w1", Part(1, 2))
        holder.kill()
    take_slot(tmp_path, "w0")
    assert not leftover.exists()


def test_a_slot_is_free_again_after_its_block(tmp_path: Path) -> None:
    """Also for the same process."""
    for _ in range(2):
        take_slot(tmp_path, "w0")


@pytest.mark.parametrize(
    ("part", "other", "conflicts"),
    [
        (Part(0, 1), Part(0, 1), True),
        (Part(0, 3), Part(0, 3), True),
        (Part(0, 3), Part(1, 3), False),
        (Part(0, 2), Part(1, 4), True),
        (Part(1, 4), WHOLE, True),
    ],
)
def test_parts_conflict_unless_they_are_two_of_one_division(part: Part, other: Part, conflicts: bool) -> None:
    """0/2 and 1/4 share no prompt, but a third writer would find no place beside them: refused."""
    assert part.conflicts(other) is other.conflicts(part) is conflicts


def test_a_conflicting_part_is_refused_and_named(tmp_path: Path) -> None:
    """The one who is alive keeps its place; the refused one leaves no lock."""
    with hold_slot(tmp_path, "a", Part(0, 2)) as holder:
        with pytest.raises(
            ResumeRefused, match=r"writer 'a' is alive and makes part 0/2 .* which part 0/1 of writer 'b'"
        ):
            take_slot(tmp_path, "b")
        assert live_writers(tmp_path) == {"a"}
        with WriterSlot(tmp_path, "b", Part(1, 2)) as slot:
            assert live_writers(tmp_path) == {"a", "b"}
            assert [other.part for other in slot.others().values()] == [Part(0, 2)]
        holder.kill()
    take_slot(tmp_path, "b")
    assert live_writers(tmp_path) == frozenset()


def test_a_silent_lock_is_of_the_whole(tmp_path: Path) -> None:
    """One that was written by an earlier version says nothing of parts."""
    with hold_slot(tmp_path, "a", Part(0, 2)) as holder:
        (tmp_path / "journal" / "a.lock").write_bytes(b"")
        with pytest.raises(ResumeRefused, match="makes part 0/1"):
            take_slot(tmp_path, "b", Part(1, 2))
        holder.kill()


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        b"\xff\n",
        b"[0, 2]",
        b"{}",
        b'{"part": 7}',
        b'{"part": [0]}',
        b'{"part": ["0", "2"]}',
        b'{"part": [0.0, 2.0]}',
        b'{"part": [2, 2]}',
        b'{"part": [-1, 2]}',
        b'{"part": [0, 0]}',
        b'{"part": [0, 100000000000000000000]}',
        b'{"part": [1, 2], "part": [0, 2]}',
        b"[" * 100_000,
        b" " * (1 << 20) + b'{"part": [0, 2]}',
    ],
    ids=range(15),
)
def test_garbage_in_the_lock_of_a_live_writer(tmp_path: Path, content: bytes) -> None:
    """It is refused in one line: whoever holds that lock would not keep to a part."""
    with hold_slot(tmp_path, "a", Part(0, 2)) as holder:
        lock = tmp_path / "journal" / "a.lock"
        lock.write_bytes(content)
        with pytest.raises(DatasetError, match=rf"^{lock}: damaged, though its writer is alive; stop that.*$"):
            take_slot(tmp_path, "b", Part(1, 2))
        holder.kill()
    with WriterSlot(tmp_path, "a", Part(0, 2)) as slot:
        slot.declare("5" * 64)
        said = {"part": [0, 2], "attempt": slot.attempt, "plan_sha256": "5" * 64}
        assert json.loads(lock.read_bytes()) == said
        assert read_holder(tmp_path, "a") == Holder(slot.part, slot.attempt, "5" * 64)


@pytest.mark.parametrize("name", ["other.lock", "w0.lock", "start-section.lock"])
def test_a_pipe_in_place_of_a_lock(tmp_path: Path, name: str) -> None:
    """It is refused, and nobody waits for its other end; `live_writers` does not look at the section's."""
    (tmp_path / "journal").mkdir()
    os.mkfifo(tmp_path / "journal" / name)
    with pytest.raises(DatasetError, match=rf"/{name}: not a regular file"):
        take_slot(tmp_path, "w0")
    if name != "start-section.lock":
        with pytest.raises(DatasetError, match=rf"/{name}: not a regular file"):
            live_writers(tmp_path)


def test_locks_that_cannot_be_opened(tmp_path: Path) -> None:
    """A link to nothing is nobody's; one to itself, or a directory, cannot be told."""
    journal = tmp_path / "journal"
    journal.mkdir()
    (journal / "a.lock").symlink_to("nothing")
    assert live_writers(tmp_path) == frozenset()
    (journal / "b.lock").mkdir()
    with pytest.raises(DatasetError, match=r"/b\.lock: not a regular file"):
        live_writers(tmp_path)
    (journal / "b.lock").rmdir()
    (journal / "b.lock").symlink_to("b.lock")
    with pytest.raises(DatasetError, match=r"/b\.lock: cannot be opened, .*: Too many levels of symbolic links"):
        live_writers(tmp_path)


def test_a_refused_slot_is_not_kept(tmp_path: Path) -> None:
    """Also when the journal cannot be read: the same process may try again."""
    with WriterSlot(tmp_path, "w0") as slot:
        slot.append(LINE)
    journal = tmp_path / "journal" / "w0.jsonl"
    sound = journal.read_bytes()
    journal.write_bytes(b"damaged\n")
    with pytest.raises(DatasetError, match=r"w0\.jsonl:1: damaged line"):
        take_slot(tmp_path, "w0")
    journal.write_bytes(sound)
    take_slot(tmp_path, "w0")


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """An engine that was forked and outlives its parent does not block the restart."""
    with WriterSlot(tmp_path, "w0"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        take_slot(tmp_path, "w0")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "make room there"),
        (errno.EROFS, r"make it writable, or use another directory \(for a dataset, a c"),
    ],
    ids=["full", "read-only"],
)
def test_a_lock_that_cannot_be_written_is_named(tmp_path: Path, number: int, fix: str) -> None:
    """Whether the system names the file, as for opening it, or does not, as for writing."""
    for error in (OSError(number, "Why"), OSError(number, "Why", str(tmp_path / "w0.lock"))):
        with (
            pytest.raises(UsageError, match=rf"/w0\.lock: cannot be written: Why; {fix}"),
            writable(tmp_path / "w0.lock"),
        ):
            raise error


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_no_hard_links(tmp_path: Path, number: int) -> None:
    """Seen when the slot is taken, and nothing is left of the trial; so is what a kill left of one."""
    with no_hard_links(number), pytest.raises(UsageError) as refused:
        take_slot(tmp_path, "w0")
    assert str(refused.value).startswith(f"{tmp_path}: {NO_HARD_LINKS}write to another directory (")
    assert str(refused.value).endswith("or to s3://bucket/run")
    assert not list(tmp_path.rglob(".tmp-*"))
    for name in (".tmp-w0-link", ".tmp-w0-link-2"):
        (tmp_path / name).touch()
    take_slot(tmp_path, "w0")
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_link_that_fails_otherwise(tmp_path: Path) -> None:
    """It says nothing about hard links."""
    with no_hard_links(errno.EIO), pytest.raises(UsageError, match="cannot be written: Input/output error"):
        take_slot(tmp_path, "w0")


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once another thread has opened a lock and asks for it."""
    asked, flock = threading.Event(), fcntl.flock

    def announced(file: Any, operation: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            asked.set()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", announced)
    return asked


def test_starts_wait_for_each_other(tmp_path: Path, asking: threading.Event) -> None:
    """A second start section begins when the first has ended."""
    order: list[str] = []

    def start() -> None:
        with start_section(tmp_path):
            order.append("second")

    with start_section(tmp_path):
        thread = threading.Thread(target=start)
        thread.start()
        assert asking.wait(180)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert live_writers(tmp_path) == frozenset(), "the section's lock is no writer's"


def test_a_start_survives_the_directory_being_taken_away(tmp_path: Path, asking: threading.Event) -> None:
    """A start that came to nothing removed what it had made while another one waited: that one makes it again."""
    directory = tmp_path / "out"
    taken: list[bool] = []

    def start() -> None:
        with start_section(directory):
            taken.append((directory / "journal" / "start-section.lock").exists())

    with start_section(directory):
        thread = threading.Thread(target=start)
        thread.start()
        assert asking.wait(180)
        shutil.rmtree(directory)
    thread.join()
    assert taken == [True]


def test_a_lock_is_asked_for_again_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looked at it for an instant, and this one was stopped then: the lock is free, and it gets it."""
    clock, flock, tries = SleepersClock(), fcntl.flock, []

    def stopped(file: Any, operation: int) -> None:
        tries.append(operation)
        if len(tries) == 1:
            clock.sleep(2 * locks._LOCK_SECONDS)
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr(fcntl, "flock", stopped)
    lock = locks.open_lock(tmp_path / "journal" / "w0.lock")
    assert lock is not None
    lock.close()
