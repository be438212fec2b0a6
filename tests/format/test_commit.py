"""The commit protocol: names are used once, nothing is overwritten, leftovers are removed by those who may."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from models.slots import LINE, take_slot

from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import Part, WriterSlot, check_writer_name, quarantine
from rollgen.format.journal import JournalLine, list_shards, parse_shard_name, read_journal


def publish(slot: WriterSlot, content: bytes = b"PAR1" + b"x" * 8 + b"\0\0\0\0PAR1") -> JournalLine:
    """Commit some bytes that end like a Parquet file with an empty footer."""
    temporary = slot.temporary()
    temporary.write_bytes(content)
    line = slot.publish(temporary, rows=1, tokens=2, mask_ids=3)
    slot.append(line)
    temporary.unlink()
    return line


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


@pytest.mark.parametrize("writer", ["", "a-b", "a b", "é", "../x", "start-section", "w0\n"])
def test_names_that_no_shard_could_carry(writer: str) -> None:
    """Letters, digits and underscores only."""
    with pytest.raises(UsageError, match="is no name for a writer"):
        check_writer_name(writer)


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
