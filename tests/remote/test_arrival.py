"""What a start makes of what others have left: shards that wait, shards without a line, writers that may come back."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from models.clocks import SleepersClock

from rollgen.errors import DatasetError, ResumeRefused, Unreadable
from rollgen.format.commit import WHOLE, Fetched, Holder, Part, WriterSlot
from rollgen.format.done import Problem
from rollgen.format.journal import JournalLine, list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.recovery import renumber
from rollgen.format.writer import ShardWriter
from rollgen.remote import lease
from rollgen.remote.arrival import Arrival, foreign_objects, is_retirement, journal_object
from rollgen.remote.lease import Sign, State, Watch, _start_of
from rollgen.remote.mirror import Mirror
from rollgen.remote.objects import ObjectStore


class Place:
    """A dataset in memory, of which most shards are a few bytes, and a writer's workspace."""

    def __init__(self, directory: Path, manifest: bytes) -> None:
        self.store = ObjectStore(f"memory://arrivals/{uuid4().hex}")
        self.directory = directory
        self.notes: list[str] = []
        self.aside: list[bytes] = []
        self.problem: Problem = lambda table: None
        self.problem_in: Callable[[Path], Problem] = lambda directory: self.problem
        for name in ("data", "journal"):
            (directory / name).mkdir(parents=True)
        self.store.create("rollgen.json", manifest)

    def commit(self, writer: str, number: int, content: bytes, *, shard: bool = True, line: bool = True) -> None:
        name = f"part-{writer}-{number:06d}.parquet"
        sha256 = hashlib.sha256(content).hexdigest()
        if shard:
            self.store.create(f"data/{name}", content)
        if line:
            committed = JournalLine(name, len(content), sha256, "", 1, 1, 1)
            assert self.store.create(journal_object(writer, number), encode_line(committed))

    def wait(self, number: int, content: bytes) -> None:
        (self.directory / f"data/part-w0-{number:06d}.parquet").write_bytes(content)

    def fetched(self, lines: Sequence[JournalLine], columns: Sequence[str]) -> Iterator[Fetched]:
        """Shards that are no more than a few bytes are not there, for those who look at keys."""
        for line in lines:
            path = self.directory / "fetched"
            self.store.download(f"data/{line.file}", path)
            yield Fetched(line, line.file, True, lambda path=path: path)

    def set_aside(self, path: Path) -> Path:
        self.aside.append(path.read_bytes())
        path.unlink()
        return Path("aside")

    @property
    def fences(self) -> set[str]:
        """Objects that retire shards and commit none."""
        return {name for name in self.store.list("journal") if is_retirement(self.store.read(name, 1 << 20))}

    def lock(self, writer: str, part: Part, host: str = "elsewhere") -> None:
        sign = replace(Sign.of_this_process(Holder(part, "attempt")), host=host)
        self.store.replace(f"journal/{writer}.lock", sign.to_json())

    def arrive(
        self, part: Part = WHOLE, *, silent: bool = False, clean: bool = False
    ) -> tuple[int, dict[str, bytes], Arrival]:
        """The next number, what waits in the end, and how it came to that."""
        arrival = Arrival(
            self.store,
            self.directory,
            "w0",
            part,
            Mirror(self.store, self.directory, "w0"),
            Watch(self.store),
            self.notes.append,
            self.fetched,
            self.set_aside,
            self.problem_in,
            clean=clean,
        )
        number = arrival.settle(silent=silent)
        return number, {path.name: path.read_bytes() for path in list_shards(self.directory)}, arrival


@pytest.fixture
def stored(
    tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Any]
) -> tuple[bytes, JournalLine, bytes]:
    """A shard of one sample, what its writer would say of it, and the manifest of its dataset."""
    directory, manifest = tmp_path / "made", make_manifest()
    with WriterSlot(directory, "w9") as slot:
        assert create_manifest(directory, manifest)
        with ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            writer.add(make_completion(0))
    (line,) = read_journal(directory).committed.values()
    return (directory / "data" / line.file).read_bytes(), line, (directory / "rollgen.json").read_bytes()


