"""Locks in object storage: who is alive, without comparing clocks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar
from uuid import uuid4

import pytest
from models.clocks import SleepersClock

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable, UsageError
from rollgen.format.commit import Holder, Part
from rollgen.remote import lease
from rollgen.remote.lease import Lease, Sign, State, Watch
from rollgen.remote.objects import ObjectStore

LOCK = "journal/w0.lock"
HOLDER = Holder(Part(1, 4), "attempt", "plan")


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://locks/{uuid4().hex}")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepersClock:
    """A minute without a beat passes as soon as somebody waits for it, and not otherwise. Nothing beats."""
    clock = SleepersClock()
    monkeypatch.setattr(lease, "time", clock)
    monkeypatch.setattr(lease, "REFRESH_SECONDS", 600.0)
    monkeypatch.setattr(lease, "DEAD_SECONDS", 660.0)
    return clock


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be asked for before `held`."""
    monkeypatch.setattr(lease, "REFRESH_SECONDS", 0.01)


@pytest.fixture
def living() -> Iterator[Sign]:
    """Of a process of this machine that lives."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = lease._start_of(child.pid)
    assert started is not None
    yield replace(Sign.of_this_process(HOLDER), pid=child.pid, started=started)
    child.communicate(b"\n")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def held(store: ObjectStore, notes: list[str]) -> Iterator[Lease]:
    """A lease of this process."""
    lock = Lease(store, LOCK, HOLDER, Watch(store))
    assert lock.acquire(notes.append) is State.GONE
    yield lock
    lock.release()


def foreign(store: ObjectStore, **changes: object) -> Sign:
    """Leave the lock of a process on another machine."""
    sign = replace(Sign.of_this_process(HOLDER), host="elsewhere", **changes)
    store.replace(LOCK, sign.to_json())
    return sign


def test_a_sign_says_what_it_said() -> None:
    """Of any field; a lock that makes no sense is anyone's, and makes everything."""
    sign = Sign.of_this_process(HOLDER)
    assert Sign.parse(sign.to_json()) == sign
    for content in (b"", b"{}", b"[1]", b'{"part": [4, 4]}', sign.to_json().replace(b'"pid": ', b'"pid": "x')):
        assert Sign.parse(content) == Sign()


def test_held_until_released(store: ObjectStore, held: Lease, notes: list[str]) -> None:
    """Another of this machine is refused at once: the process is alive."""
    other = Lease(store, LOCK, HOLDER, Watch(store))
    with pytest.raises(ResumeRefused, match="another rollgen is writing"):
        other.acquire(notes.append)
    held.release()
    assert store.list() == {}
    assert other.acquire(notes.append) is State.GONE
    other.release()


@pytest.mark.usefixtures("beating")
def test_it_beats(store: ObjectStore, held: Lease) -> None:
    """The object changes by itself, and says what its holder wants."""
    held.say(Holder(Part(1, 4), "attempt", "another plan"))
    before = Sign.parse(store.read(LOCK, 4096))
    while (after := Sign.parse(store.read(LOCK, 4096))).beat == before.beat:
        time.sleep(0.01)
    assert after.holder.plan_sha256 == "another plan"
    assert (after.nonce, after.beat > before.beat) == (before.nonce, True)


def test_a_dead_process_of_this_machine(store: ObjectStore, notes: list[str]) -> None:
    """Its lock is taken over at once, also when its number has been given to another process."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    own = Sign.of_this_process(HOLDER)
    for sign in (replace(own, pid=child.pid), replace(own, started=own.started - 1)):
        store.replace(LOCK, sign.to_json())
        lock = Lease(store, LOCK, HOLDER, Watch(store))
        assert lock.acquire(notes.append) is State.DEAD
        lock.release()
    assert notes == []


def test_a_process_that_nobody_has_waited_for(store: ObjectStore) -> None:
    """A zombie is dead."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = Sign.of_this_process(HOLDER)
    started = lease._start_of(child.pid)
    assert started is not None
    store.replace(LOCK, replace(own, pid=child.pid, started=started).to_json())
    assert Watch(store).look(LOCK)[0] is State.ALIVE
    child.communicate(b"\n")
    assert Watch(store).look(LOCK)[0] is State.DEAD


