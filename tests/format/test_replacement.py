"""The record that decides a replacement: completed from any point, refused when damaged, never half seen by a reader.

The dataset has shards 0 and 1 of writer w0, with two prompts of two samples each; the replacement is a shard that holds
the rows of both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from models.disk import largest_file

from rollgen.config import digest
from rollgen.errors import DatasetError
from rollgen.format import journal as journal_module
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import committed_shards, is_unfinished, list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import Manifest
from rollgen.format.reader import open_dataset
from rollgen.format.replacement import Replacement, complete, decide, prepare_retired
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

OLD = ("part-w0-000000.parquet", "part-w0-000001.parquet")
NEW = "part-compact-000000.parquet"
RECORD = Path("journal/replacement.json")


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


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def rewrite_record(directory: Path, **changes: Any) -> None:
    """With these keys changed, and a checksum that is right: what another program might have written."""
    record = json.loads((directory / RECORD).read_bytes())
    del record["sha256"]
    record |= changes
    (directory / RECORD).write_text(json.dumps(record | {"sha256": digest(record)}))


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


def test_lines_that_are_there_stay(directory: Path, prepared: Replacement) -> None:
    """Those of the writer's earlier shards; a torn one, which was never a commit, goes."""
    earlier = json.dumps(asdict(replace(prepared.added[0], file="part-compact-000009.parquet", retired=True))) + "\n"
    journal = directory / "journal" / "compact.jsonl"
    journal.write_text(earlier + '{"file": "part-comp')
    decide(directory, prepared)
    complete(directory)
    lines = journal.read_text().splitlines(keepends=True)
    assert lines[0] == earlier
    assert [json.loads(line)["file"] for line in lines[1:]] == [NEW, *OLD]


@pytest.mark.parametrize("prepared_journal", [b"", b'{"file": "part-comp', None], ids=["empty", "torn", "missing"])
def test_the_prepared_journal_is_not_trusted(
    directory: Path, prepared: Replacement, prepared_journal: bytes | None
) -> None:
    """It only keeps the room: it follows from the record, and is written again when it is not what it should be."""
    decide(directory, prepared)
    path = directory / "data" / ".tmp-compact-journal"
    path.unlink()
    if prepared_journal is not None:
        path.write_bytes(prepared_journal)
    complete(directory)
    assert [shard.line for shard in open_dataset(directory).shards] == list(prepared.added)


def test_nothing_is_written_once_it_is_decided(directory: Path, prepared: Replacement) -> None:
    """Not a byte: a disk that is full by then does not stop it."""
    prepare_retired(directory, OLD)
    decide(directory, replace(prepared, keep=True))
    with largest_file(0):
        complete(directory)
    assert names(directory) == [NEW]
    assert not is_unfinished(directory)


@pytest.mark.parametrize("at", ["journal", "record"])
def test_no_room_for_the_decision(directory: Path, prepared: Replacement, at: str) -> None:
    """Nothing has changed, and nothing is left behind. The journal would be the new line, the record more than that."""
    before = contents(directory)
    line = len(encode_line(prepared.added[0]))
    with largest_file(line - (at == "journal")), pytest.raises(OSError, match="File too large"):
        decide(directory, replace(prepared, retired=()))
    assert contents(directory) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"writer": "compact"}', b'{"a": "\\ud800"}']
)
def test_what_is_no_record_is_an_error(directory: Path, content: bytes) -> None:
    """It names the file and what to do, and nothing is touched."""
    (directory / RECORD).write_bytes(content)
    with pytest.raises(DatasetError, match=r"journal/replacement\.json: damaged; put that back from a copy, or go on"):
        complete(directory)
    assert names(directory) == list(OLD)


def test_a_changed_byte_of_the_record_changes_nothing_else(directory: Path, prepared: Replacement) -> None:
    """Whichever it is: of a name, a figure, a key, the checksum; a quarter of them are tried."""
    decide(directory, prepared)
    sound = (directory / RECORD).read_bytes()
    before = contents(directory)
    places = [place for place in range(len(sound)) if sound[place : place + 1].strip()]
    for place in places[::4]:
        damaged = bytearray(sound)
        damaged[place] ^= 1
        (directory / RECORD).write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"journal/replacement\.json: damaged; put that back"):
            complete(directory)
    (directory / RECORD).write_bytes(sound)
    assert contents(directory) == before
    complete(directory)
    assert names(directory) == [NEW]


