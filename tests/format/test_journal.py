"""The journal: names and lines of shards, what is refused in it, and hashes that tell the truth."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from models.slots import LINE

from rollgen.errors import DatasetError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256, footer_sha256, list_shards, parse_shard_name, read_journal, shard_name


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