@pytest.fixture
def shard(stored: tuple[bytes, JournalLine, bytes]) -> bytes:
    """A shard that is sound."""
    return stored[0]


@pytest.fixture
def place(tmp_path: Path, stored: tuple[bytes, JournalLine, bytes]) -> Place:
    return Place(tmp_path / "workspace", stored[2])


@pytest.fixture
def living() -> Iterator[int]:
    """The number of a process of this machine, which lives."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child.pid
    child.communicate(b"\n")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of silence passes as soon as somebody waits for it, and not otherwise."""
    monkeypatch.setattr(lease, "time", SleepersClock())


def test_nothing_there(place: Place) -> None:
    """Numbers begin at 0, and nothing is written."""
    assert place.arrive()[:2] == (0, {})
    assert place.store.list().keys() == {"rollgen.json"}


def test_what_waits_goes_on(place: Place) -> None:
    """In order, from the next number; what has been sent already is removed."""
    place.commit("w0", 0, b"zero")
    for number, content in enumerate((b"zero", b"one", b"two")):
        place.wait(number, content)
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"one", "part-w0-000002.parquet": b"two"})
    assert place.notes == []


def test_what_waits_too_late(place: Place) -> None:
    """Another machine has committed under this number. All that waits may be of use: recovery will see."""
    place.commit("w0", 0, b"of another machine")
    place.wait(0, b"zero")
    place.wait(1, b"one")
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"zero", "part-w0-000002.parquet": b"one"})


def test_what_waits_after_a_retirement(place: Place) -> None:
    """Recovery has retired two shards, under the numbers of those that wait, and was killed: none of these is lost."""
    for number, content in enumerate((b"zero", b"one", b"two")):
        place.wait(number, content)
    for number in range(2):
        lost = JournalLine(f"part-w1-{number:06d}.parquet", 1, "", "", 1, 1, 1, retired=True)
        place.store.create(journal_object("w0", number), encode_line(lost))
    number, waiting, _ = place.arrive()
    assert (number, [*waiting.values()]) == (2, [b"zero", b"one", b"two"])
    assert [*waiting] == [f"part-w0-00000{number}.parquet" for number in (2, 3, 4)]


@pytest.mark.parametrize(
    ("numbers", "first"),
    [([1, 2, 3], 2), ([6, 7], 5), ([4, 9, 10], 8), ([8, 9, 20], 7), ([999_999, 1_000_000], 999_998)],
)
def test_renumbered(tmp_path: Path, numbers: list[int], first: int) -> None:
    """Up, down or both: in order, and none is written over."""
    for number in numbers:
        (tmp_path / f"part-w0-{number:06d}.parquet").write_text(str(number))
    assert [path.read_text() for path in renumber(tmp_path.iterdir(), "w0", first)] == [*map(str, numbers)]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"part-w0-{first + index:06d}.parquet" for index in range(len(numbers))
    }


def test_sent_without_a_line(place: Place, stored: tuple[bytes, JournalLine, bytes]) -> None:
    """Killed between the two: it gets the line that its writer would have written, and needs not wait any more."""
    shard, line, _ = stored
    place.commit("w0", 0, b"zero")
    place.commit("w0", 1, shard, line=False)
    place.wait(1, shard)
    place.wait(2, b"two")
    assert place.arrive()[:2] == (2, {"part-w0-000002.parquet": b"two"})
    assert read_journal(place.directory).committed["part-w0-000001.parquet"] == replace(
        line, file="part-w0-000001.parquet"
    )
    assert not list((place.directory / "data").glob(".tmp-*"))


def test_sent_by_another_machine_without_a_line(place: Place, shard: bytes) -> None:
    """Two shards of one number: the one in the store is committed, the one here goes on under the next number."""
    place.commit("w0", 0, shard, line=False)
    place.wait(0, b"zero")
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"zero"})
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}