def changed(line: str, **changes: Any) -> Callable[[Replacement], dict[str, Any]]:
    """A record whose only new shard has another line."""
    return lambda prepared: {line: [asdict(replace(prepared.added[0], **changes))]}


HOSTILE: dict[str, tuple[Callable[[Replacement], dict[str, Any]], str]] = {
    "nothing added": (lambda _: {"added": []}, r"replacement\.json: adds no shard"),
    "a foreign path": (lambda _: {"retired": ["../../etc/passwd"]}, "'../../etc/passwd' is not the name of a shard"),
    "another's name": (changed("added", file="part-w0-000007.parquet"), "is not a shard of the writer 'compact'"),
    "a writer elsewhere": (lambda _: {"writer": "../../x"}, r"is not a shard of the writer '\.\./\.\./x'"),
    "a retired one": (changed("added", retired=True), "adds a shard that is retired"),
    "itself": (lambda _: {"retired": [*OLD, NEW]}, "names a shard twice"),
    "one twice": (lambda _: {"retired": [*OLD, OLD[0]]}, "names a shard twice"),
    "a stranger": (lambda _: {"retired": [*OLD, "part-w0-000002.parquet"]}, "neither those before nor those after"),
    "too few": (lambda _: {"retired": [OLD[0]]}, r"adds Totals\(rows=8, .* but retires Totals\(rows=4, "),
    "tokens": (
        changed("added", tokens=65),
        r"adds Totals\(rows=8, tokens=65, .* but retires Totals\(rows=8, tokens=64,",
    ),
    "bytes": (changed("added", bytes=1), "missing or damaged, though"),
    "sha256": (changed("added", sha256="0" * 64), "missing or damaged, though"),
    "footer": (changed("added", footer_sha256="0" * 64), "missing or damaged, though"),
}


@pytest.mark.parametrize(("change", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_a_record_that_is_not_of_this_dataset(
    directory: Path,
    prepared: Replacement,
    change: Callable[[Replacement], dict[str, Any]],
    expected: str,
) -> None:
    """Its checksum is right, and still nothing is done."""
    decide(directory, prepared)
    rewrite_record(directory, **change(prepared))
    before = contents(directory)
    with pytest.raises(DatasetError, match=expected):
        complete(directory)
    assert contents(directory) == before


def test_rows_are_counted_in_the_file(directory: Path, prepared: Replacement) -> None:
    """Record and journal may agree on what the new shard does not hold."""
    line = replace(prepared.added[0], rows=9)
    decide(directory, replace(prepared, added=(line,)))
    journal = directory / "journal" / "w0.jsonl"
    journal.write_text(journal.read_text().replace('"rows": 4', '"rows": 5', 1))
    with pytest.raises(DatasetError, match="missing or damaged, though"):
        complete(directory)
    assert set(OLD) < set(names(directory))


def test_a_directory_that_cannot_be_written(directory: Path, prepared: Replacement) -> None:
    """Said in one line; the next time it is completed."""
    decide(directory, prepared)
    in_the_way = directory / "journal" / "compact.jsonl"
    if in_the_way.exists():
        in_the_way.unlink()
    in_the_way.mkdir()
    with pytest.raises(DatasetError, match=r"compact\.jsonl: not a regular file"):
        complete(directory)
    in_the_way.rmdir()
    complete(directory)
    assert names(directory) == [NEW]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda kept: kept.touch(), "retired: is there already, and no directory; move it away"),
        (lambda kept: (kept / OLD[1]).mkdir(parents=True), r"retired/part-w0-000001\.parquet: is there already"),
        (
            lambda kept: kept.symlink_to("/dev"),
            "retired: is on another file system than data/|retired: cannot be written",
        ),
    ],
    ids=["a file", "a name taken", "another file system"],
)
def test_nowhere_to_keep_the_old_shards(directory: Path, make: Callable[[Path], None], expected: str) -> None:
    """Said before anything is decided."""
    make(directory / "retired")
    with pytest.raises(DatasetError, match=expected):
        prepare_retired(directory, OLD)


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

    monkeypatch.setattr(journal_module, "list_shards", list_meanwhile)
    journal, paths = committed_shards(directory)
    assert len(looks) == 2
    assert [path.name for path in paths] == [NEW] == list(journal.committed)
