"""The record that decides a replacement: completed from any point, refused when damaged, never half seen by a reader.

The dataset has shards 0 and 1 of writer w0, with two prompts of two samples each; the replacement is a shard that holds
the rows of both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgen.errors import DatasetError
from rollgen.format import replacement as module
from rollgen.format.commit import JournalLine, WriterSlot, list_shards, read_journal
from rollgen.format.manifest import Manifest
from rollgen.format.reader import open_dataset
from rollgen.format.replacement import Replacement, committed_shards, complete, decide, is_unfinished
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

OLD = ("part-w0-000000.parquet", "part-w0-000001.parquet")
NEW = "part-compact-000000.parquet"


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Nothing replaced yet."""
    return make_dataset(tmp_path / "run", shards=2, prompts=2, n=2)


@pytest.fixture
def prepared(
    directory: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Completion]
) -> Replacement:
    """The new shard is there, under its temporary name: made as another dataset's, and carried over."""
    other = directory.parent / "other"
    with (
        WriterSlot(other, "compact") as slot,
        ShardWriter(slot, make_manifest(), commit_interval=math.inf) as writer,
    ):
        for prompt in range(4):
            for sample in range(2):
                writer.add(make_completion(prompt, sample))
    (line,) = read_journal(other).committed.values()
    (other / "data" / NEW).rename(directory / "data" / ".tmp-compact-000000")
    return Replacement("compact", (line,), OLD, keep=False)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "data").iterdir())


def test_nothing_to_complete(directory: Path) -> None:
    """Which is the usual case."""
    assert not is_unfinished(directory)
    complete(directory)
    assert names(directory) == list(OLD)


def test_replaced(directory: Path, prepared: Replacement) -> None:
    """The dataset is the new shard; the journal says so: its line precedes the retirements."""
    decide(directory, prepared)
    assert is_unfinished(directory)
    complete(directory)
    assert names(directory) == [NEW]
    lines = [json.loads(line) for line in (directory / "journal" / "compact.jsonl").read_text().splitlines()]
    assert [(line["file"], line["retired"]) for line in lines] == [(NEW, False), *((name, True) for name in OLD)]
    assert [shard.line for shard in open_dataset(directory).shards] == list(prepared.added)
    assert not is_unfinished(directory)


@pytest.mark.parametrize("writer", ["w0", "w7", "compact"])
def test_whoever_writes_next_completes_it(directory: Path, prepared: Replacement, writer: str) -> None:
    """Before leftovers are removed: the new shard is one of them, by its name."""
    decide(directory, prepared)
    with WriterSlot(directory, writer):
        assert names(directory) == [NEW]


def test_what_was_not_decided_is_a_leftover(directory: Path, prepared: Replacement) -> None:
    """As those of any dead writer; a record that was being written too."""
    (directory / "data" / ".tmp-compact-replacement.json").touch()
    with WriterSlot(directory, "compact"):
        assert names(directory) == list(OLD)
    assert len(prepared.added) == 1


@pytest.mark.parametrize("kept", [1, 100, -1], ids=["a byte", "a third", "all but the newline"])
@pytest.mark.parametrize("whole", [0, 1, 2])
def test_killed_while_appending_to_the_journal(
    directory: Path, prepared: Replacement, whole: int, kept: int, tmp_path: Path
) -> None:
    """After `whole` lines and a part of the next: what is there is not written twice."""
    decide(directory, prepared)
    record = (directory / "journal" / module.RECORD_FILE).read_bytes()
    content = {path: path.read_bytes() for path in (directory / "data").iterdir()}
    complete(directory)
    journal = directory / "journal" / "compact.jsonl"
    complete_journal = journal.read_bytes()
    lines = complete_journal.splitlines(keepends=True)
    for path, old in content.items():  # back to before the old shards went
        path.write_bytes(old)
    (directory / "journal" / module.RECORD_FILE).write_bytes(record)
    journal.write_bytes(b"".join(lines[:whole]) + lines[whole][:kept])
    complete(directory)
    assert journal.read_bytes() == complete_journal
    assert names(directory) == [NEW]


@pytest.mark.parametrize("linked", [False, True])
def test_a_damaged_new_shard_deletes_nothing(directory: Path, prepared: Replacement, linked: bool) -> None:
    """Under either name; the old shards are in place, and once the file is back it goes on."""
    decide(directory, prepared)
    path = directory / "data" / ".tmp-compact-000000"
    if linked:
        path = path.rename(directory / "data" / NEW)
    content = path.read_bytes()
    for damaged in (content[:-1], b"", None):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"missing or damaged, though journal/replacement\.json counts on it"):
            complete(directory)
        assert set(OLD) <= set(names(directory))
    path.write_bytes(content)
    complete(directory)
    assert names(directory) == [NEW]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "damaged"),
        ('{"writer": "compact"}', "damaged"),
        ('{"writer": "compact", "added": [], "retired": ["../../etc/passwd"], "keep": false}', "not the name of a"),
    ],
    ids=["empty", "incomplete", "a foreign path"],
)
def test_a_damaged_record_is_an_error(directory: Path, content: str, expected: str) -> None:
    """It names the file, and nothing is touched."""
    (directory / "journal" / module.RECORD_FILE).write_text(content)
    with pytest.raises(DatasetError, match=rf"journal/replacement\.json: .*{expected}"):
        complete(directory)
    assert names(directory) == list(OLD)


def test_a_directory_that_cannot_be_written(directory: Path, prepared: Replacement) -> None:
    """Said in one line; the next time it is completed."""
    decide(directory, prepared)
    in_the_way = directory / "journal" / "compact.jsonl"
    if in_the_way.exists():
        in_the_way.unlink()
    in_the_way.mkdir()
    with pytest.raises(DatasetError, match=r"Is a directory; the next command that writes here completes"):
        complete(directory)
    in_the_way.rmdir()
    complete(directory)
    assert names(directory) == [NEW]


def test_readers_refuse_what_is_not_complete(directory: Path, prepared: Replacement) -> None:
    """They would see rows twice, or not at all."""
    decide(directory, prepared)
    with pytest.raises(DatasetError, match=rf"^{directory}: is being compacted, .* `rollgen compact {directory}`$"):
        open_dataset(directory)


@pytest.mark.parametrize("first", [True, False], ids=["before the listing", "after it"])
def test_a_reader_sees_one_moment(
    directory: Path, prepared: Replacement, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole replacement happens while a reader is between the journal and the listing, or past it: it looks again."""
    looks: list[list[Path]] = []

    def list_meanwhile(where: Path) -> list[Path]:
        before = list_shards(where)
        if not looks:
            decide(where, prepared)
            complete(where)
        looks.append(list_shards(where) if first else before)
        return looks[-1]

    monkeypatch.setattr(module, "list_shards", list_meanwhile)
    journal, paths = committed_shards(directory)
    assert len(looks) == 2
    assert [path.name for path in paths] == [NEW] == list(journal.committed)


def test_lines_round_trip(directory: Path) -> None:
    """What was decided is what is carried out, field by field."""
    line = JournalLine(NEW, 100, "a" * 64, "b" * 64, 1, 2, 3)
    decided = Replacement("compact", (line,), OLD, keep=True)
    decide(directory, decided)
    assert module._read(directory / "journal" / module.RECORD_FILE) == decided
