"""What a start makes of what others have left: shards that wait, shards without a line, writers that may come back."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from rollgen.errors import ResumeRefused
from rollgen.format.commit import WHOLE, Holder, Part
from rollgen.format.journal import JournalLine, list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.remote import lease
from rollgen.remote.arrival import Arrival, foreign_objects, journal_object
from rollgen.remote.lease import Sign, Watch
from rollgen.remote.mirror import Mirror
from rollgen.remote.objects import ObjectStore


class Place:
    """A dataset in memory, of which shards are a few bytes, and a writer's workspace."""

    def __init__(self, directory: Path) -> None:
        self.store = ObjectStore(f"memory://arrivals/{uuid4().hex}")
        self.directory = directory
        self.notes: list[str] = []
        for name in ("data", "journal"):
            (directory / name).mkdir(parents=True)
        self.store.create("rollgen.json", b"{}")

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

    def lock(self, writer: str, part: Part, host: str = "elsewhere") -> None:
        sign = replace(Sign.of_this_process(Holder(part, "attempt")), host=host)
        self.store.replace(f"journal/{writer}.lock", sign.to_json())

    def arrive(self, part: Part = WHOLE, *, silent: bool = False) -> tuple[int, dict[str, bytes], Arrival]:
        """The next number, what waits in the end, and how it came to that."""
        arrival = Arrival(
            self.store,
            self.directory,
            "w0",
            part,
            Mirror(self.store, self.directory, "w0"),
            Watch(self.store),
            self.notes.append,
        )
        number = arrival.settle(silent=silent)
        return number, {path.name: path.read_bytes() for path in list_shards(self.directory)}, arrival


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "DEAD_SECONDS", 0.2)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)


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
    """Another machine has committed under this number. What comes after it may be of use: recovery will see."""
    place.commit("w0", 0, b"of another machine")
    place.wait(0, b"zero")
    place.wait(1, b"one")
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"one"})
    assert "are dropped: 1;" in place.notes[0]


def test_sent_without_a_line(place: Place) -> None:
    """Killed between the two: it is fetched, and keeps its number; if it is in the workspace too, that will do."""
    place.commit("w0", 0, b"zero")
    place.commit("w0", 1, b"one", line=False)
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"one"})
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"one"})
    assert journal_object("w0", 1) not in place.store.list()


def test_sent_by_another_machine_without_a_line(place: Place) -> None:
    """Two shards of one number: the one in the store is fenced off, the one here goes on under the next number."""
    place.commit("w0", 0, b"of another machine", line=False)
    place.wait(0, b"zero")
    assert place.arrive()[:2] == (1, {"part-w0-000001.parquet": b"zero"})
    assert read_journal(place.directory).retired.keys() == {"part-w0-000000.parquet"}
    assert place.store.read("data/part-w0-000000.parquet", 100) == b"of another machine"


def test_a_silent_predecessor_is_fenced(place: Place) -> None:
    """Its next commit must fail: its number is taken, and its shard retired, whether it comes or not."""
    place.commit("w0", 0, b"zero")
    number, waiting, arrival = place.arrive(silent=True)
    assert (number, waiting) == (2, {})
    assert arrival.fences == {journal_object("w0", 1)}
    assert read_journal(place.directory).retired.keys() == {"part-w0-000001.parquet"}
    with pytest.raises(AssertionError):
        place.commit("w0", 1, b"late")


def test_a_silent_predecessor_had_sent_one(place: Place) -> None:
    """The shard goes on under a number of ours: retired there, sent again, nothing lost."""
    place.commit("w0", 0, b"zero", line=False)
    assert place.arrive(silent=True)[:2] == (1, {"part-w0-000001.parquet": b"zero"})


def test_a_commit_during_the_fencing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor that commits in the last moment is fenced behind that commit, which counts."""
    real = ObjectStore.create

    def create(store: ObjectStore, name: str, content: bytes) -> bool:
        if name == journal_object("w0", 0):
            monkeypatch.setattr(ObjectStore, "create", real)
            place.commit("w0", 0, b"zero")
        return real(store, name, content)

    monkeypatch.setattr(ObjectStore, "create", create)
    number, waiting, arrival = place.arrive(silent=True)
    assert (number, waiting, arrival.fences) == (2, {}, {journal_object("w0", 1)})
    assert read_journal(place.directory).committed.keys() == {"part-w0-000000.parquet"}


def test_another_writer_that_is_gone(place: Place) -> None:
    """What it had sent without a line is taken over, and its next number taken away."""
    place.commit("w1", 3, b"three", line=False)
    number, waiting, arrival = place.arrive()
    assert (number, waiting) == (0, {"part-w0-000000.parquet": b"three"})
    assert "part-w1-000003.parquet" in read_journal(place.directory).retired
    assert arrival.fences == {journal_object("w1", 0)}


def test_another_writer_that_is_silent(place: Place) -> None:
    """One that could make the same prompts is waited for, then fenced; one of another part is let be."""
    place.commit("w1", 0, b"zero")
    place.lock("w1", Part(0, 2))
    _, _, arrival = place.arrive(Part(1, 2))
    assert (arrival.fences, arrival.others.keys()) == (frozenset(), {"w1"})
    _, _, arrival = place.arrive(Part(0, 2))
    assert (arrival.fences, arrival.others) == ({journal_object("w1", 1)}, {})
    assert "waiting up to" in place.notes[0]


def test_another_writer_that_is_alive(place: Place) -> None:
    """On this machine that is known at once, and refused if it could make the same prompts."""
    place.lock("w1", Part(0, 2), Sign.of_this_process(Holder()).host)
    assert place.arrive(Part(1, 2))[2].others.keys() == {"w1"}
    with pytest.raises(ResumeRefused, match="makes part 0/2 of the prompts"):
        place.arrive(WHOLE)


def test_orphans_of_a_living_writer(place: Place) -> None:
    """A shard between its upload and its line is that writer's business."""
    place.commit("w1", 0, b"zero", line=False)
    place.lock("w1", Part(0, 2))
    assert place.arrive(Part(1, 2))[:2] == (0, {})


def test_no_dataset_to_go_on_with(place: Place) -> None:
    """Without a manifest nothing that waits can be of use."""
    place.store.delete("rollgen.json")
    place.wait(0, b"zero")
    assert place.arrive()[:2] == (0, {})


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
