"""The commit protocol: names are used once, writers exclude each other, journal and footer hash tell the truth."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import (
    WHOLE,
    Holder,
    Part,
    WriterSlot,
    check_writer_name,
    live_writers,
    quarantine,
    read_holder,
    start_section,
    writable,
)
from rollgen.format.journal import (
    JournalLine,
    file_sha256,
    footer_sha256,
    list_shards,
    parse_shard_name,
    read_journal,
    shard_name,
)

LINE = JournalLine("part-w0-000000.parquet", 100, "a" * 64, "b" * 64, 1, 2, 3)


def publish(slot: WriterSlot, content: bytes = b"PAR1" + b"x" * 8 + b"\0\0\0\0PAR1") -> JournalLine:
    """Commit some bytes that end like a Parquet file with an empty footer."""
    temporary = slot.temporary()
    temporary.write_bytes(content)
    line = slot.publish(temporary, rows=1, tokens=2, mask_ids=3)
    slot.append(line)
    temporary.unlink()
    return line


@pytest.mark.parametrize(
    ("writer", "sequence", "name"),
    [
        ("w0", 0, "part-w0-000000.parquet"),
        ("w0", 999_999, "part-w0-999999.parquet"),
        ("w0", 1_000_000, "part-w0-1000000.parquet"),
        ("gpu_7", 12, "part-gpu_7-000012.parquet"),
    ],
)
def test_shard_names_round_trip(writer: str, sequence: int, name: str) -> None:
    """Six digits sort by name; a millionth shard only sorts late, and is still a shard."""
    assert shard_name(writer, sequence) == name
    assert parse_shard_name(name) == (writer, sequence)


@pytest.mark.parametrize(
    "name",
    [
        "part-w0-00000.parquet",
        "part-w0-000000.parquet.bak",
        "part-w-0-000000.parquet",
        "part-w0-000000",
        "xpart-w0-000000.parquet",
        "../part-w0-000000.parquet",
        "part-w0/x-000000.parquet",
        ".tmp-w0-000000",
        "train-00000-of-00001.parquet",
        "",
    ],
)
def test_other_names_are_not_shards(name: str) -> None:
    """Neither temporary nor foreign files, nor paths."""
    assert parse_shard_name(name) is None


def test_only_shards_are_listed(tmp_path: Path) -> None:
    """Sorted by name; what else lies in `data/` is left alone."""
    (tmp_path / "data").mkdir()
    for name in ("part-w1-000000.parquet", "part-w0-000001.parquet", "part-x.parquet", ".tmp-w0-000002", "README"):
        (tmp_path / "data" / name).touch()
    assert [path.name for path in list_shards(tmp_path)] == ["part-w0-000001.parquet", "part-w1-000000.parquet"]
    assert list_shards(tmp_path / "nowhere") == []


def test_publish_links_hashes_and_journals(tmp_path: Path) -> None:
    """The line says what `sha256sum` and `wc -c` say; the footer hash covers length and magic (here 8 bytes)."""
    content = b"PAR1" + b"x" * 8 + b"\0\0\0\0PAR1"
    with WriterSlot(tmp_path, "w0") as slot:
        line = publish(slot, content)
    assert line == JournalLine(
        file="part-w0-000000.parquet",
        bytes=20,
        sha256=hashlib.sha256(content).hexdigest(),
        footer_sha256=hashlib.sha256(content[-8:]).hexdigest(),
        rows=1,
        tokens=2,
        mask_ids=3,
    )
    assert (tmp_path / "data" / line.file).read_bytes() == content
    assert read_journal(tmp_path) == ({line.file: line}, {})
    assert json.loads((tmp_path / "journal" / "w0.jsonl").read_text())["retired"] is False


def test_publish_never_overwrites(tmp_path: Path) -> None:
    """A file that appeared under the next name, by whatever hand, is kept."""
    with WriterSlot(tmp_path, "w0") as slot:
        (tmp_path / "data" / "part-w0-000000.parquet").write_text("precious")
        with pytest.raises(FileExistsError):
            publish(slot)
    assert (tmp_path / "data" / "part-w0-000000.parquet").read_text() == "precious"
    assert read_journal(tmp_path).committed == {}


def test_names_are_never_used_again(tmp_path: Path) -> None:
    """Lost, quarantined, retired or in place: the next shard is numbered past all of them, of this writer."""
    with WriterSlot(tmp_path, "w0") as slot:
        lines = [publish(slot) for _ in range(3)]
        assert [parse_shard_name(line.file) for line in lines] == [("w0", 0), ("w0", 1), ("w0", 2)]
        slot.retire(lines[2])
        (tmp_path / "data" / lines[2].file).unlink()
    with WriterSlot(tmp_path, "w0") as slot:
        assert publish(slot).file == "part-w0-000003.parquet"
        quarantine(tmp_path, tmp_path / "data" / "part-w0-000003.parquet")
    (tmp_path / "journal" / "w0.jsonl").unlink()
    with WriterSlot(tmp_path, "w0") as slot:
        assert publish(slot).file == "part-w0-000004.parquet"
    with WriterSlot(tmp_path, "w1") as slot:
        assert publish(slot).file == "part-w1-000000.parquet"


def test_quarantine_moves_and_deletes_nothing(tmp_path: Path) -> None:
    """The file keeps its name and content, beside `data/`."""
    with WriterSlot(tmp_path, "w0") as slot:
        shard = tmp_path / "data" / publish(slot).file
    content = shard.read_bytes()
    moved = quarantine(tmp_path, shard)
    assert moved == tmp_path / "quarantine" / "part-w0-000000.parquet"
    assert moved.read_bytes() == content
    assert list_shards(tmp_path) == []


def test_retirement_is_final_whatever_the_order(tmp_path: Path) -> None:
    """The retiring line may be in another writer's journal, read before the committing one."""
    with WriterSlot(tmp_path, "w1") as slot:
        line = publish(slot)
    with WriterSlot(tmp_path, "w0") as slot:
        slot.retire(line)
    assert read_journal(tmp_path) == ({}, {line.file: replace(line, retired=True)})