def test_left_behind_by_this_process(
    store: ObjectStore, notes: list[str], held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that could not be removed keeps nobody waiting: its holder has let go."""
    with monkeypatch.context() as patched:

        def delete(store: ObjectStore, name: str) -> None:
            raise DatasetError(name)

        patched.setattr(ObjectStore, "delete", delete)
        held.release()
    assert Watch(store).look(LOCK)[0] is State.DEAD
    other = Lease(store, LOCK, HOLDER, Watch(store))
    assert other.acquire(notes.append, wait=True) is State.DEAD
    other.release()
    assert notes == []


def test_left_behind_by_a_process_that_lives(store: ObjectStore, notes: list[str], living: Sign) -> None:
    """Or that is suspended: it is alive at first sight, and silent once it has been watched for long enough."""
    store.replace(LOCK, living.to_json())
    with pytest.raises(ResumeRefused, match="another rollgen is writing"):
        Lease(store, LOCK, HOLDER, Watch(store)).acquire(notes.append)
    lock = Lease(store, LOCK, HOLDER, Watch(store))
    assert lock.acquire(notes.append, wait=True) is State.SILENT
    lock.release()


def test_an_old_lock(store: ObjectStore, notes: list[str]) -> None:
    """It needs not be watched: no clock is that wrong."""
    import fsspec

    foreign(store)
    name = f"{store.url.removeprefix('memory:/')}/{LOCK}"
    fsspec.filesystem("memory").store[name].modified -= timedelta(hours=1)
    watch = Watch(store)
    assert [watch.look(LOCK)[0] for _ in range(2)] == [State.SILENT, State.SILENT]
    foreign(store, beat=1)
    assert watch.look(LOCK)[0] is State.ALIVE


@pytest.mark.usefixtures("beating")
def test_it_beats_on_after_an_error(store: ObjectStore, held: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when that was about credentials, which may have been renewed since."""
    refused = threading.Event()

    def replace(store: ObjectStore, name: str, content: bytes) -> None:
        refused.set()
        raise UsageError(name)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "replace", replace)
        assert refused.wait(180)
    before = Sign.parse(store.read(LOCK, 4096))
    while Sign.parse(store.read(LOCK, 4096)).beat == before.beat:
        time.sleep(0.01)


def test_a_storage_that_does_not_create_exclusively(notes: list[str]) -> None:
    """It is found out by a second creation, and refused; nothing is left there."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Careless(MemoryFileSystem):
        protocol = "careless"
        store: ClassVar[dict[str, object]] = {}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return MemoryFileSystem._strip_protocol(path.replace("careless://", "memory://"))

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
            super().pipe_file(path, value)

    fsspec.register_implementation("careless", Careless, clobber=True)
    careless = ObjectStore("careless://bucket/run")
    lock = Lease(careless, LOCK, HOLDER, Watch(careless))
    lock.acquire(notes.append)
    with pytest.raises(UsageError, match="cannot keep two writers apart"):
        lock.prove()
    lock.release()
    assert careless.list() == {}


def test_a_storage_that_creates_exclusively(held: Lease) -> None:
    """The lock stays what it was."""
    held.prove()
    held.check()


def test_silence_elsewhere(store: ObjectStore, notes: list[str], clock: SleepersClock) -> None:
    """A lock of another machine is watched for as long as a beat may be late, then taken; the note says so."""
    foreign(store)
    lock = Lease(store, LOCK, HOLDER, Watch(store))
    started = clock.now
    assert lock.acquire(notes.append) is State.SILENT
    assert clock.now - started >= lease.DEAD_SECONDS
    assert "waiting up to" in notes[0]
    lock.check()
    lock.release()


def test_a_beat_elsewhere(store: ObjectStore, notes: list[str]) -> None:
    """The first change is a sign of life, whatever any clock says."""
    watch = Watch(store)
    sign = foreign(store)
    assert watch.look(LOCK) == (State.UNKNOWN, sign)
    sign = foreign(store, beat=1)
    assert watch.look(LOCK)[0] is State.ALIVE


def test_lost(store: ObjectStore, held: Lease) -> None:
    """Who was taken for dead finds out, stops beating, and does not remove the lock of its successor."""
    sign = foreign(store)
    with pytest.raises(ResumeRefused, match="silent for too long"):
        held.check()
    with pytest.raises(ResumeRefused, match="silent for too long"):
        held.say(HOLDER)
    held.release()
    assert Sign.parse(store.read(LOCK, 4096)) == sign


def test_suspended_in_front_of_a_beat(
    store: ObjectStore, held: Lease, monkeypatch: pytest.MonkeyPatch, clock: SleepersClock
) -> None:
    """It has written over what may have been another's lock: the lock says that it is its own, and it is lost."""
    real = ObjectStore.replace

    def late(store: ObjectStore, name: str, content: bytes) -> None:
        clock.sleep(lease.DEAD_SECONDS)
        real(store, name, content)

    monkeypatch.setattr(ObjectStore, "replace", late)
    with pytest.raises(ResumeRefused, match="silent for too long"):
        held.say(HOLDER)
    monkeypatch.undo()
    assert store.list() == {LOCK: store.size(LOCK)}
    with pytest.raises(ResumeRefused, match="silent for too long"):
        held.check()