def test_sent_damaged_without_a_line(place: Place) -> None:
    """It is retired, stays where it is, and its number is used up."""
    place.commit("w0", 0, b"damaged", line=False)
    assert place.arrive()[:2] == (1, {})
    assert read_journal(place.directory).retired.keys() == {"part-w0-000000.parquet"}
    assert place.store.read("data/part-w0-000000.parquet", 100) == b"damaged"
    assert f"{place.store.url}/data/part-w0-000000.parquet: " in place.notes[0]


def test_a_fetch_that_fails(place: Place, shard: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been retired or fenced then: the next start commits what had been sent."""
    place.commit("w0", 0, shard, line=False)
    with monkeypatch.context() as patched:

        def download(store: ObjectStore, name: str, path: Path) -> None:
            raise Unreadable(name)

        patched.setattr(ObjectStore, "download", download)
        with pytest.raises(Unreadable):
            place.arrive(silent=True)
    assert not place.store.list("journal")
    place.arrive(silent=True)
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}


def test_to_be_replaced(place: Place) -> None:
    """What will be removed is not looked at."""
    place.commit("w0", 0, b"damaged", line=False)
    assert place.arrive(clean=True)[:2] == (0, {})
    assert not place.store.list("journal")


def test_a_silent_predecessor_is_fenced(place: Place) -> None:
    """Its next commit must fail: its number is taken, and its shard retired, whether it comes or not."""
    place.commit("w0", 0, b"zero")
    number, waiting, _ = place.arrive(silent=True)
    assert (number, waiting) == (2, {})
    assert place.fences == {journal_object("w0", 1)}
    assert read_journal(place.directory).retired.keys() == {"part-w0-000001.parquet"}
    with pytest.raises(AssertionError):
        place.commit("w0", 1, b"late")


def test_a_silent_predecessor_had_sent_one(place: Place, shard: bytes) -> None:
    """The shard is committed in its place, and its next number taken."""
    place.commit("w0", 0, shard, line=False)
    number, waiting, _ = place.arrive(silent=True)
    assert (number, waiting, place.fences) == (2, {}, {journal_object("w0", 1)})
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}


def test_a_commit_during_the_fencing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor that commits in the last moment is fenced behind that commit, which counts."""
    real = ObjectStore.create

    def create(store: ObjectStore, name: str, content: bytes) -> bool:
        if name == journal_object("w0", 0):
            monkeypatch.setattr(ObjectStore, "create", real)
            place.commit("w0", 0, b"zero")
        return real(store, name, content)

    monkeypatch.setattr(ObjectStore, "create", create)
    number, waiting, _ = place.arrive(silent=True)
    assert (number, waiting, place.fences) == (2, {}, {journal_object("w0", 1)})
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}


@pytest.mark.parametrize("part", [WHOLE, Part(0, 8)], ids=str)
def test_another_writer_that_is_gone(place: Place, shard: bytes, part: Part) -> None:
    """What it had sent without a line is committed in its place, so that all parts see that its samples are there."""
    place.commit("w1", 3, shard, line=False)
    number, waiting, _ = place.arrive(part)
    assert (number, waiting, place.fences) == (0, {}, set())
    assert read_journal(place.directory).committed.keys() == {"part-w1-000003.parquet"}
    assert journal_object("w1", 0) in place.store.list()


def test_another_writer_that_is_silent(place: Place) -> None:
    """One that could make the same prompts is waited for, then fenced, once; one of another part is let be."""
    place.commit("w1", 0, b"zero")
    place.lock("w1", Part(0, 2))
    place.arrive(Part(1, 2))
    assert (place.fences, place.notes) == (set(), [])
    place.arrive(Part(0, 2))
    assert place.fences == {journal_object("w1", 1)}
    assert "waiting up to" in place.notes.pop()
    assert "journal/w1.lock" not in place.store.list()
    place.arrive(Part(0, 2))
    assert (place.fences, place.notes) == ({journal_object("w1", 1)}, [])