def test_lines_of_a_shard_must_not_differ(tmp_path: Path) -> None:
    """The same line twice is one entry; another one is refused, in whatever file, until the shard is retired."""
    with WriterSlot(tmp_path, "w0") as slot:
        slot.append(LINE)
        slot.append(LINE)
    assert read_journal(tmp_path).committed == {LINE.file: LINE}
    with WriterSlot(tmp_path, "w1") as slot:
        slot.append(replace(LINE, rows=9))
        with pytest.raises(
            DatasetError, match=r"w1\.jsonl:1: part-w0-000000\.parquet has another line, .*`rollgen repair`"
        ):
            read_journal(tmp_path)
        slot.retire(LINE)
    assert read_journal(tmp_path) == ({}, {LINE.file: replace(LINE, retired=True)})


def test_leftovers_of_this_writer_only_are_removed(tmp_path: Path) -> None:
    """Another writer may be alive and building its shard."""
    with WriterSlot(tmp_path, "w0"):
        for name in (".tmp-w0-000000", ".tmp-w0-000007", ".tmp-w1-000000", ".tmp-w01-000000"):
            (tmp_path / "data" / name).touch()
    with WriterSlot(tmp_path, "w0"):
        assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".tmp-w01-000000", ".tmp-w1-000000"]


def test_leftovers_of_a_compaction_are_removed_by_any_writer(tmp_path: Path) -> None:
    """Whole shards, which nobody would use again; but not those of a live writer that took that name."""
    for number, (writer, left) in enumerate([("w0", []), ("compact", [".tmp-compact-000000"])]):
        directory = tmp_path / str(number)
        with WriterSlot(directory, writer, Part(0, 2)):
            (directory / "data" / ".tmp-compact-000000").touch()
            with WriterSlot(directory, "w1", Part(1, 2)):
                assert [path.name for path in (directory / "data").iterdir()] == left


def test_afresh_looks_at_nothing_and_changes_nothing(tmp_path: Path) -> None:
    """So that what is damaged can be removed by whoever holds the slot."""
    with WriterSlot(tmp_path, "w0") as slot:
        slot.append(LINE)
    (tmp_path / "journal" / "replacement.json").write_text("damaged")
    (tmp_path / "journal" / "w0.jsonl").write_text("damaged\n{")
    (tmp_path / "data" / ".tmp-w0-000000").touch()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.suffix != ".lock"}
    with pytest.raises(DatasetError, match=r"replacement\.json: damaged"):
        take_slot(tmp_path, "w0")
    with WriterSlot(tmp_path, "w0", afresh=True) as slot:
        assert slot.temporary().name == ".tmp-w0-000000"
    assert {path: path.stat().st_size for path in before} == before


def test_torn_journal_is_repaired_before_it_grows(tmp_path: Path) -> None:
    """Half a line does not run into the next one."""
    with WriterSlot(tmp_path, "w0") as slot:
        slot.append(LINE)
    path = tmp_path / "journal" / "w0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert read_journal(tmp_path).committed == {LINE.file: LINE}
    with WriterSlot(tmp_path, "w0"):
        assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["../../etc/passwd", "part-w0-000000.parquet/x", "/dev/zero", ""])