def stopped_once(monkeypatch: pytest.MonkeyPatch, clock: SleepersClock) -> threading.Event:
    """The next answer of the storage is DEAD_SECONDS old once it is here; it is set then."""
    real, stopped = ObjectStore.read, threading.Event()

    def read(store: ObjectStore, name: str, max_bytes: int) -> bytes:
        content = real(store, name, max_bytes)
        if not stopped.is_set():
            clock.sleep(lease.DEAD_SECONDS)
            stopped.set()
        return content

    monkeypatch.setattr(ObjectStore, "read", read)
    return stopped


def test_suspended_while_the_lock_is_read(
    store: ObjectStore, held: Lease, monkeypatch: pytest.MonkeyPatch, clock: SleepersClock
) -> None:
    """It asks again before it writes, so that nothing is lost."""
    stopped_once(monkeypatch, clock)
    held.say(Holder(Part(1, 4), "attempt", "another plan"))
    held.check()
    assert Sign.parse(store.read(LOCK, 4096)).holder.plan_sha256 == "another plan"


@pytest.mark.usefixtures("beating")
def test_suspended_while_it_is_read_for_a_beat(
    store: ObjectStore, held: Lease, monkeypatch: pytest.MonkeyPatch, clock: SleepersClock
) -> None:
    """As above, and it beats on."""
    assert stopped_once(monkeypatch, clock).wait(180)
    before, until = Sign.parse(store.read(LOCK, 4096)).beat, time.monotonic() + 180
    while Sign.parse(store.read(LOCK, 4096)).beat < before + 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    held.check()


def test_a_watcher_that_is_suspended(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, clock: SleepersClock) -> None:
    """What it read before that is no sign of silence since then."""
    foreign(store)
    watch = Watch(store)
    assert watch.look(LOCK)[0] is State.UNKNOWN
    stopped_once(monkeypatch, clock)
    assert watch.look(LOCK)[0] is State.UNKNOWN
    assert watch.look(LOCK)[0] is State.SILENT


def test_one_of_many_steps(store: ObjectStore, held: Lease, clock: SleepersClock) -> None:
    """A moment after a check nothing is asked; later it is."""
    held.check()
    foreign(store)
    held.check_again()
    clock.sleep(2.0)
    with pytest.raises(ResumeRefused, match="silent for too long"):
        held.check_again()


@pytest.mark.parametrize("times", [1, 2])
def test_a_lock_that_is_not_found_for_a_moment(
    store: ObjectStore, held: Lease, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """It is listed: its holder has not lost it, and to others it is not gone."""
    real, failed = ObjectStore.read, []

    def read(store: ObjectStore, name: str, max_bytes: int) -> bytes:
        if len(failed) < times:
            failed.append(name)
            raise MissingFile(name)
        return real(store, name, max_bytes)

    monkeypatch.setattr(ObjectStore, "read", read)
    held.check()
    assert failed == [LOCK] * times
    failed.clear()
    assert Watch(store).look(LOCK)[0] is State.ALIVE


def test_a_lock_that_is_listed_and_never_found(
    store: ObjectStore, held: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of it."""

    def read(store: ObjectStore, name: str, max_bytes: int) -> bytes:
        raise MissingFile(name)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "read", read)
        with pytest.raises(Unreadable, match="contradicts itself"):
            held.check()


def test_waiting_for_a_turn(store: ObjectStore, held: Lease, notes: list[str]) -> None:
    """Whoever waits gets the lock once it is released."""
    other = Lease(store, LOCK, HOLDER, Watch(store))

    def note(told: str) -> None:
        notes.append(told)
        held.release()

    assert other.acquire(note, wait=True) is State.GONE
    assert "waiting for another writer" in notes[0]
    other.release()


def test_a_turn_that_is_not_waited_for(store: ObjectStore, held: Lease, notes: list[str]) -> None:
    """Whoever gives up is told whose turn it is; the lock stays its holder's."""
    other = Lease(store, LOCK, HOLDER, Watch(store))
    with pytest.raises(ResumeRefused, match="another rollgen is writing"):
        other.acquire(notes.append, wait=True, given_up=lambda: bool(notes))
    assert "waiting for another writer" in notes[0]
    held.check()


def test_silence_that_is_not_waited_for(store: ObjectStore, notes: list[str]) -> None:
    """Nobody knows yet whether the holder is alive: its lock stays."""
    sign = foreign(store)
    with pytest.raises(ResumeRefused, match="another rollgen is writing"):
        Lease(store, LOCK, HOLDER, Watch(store)).acquire(notes.append, wait=True, given_up=lambda: bool(notes))
    assert "waiting up to" in notes[0]
    assert Sign.parse(store.read(LOCK, 4096)) == sign
