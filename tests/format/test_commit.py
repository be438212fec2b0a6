"""The commit protocol: names are used once, writers exclude each other, journal and footer hash tell the truth."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.commit import (
    JournalLine,
    WriterSlot,
    file_sha256,
    footer_sha256,
    list_shards,
    parse_shard_name,
    quarantine,
    read_journal,
    shard_name,
)

LINE = JournalLine("part-w0-000000.parquet", 100, "a" * 64, "b" * 64, 1, 2, 3)


def publish(slot: WriterSlot, content: bytes = b"PAR1" + b"x" * 8 + b"\0\0\0\0PAR1") -> JournalLine:
    """Commit some bytes that end like a Parquet file with an empty footer."""
    temporary = slot.temporary()
    temporary.write_bytes(content)
    line = slot.publish(temporary, rows=1, tokens=2, mask_ids=3)
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
    assert read_journal(tmp_path) == ({line.file: line}, frozenset())
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
    assert read_journal(tmp_path) == ({}, frozenset({line.file}))


def test_the_last_line_of_a_file_counts(tmp_path: Path) -> None:
    """A shard that was journaled twice has one entry."""
    with WriterSlot(tmp_path, "w0") as slot:
        slot.append(LINE)
        slot.append(replace(LINE, rows=9))
    assert read_journal(tmp_path).committed == {LINE.file: replace(LINE, rows=9)}


def test_leftovers_of_this_writer_only_are_removed(tmp_path: Path) -> None:
    """Another writer may be alive and building its shard."""
    with WriterSlot(tmp_path, "w0"):
        for name in (".tmp-w0-000000", ".tmp-w0-000007", ".tmp-w1-000000", ".tmp-w01-000000"):
            (tmp_path / "data" / name).touch()
    with WriterSlot(tmp_path, "w0"):
        assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".tmp-w01-000000", ".tmp-w1-000000"]


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
from rollgen.format.commit import WriterSlot

with WriterSlot(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold_slot(directory: Path, writer: str) -> subprocess.Popen[str]:
    """Another process that has the slot until its stdin is closed or it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory), writer]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def take_slot(directory: Path, writer: str) -> None:
    with WriterSlot(directory, writer):
        pass


def test_one_process_at_a_time_has_a_slot(tmp_path: Path) -> None:
    """A second one is refused and told which lock; another writer is free; only death releases the lock."""
    with hold_slot(tmp_path, "w0") as holder:
        leftover = tmp_path / "data" / ".tmp-w0-000000"
        leftover.touch()
        with pytest.raises(ResumeRefused, match=r"journal/w0\.lock: another rollgen is writing this dataset; wait"):
            take_slot(tmp_path, "w0")
        assert leftover.exists(), "a live writer's temporary file was removed"
        take_slot(tmp_path, "w1")
        holder.kill()
    take_slot(tmp_path, "w0")
    assert not leftover.exists()


def test_a_slot_is_free_again_after_its_block(tmp_path: Path) -> None:
    """Also for the same process."""
    for _ in range(2):
        take_slot(tmp_path, "w0")


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