def test_journal_names_no_other_file(tmp_path: Path, name: str) -> None:
    """A journal that points outside `data/` is refused, naming the line."""
    with WriterSlot(tmp_path, "w0") as slot:
        slot.append(LINE)
        slot.append(replace(LINE, file=name))
    with pytest.raises(DatasetError, match=r"w0\.jsonl:2: .* is not the name of a shard"):
        read_journal(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from rollgen.format.commit import Part, WriterSlot

with WriterSlot(Path(sys.argv[1]), sys.argv[2], Part(int(sys.argv[3]), int(sys.argv[4]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold_slot(directory: Path, writer: str, part: Part = WHOLE) -> subprocess.Popen[str]:
    """Another process that has the slot until its stdin is closed or it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory), writer, *map(str, part)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def take_slot(directory: Path, writer: str, part: Part = WHOLE) -> None:
    with WriterSlot(directory, writer, part):
        pass


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


def test_starts_wait_for_each_other(tmp_path: Path) -> None:
    """A second start section begins when the first has ended."""
    order: list[str] = []

    def start() -> None:
        with start_section(tmp_path):
            order.append("second")

    with start_section(tmp_path):
        thread = threading.Thread(target=start)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert live_writers(tmp_path) == frozenset(), "the section's lock is no writer's"


def test_a_start_survives_the_directory_being_taken_away(tmp_path: Path) -> None:
    """A start that came to nothing removed what it had made while another one waited: that one makes it again."""
    directory = tmp_path / "out"
    taken: list[bool] = []

    def start() -> None:
        with start_section(directory):
            taken.append((directory / "journal" / "start-section.lock").exists())

    with start_section(directory):
        thread = threading.Thread(target=start)
        thread.start()
        time.sleep(0.1)
        shutil.rmtree(directory)
    thread.join()
    assert taken == [True]


@pytest.mark.parametrize("writer", ["", "a-b", "a b", "é", "../x", "start-section", "w0\n"])
def test_names_that_no_shard_could_carry(writer: str) -> None:
    """Letters, digits and underscores only."""
    with pytest.raises(UsageError, match="is no name for a writer"):
        check_writer_name(writer)


def test_footer_hash_covers_the_whole_footer(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """A change of any byte of the footer, its length or the magic changes the hash; one before it does not."""
    shard = list_shards(make_dataset(tmp_path / "d", shards=1))[0]
    content = bytearray(shard.read_bytes())
    length = pq.read_metadata(shard).serialized_size
    before = footer_sha256(shard)
    assert before == hashlib.sha256(content[-length - 8 :]).hexdigest()
    for position, changes in ((-length - 9, False), (-length - 8, True), (-length // 2, True), (-9, True)):
        content[position] ^= 1
        shard.write_bytes(content)
        assert (footer_sha256(shard) != before) is changes
        content[position] ^= 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes is too short"),
        (b"PAR1PAR1", "8 bytes is too short"),
        (b"PAR1" + b"x" * 20, "no Parquet footer"),
        (b"PAR1" + b"x" * 8 + b"\xff\0\0\0PAR1", "no Parquet footer"),
    ],
    ids=["empty", "short", "no magic", "length past the start"],
)
def test_no_footer_is_an_error(tmp_path: Path, content: bytes, expected: str) -> None:
    """It names the file."""
    path = tmp_path / "shard"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=f"^{path}: {expected}"):
        footer_sha256(path)


def test_file_hash_is_that_of_sha256sum(tmp_path: Path) -> None:
    """Over several chunks: 3 MiB and a byte."""
    content = bytes(range(256)) * (3 << 12) + b"!"
    (tmp_path / "file").write_bytes(content)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_quarantine_takes_over_nothing(tmp_path: Path) -> None:
    """Not even through a link in data/ to what lies there: the file stays what it is."""
    (tmp_path / "data").mkdir()
    (tmp_path / "quarantine").mkdir()
    kept = tmp_path / "quarantine" / "part-w0-000000.parquet"
    kept.write_bytes(b"kept")
    link = tmp_path / "data" / kept.name
    link.symlink_to(f"../quarantine/{kept.name}")
    assert quarantine(tmp_path, link).name == "part-w0-000000.1.parquet"
    assert kept.read_bytes() == b"kept"


@pytest.mark.parametrize("name", ["compact", "repair"])
def test_names_of_commands_are_not_for_writers(name: str) -> None:
    """What lies under them is completed or removed by these commands."""
    with pytest.raises(UsageError, match=f"under which `rollgen {name}` writes"):
        check_writer_name(name)


@pytest.mark.parametrize("name", ["s1of8", "s0of12", "r0123456789abcdef"])
def test_names_of_parts_are_not_for_writers(name: str) -> None:
    """Their siblings pass over them, as if they had none of the same samples."""
    with pytest.raises(UsageError, match="`rollgen generate` gives to its parts"):
        check_writer_name(name)
    check_writer_name(f"{name}_")