def test_others_are_awaited_before_the_section(place: Place) -> None:
    """So that nobody waits in it: once they have been silent for long enough, that is known."""
    place.lock("w1", Part(0, 2))
    place.lock("start-section", WHOLE)
    _, _, arrival = place.arrive(Part(1, 2))
    arrival.part = WHOLE
    arrival.await_others()
    assert len(place.notes) == 1
    for name in ("w1", "start-section"):
        assert arrival.watch.look(f"journal/{name}.lock")[0] is State.SILENT


def test_another_writer_that_is_alive(place: Place, living: int) -> None:
    """On this machine that is known at once, and refused if it could make the same prompts."""
    sign = replace(Sign.of_this_process(Holder(Part(0, 2))), pid=living, started=_start_of(living))
    place.store.replace("journal/w1.lock", sign.to_json())
    place.arrive(Part(1, 2))
    with pytest.raises(ResumeRefused, match="makes part 0/2 of the prompts"):
        place.arrive(WHOLE)


def test_journal_objects_are_fetched_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look of a start fetches only what has come since."""
    for number in range(3):
        place.commit("w0", number, b"zero")
    fetched, real = [], ObjectStore.download

    def download(store: ObjectStore, name: str, path: Path) -> None:
        fetched.append(name)
        real(store, name, path)

    monkeypatch.setattr(ObjectStore, "download", download)
    place.arrive(silent=True)
    assert sorted(fetched) == [journal_object("w0", number) for number in range(4)]


def test_orphans_of_a_living_writer(place: Place) -> None:
    """A shard between its upload and its line is that writer's business."""
    place.commit("w1", 0, b"zero", line=False)
    place.lock("w1", Part(0, 2))
    assert place.arrive(Part(1, 2))[:2] == (0, {})
    assert place.store.list("journal").keys() == {"journal/w1.lock"}


def test_no_dataset_to_go_on_with(place: Place) -> None:
    """Perhaps it is elsewhere, or only the manifest is lost: what waits is kept, and is not in the way."""
    place.store.delete("rollgen.json")
    place.wait(0, b"zero")
    assert place.arrive()[:2] == (0, {})
    assert place.aside == [b"zero"]
    assert place.notes == [
        f"{place.store.url}: holds no run, though a finished shard waits for it on this machine; it is kept in aside"
    ]


def test_no_dataset_to_replace(place: Place) -> None:
    """What waits goes with it, once all checks have passed."""
    place.store.delete("rollgen.json")
    place.wait(0, b"zero")
    assert place.arrive(clean=True)[:2] == (0, {"part-w0-000000.parquet": b"zero"})
    assert place.aside == []


def test_sent_without_a_line_and_foreign(place: Place, shard: bytes) -> None:
    """Rows that are not planned are of a dataset that was there before: retired, and left where it is."""
    place.problem = lambda table: "row 0: prompt_id is not the plan's"
    place.commit("w0", 0, shard, line=False)
    assert place.arrive()[:2] == (1, {})
    assert read_journal(place.directory).retired.keys() == {"part-w0-000000.parquet"}
    assert "row group 0: row 0: prompt_id is not the plan's: it is of another dataset" in place.notes[0]
    assert place.store.exists("data/part-w0-000000.parquet")


def test_sent_without_a_line_and_stored_elsewhere(place: Place, stored: tuple[bytes, JournalLine, bytes]) -> None:
    """It is retired, and waits for recovery, which sends what is new in it."""
    shard, line, _ = stored
    place.commit("w1", 0, shard, line=False)
    place.store.create("data/part-w0-000000.parquet", shard)
    place.store.create(journal_object("w0", 0), encode_line(replace(line, file="part-w0-000000.parquet")))
    number, waiting, _ = place.arrive()
    assert (number, waiting) == (1, {"part-w0-000001.parquet": shard})
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}
    assert read_journal(place.directory).retired.keys() >= {"part-w1-000000.parquet"}
    assert "some of it has been stored since" in place.notes[0]


def no_plan(anything: object) -> Any:
    """As if the plan were lost, or damaged where it is read later."""
    raise DatasetError("plan.parquet: missing")


