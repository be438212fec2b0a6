"""The writer of rewards: alone under its name, and nothing half-written is ever seen."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.disk import NO_HARD_LINKS, largest_file, no_hard_links
from models.rewards import SCORER, write_rewards

from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.manifest import read_manifest
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import ScorerRecord, list_parts, part_schema, read_parts


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Twelve samples."""
    return make_dataset(tmp_path / "run")


def writer_of(directory: Path, name: str = "correct") -> RewardWriter:
    return RewardWriter(directory, name, read_manifest(directory).config_digest)


def rows(count: int, first: int = 0) -> pa.Table:
    """With keys that no dataset has."""
    numbers = range(first, first + count)
    keys = {"prompt_id": [f"p{n}" for n in numbers], "prompt_index": numbers, "sample_index": [0] * count}
    others = {"generation": [0] * count, "tokens_crc32": [1] * count, "reward": [0.5] * count, "error": [None] * count}
    return pa.table(keys | others, schema=part_schema(()))


def write(writer: RewardWriter, table: pa.Table) -> None:
    writer.write(table, (), SCORER, scoring=1, closes=False)


def test_parts_are_numbered(dataset: Path) -> None:
    """After the last one, whatever lies between."""
    with writer_of(dataset) as writer:
        write(writer, rows(2))
        write(writer, rows(1))
    last = dataset / "rewards" / "correct-000001.parquet"
    assert [
        (part.path, part.record.sequence)
        for part in read_parts(dataset, "correct", read_manifest(dataset).config_digest)
    ] == [
        (last.with_name("correct-000000.parquet"), 0),
        (last, 1),
    ]
    list_parts(dataset, "correct")[0].unlink()
    with writer_of(dataset) as writer:
        write(writer, rows(1))
    assert [path.name for path in list_parts(dataset, "correct")] == [last.name, "correct-000002.parquet"]


def test_a_part_without_rows(dataset: Path) -> None:
    """As one that only closes a scoring may be."""
    with writer_of(dataset) as writer:
        write(writer, rows(0))
        ((_, record),) = writer.parts()
    assert (record.rows, pq.read_metadata(list_parts(dataset, "correct")[0]).num_rows) == (0, 0)


def test_large_parts_have_row_groups(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many rows, here two; every page has a checksum."""
    monkeypatch.setattr("rollgen.format.reward_writer._ROW_GROUP_ROWS", 2)
    with writer_of(dataset) as writer:
        write(writer, rows(5))
    (path,) = list_parts(dataset, "correct")
    assert pq.read_metadata(path).num_row_groups == 3
    assert pq.read_table(path, page_checksum_verification=True).equals(rows(5))


def test_one_writer_at_a_time(dataset: Path) -> None:
    """Of a name; those of others do not wait for it. Afterwards the next one may."""
    with writer_of(dataset):
        with pytest.raises(ResumeRefused, match=r"correct.lock: another rollgen is making these rewards; wait for it"):
            writer_of(dataset).__enter__()
        with writer_of(dataset, "other"):
            pass
    with writer_of(dataset):
        pass


def test_a_start_that_fails(dataset: Path) -> None:
    """Here because somebody's directory is where a temporary file is removed: the lock is free again."""
    leftover = dataset / "rewards" / ".tmp-correct-000000"
    leftover.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"tmp-correct-000000: cannot be written: Is a directory"):
            writer_of(dataset).__enter__()


def test_leftovers_of_a_dead_writer(dataset: Path) -> None:
    """They go, those of other names stay: somebody may be at work there."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    mine, others = (dataset / "rewards" / f".tmp-{name}-000001" for name in ("correct", "correct_2"))
    for path in (mine, others):
        path.write_bytes(b"half")
    with writer_of(dataset):
        pass
    assert (mine.exists(), others.exists()) == (False, True)


def test_a_full_disk(dataset: Path) -> None:
    """The file is named, nothing of it is left, and what was committed is there."""
    with writer_of(dataset) as writer:
        write(writer, rows(1))
        with (
            largest_file(2000),
            pytest.raises(DatasetError, match=r"/rewards/.tmp-correct-000001: cannot be written: "),
        ):
            write(writer, rows(20_000))
        assert sorted(path.name for path in (dataset / "rewards").glob(".tmp-*")) == [], "it would fill the disk"
        write(writer, rows(2, first=9))
    assert [pq.read_metadata(path).num_rows for path in list_parts(dataset, "correct")] == [1, 2]


def test_no_hard_links(dataset: Path) -> None:
    """Seen before anything is scored; the error of a later part is not one of permissions."""
    with no_hard_links(), pytest.raises(UsageError, match=NO_HARD_LINKS):
        writer_of(dataset).__enter__()
    with writer_of(dataset) as writer:
        with no_hard_links(), pytest.raises(DatasetError, match=f"^{dataset}/rewards: {NO_HARD_LINKS}"):
            write(writer, rows(1))
        write(writer, rows(1))
    assert [path.suffix for path in (dataset / "rewards").iterdir() if path.suffix != ".lock"] == [".parquet"]


@pytest.mark.parametrize(
    ("scorer", "table"),
    [
        (ScorerRecord("exact_match", None, field="\ud800"), rows(1)),
        (SCORER, rows(1).set_column(5, "reward", pa.array([math.inf]))),
        (SCORER, rows(1).set_column(5, "reward", pa.array([None], pa.float64()))),
    ],
    ids=["no UTF-8", "not finite", "neither"],
)
def test_what_readers_would_refuse(dataset: Path, scorer: ScorerRecord, table: pa.Table) -> None:
    """It is never committed."""
    with writer_of(dataset) as writer, pytest.raises(DatasetError, match="cannot be written"):
        writer.write(table, (), scorer, scoring=1, closes=False)
    assert list(dataset.glob("rewards/*.parquet")) == []


def test_a_dataset_that_was_removed_meanwhile(dataset: Path) -> None:
    """By `--clean`, for example: its rewards are not put into the next one."""
    with writer_of(dataset) as writer:
        shutil.rmtree(dataset / "rewards")
        (dataset / "rewards").mkdir()
        (dataset / "rewards" / "correct.lock").touch()
        with pytest.raises(DatasetError, match=r"correct.lock: was removed, perhaps with the dataset; score again"):
            write(writer, rows(1))
    assert list_parts(dataset, "correct") == []


@pytest.mark.parametrize("name", ["rewards", "rewards/correct.lock"])
def test_nothing_is_written_through_a_link(dataset: Path, tmp_path: Path, name: str) -> None:
    """Not into a directory elsewhere, nor a file."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    outside = tmp_path / "outside"
    (dataset / name).rename(outside)
    (dataset / name).symlink_to(outside)
    with pytest.raises(UsageError, match=rf"/{name}: is a link, and what is written into a dataset must not"):
        writer_of(dataset).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(dataset: Path) -> None:
    """Refused in words."""
    dataset.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        writer_of(dataset).__enter__()