@pytest.mark.parametrize("fails", ["problem_in", "problem"])
def test_without_a_plan(place: Place, shard: bytes, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Shards without a line are left to a start that has one, under whatever fences are needed meanwhile."""
    for writer in ("w0", "w1"):
        place.commit(writer, 0, b"zero")
    for number in (1, 2):
        place.store.create(f"data/part-w1-00000{number}.parquet", b"damaged" if number == 2 else shard)
    place.store.create("data/part-w0-000001.parquet", b"damaged")
    place.lock("w1", Part(0, 2))
    with monkeypatch.context() as patched:
        patched.setattr(place, fails, no_plan)
        number, waiting, _ = place.arrive()
    assert (number, waiting) == (2, {})  # the name of the shard that is left is taken
    assert not {f"part-w1-00000{left}.parquet" for left in (1, 2)} & read_journal(place.directory).retired.keys()
    assert place.notes[1:] == [
        "plan.parquet: missing; shards that are finished and not committed are left to the next start: 3"
    ]
    with pytest.raises(AssertionError):
        place.commit("w1", 1, b"late", shard=False)
    place.arrive()
    journal = read_journal(place.directory)
    assert "part-w1-000001.parquet" in journal.committed
    assert {"part-w1-000002.parquet", "part-w0-000001.parquet"} <= journal.retired.keys()


def test_a_copy_is_on_disk_before_the_original_is_retired(
    place: Place, stored: tuple[bytes, JournalLine, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before it has its name, and its name before the fence."""
    shard, line, _ = stored
    place.commit("w1", 0, shard, line=False)
    place.store.create("data/part-w0-000000.parquet", shard)
    place.store.create(journal_object("w0", 0), encode_line(replace(line, file="part-w0-000000.parquet")))
    fsync, rename, create = os.fsync, Path.rename, ObjectStore.create
    events: list[object] = []

    def note_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.extend(("rename", path.stat().st_ino))
        return rename(path, target)

    def note_create(store: ObjectStore, name: str, content: bytes) -> bool:
        events.append("fence")
        return create(store, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", note_fsync)
        patched.setattr(Path, "rename", note_rename)
        patched.setattr(ObjectStore, "create", note_create)
        place.arrive()
    copy = events[events.index("rename") + 1]
    folder = (place.directory / "data").stat().st_ino
    assert events[: events.index("fence") + 1] == [copy, "rename", copy, folder, "fence"]


def test_damage_on_the_way(place: Place, shard: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives cut short once is fetched again before it is retired."""
    place.commit("w0", 0, shard, line=False)
    real = ObjectStore.download

    def download(store: ObjectStore, name: str, path: Path) -> None:
        real(store, name, path)
        if name.endswith(".parquet"):
            path.write_bytes(path.read_bytes()[:-10])
            monkeypatch.setattr(ObjectStore, "download", real)

    monkeypatch.setattr(ObjectStore, "download", download)
    place.arrive()
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}


def test_a_copy_of_a_directory(place: Place) -> None:
    """A journal that was written in a directory counts, and its numbers are not used again."""
    lines = [JournalLine(f"part-w0-00000{number}.parquet", 1, "", "", 1, 1, 1) for number in range(3)]
    place.store.create("journal/w0.jsonl", b"".join(map(encode_line, lines)))
    assert place.arrive()[0] == 3


def test_names_that_lead_elsewhere(place: Place, tmp_path: Path) -> None:
    """An object may have any name; none is written outside of the workspace."""
    place.store.create("tokenizer/../../escaped", b"")
    place.arrive()
    assert not (tmp_path.parent / "escaped").exists()


def test_what_is_foreign() -> None:
    """Own names and locks are not, a lone README is."""
    own = ["rollgen.json", "data/part-w0-000000.parquet", "tokenizer/a/b.json", "journal/w0.lock", "logs/x-w0.log"]
    assert foreign_objects([*own, "README.md"]) == []
    assert foreign_objects(["README.md"]) == ["README.md"]
    assert foreign_objects([*own, "data/x.parquet", "weights.bin"]) == ["data/x.parquet", "weights.bin"]
