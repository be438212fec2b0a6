"""ShardWriter: what is added is committed, sorted, on time or by size, and an error in its thread is never lost."""

from __future__ import annotations

import errno
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollgen.errors import DatasetError, EngineError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine, list_shards, read_journal
from rollgen.format.manifest import Manifest, Retry
from rollgen.format.reader import verify_shard
from rollgen.format.schema import FOOTER_FORMAT_VERSION
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

MakeCompletion = Callable[..., Completion]
Keys = list[tuple[int, int]]


@pytest.fixture
def open_writer(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> Callable[..., object]:
    """`open_writer(commit_interval=..., max_buffer_bytes=...)`: a context manager that gives a writer of `tmp_path`."""

    @contextmanager
    def opened(*, commit_interval: float = math.inf, max_buffer_bytes: int = 1 << 30) -> Iterator[ShardWriter]:
        with (
            WriterSlot(tmp_path, "w0") as slot,
            ShardWriter(
                slot, make_manifest(), commit_interval=commit_interval, max_buffer_bytes=max_buffer_bytes
            ) as writer,
        ):
            yield writer

    return opened


def stored_keys(directory: Path) -> list[Keys]:
    """`(prompt_index, sample_index)` of each shard, in order."""
    tables = [pq.read_table(path, columns=["prompt_index", "sample_index"]) for path in list_shards(directory)]
    return [list(zip(*(column.to_pylist() for column in table.columns), strict=True)) for table in tables]


def test_rows_are_sorted_whatever_order_they_came_in(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """By prompt_index, then by sample_index: 2.1, 0.1, 2.0, 0.0, 1.0 become 0.0, 0.1, 1.0, 2.0, 2.1."""
    with open_writer() as writer:
        for key in [(2, 1), (0, 1), (2, 0), (0, 0), (1, 0)]:
            writer.add(make_completion(*key))
    assert stored_keys(tmp_path) == [[(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]]


def test_generations_of_a_sample_are_sorted(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """By generation last; all of them are rows."""
    with open_writer() as writer:
        for generation in (2, 0, 1):
            writer.add(make_completion(0, 0, generation=generation))
    (path,) = list_shards(tmp_path)
    assert pq.read_table(path)["generation"].to_pylist() == [0, 1, 2]


def test_a_dataset_begun_as_1_0_stays_so_until_a_retry(
    tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: MakeCompletion
) -> None:
    """Its shards keep the columns that they had; those of the retry and after it have the generation."""
    manifest = make_manifest(format_version="1.0")
    retry = Retry(generation=1, started_at="", where={"finish_reason": "length"}, max_tokens=9, samples=1)
    with WriterSlot(tmp_path, "w0") as slot:
        for state, generation in ((manifest, 0), (manifest.with_retry(retry), 1)):
            with ShardWriter(slot, state, commit_interval=math.inf) as writer:
                writer.add(make_completion(0, 0, generation=generation))
    before, after = (pq.read_schema(path) for path in list_shards(tmp_path))
    assert set(after.names) - set(before.names) == {"generation"}
    assert before.metadata[FOOTER_FORMAT_VERSION] == b"1.0"
    assert after.metadata[FOOTER_FORMAT_VERSION] == b"1.1"  # the first MINOR that has it


def test_journal_counts_what_the_shard_holds(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """Rows, generated tokens and mask ids; untruncated tokens have no ids."""
    rows = [
        make_completion(0, 0, tokens=3),
        make_completion(0, 1, tokens=5),
        make_completion(1, 0, tokens=7, full=True),
    ]
    with open_writer() as writer:
        for row in rows:
            writer.add(row)
    [line] = read_journal(tmp_path).committed.values()
    assert (line.rows, line.tokens, line.mask_ids) == (3, 15, len(rows[0].mask_ids) + len(rows[1].mask_ids))
    path = tmp_path / "data" / line.file
    assert line.bytes == path.stat().st_size
    verify_shard(path, line=line)


def test_nothing_added_nothing_written(tmp_path: Path, open_writer: Callable) -> None:
    """No empty shard at the end, on flush, or when the interval ends."""
    with open_writer(commit_interval=1e-9) as writer:
        writer.flush()
        writer.tick()
        writer.close_group(7)
    assert stored_keys(tmp_path) == []
    assert read_journal(tmp_path).committed == {}


def test_flush_makes_durable_also_what_is_not_complete(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """After `flush` the shard is there, with the rows of open groups too; later rows make another shard."""
    with open_writer() as writer:
        writer.add(make_completion(0, 0))
        writer.add(make_completion(1, 0))
        writer.close_group(1)
        writer.flush()
        assert stored_keys(tmp_path) == [[(0, 0), (1, 0)]]
        writer.add(make_completion(0, 1))
    assert stored_keys(tmp_path) == [[(0, 0), (1, 0)], [(0, 1)]]
    assert list(read_journal(tmp_path).committed) == ["part-w0-000000.parquet", "part-w0-000001.parquet"]


def tick_until_committed(writer: ShardWriter, directory: Path) -> None:
    """The commit that a tick starts runs in its thread; a later tick collects it."""
    while not read_journal(directory).committed:
        writer.tick()


def test_tick_commits_when_the_interval_has_ended(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """A nanosecond has ended: the row of an open group is written, and one that comes later in a shard of its own."""
    with open_writer(commit_interval=1e-9) as writer:
        writer.add(make_completion(0, 0))
        tick_until_committed(writer, tmp_path)
        writer.add(make_completion(0, 1))
    assert stored_keys(tmp_path) == [[(0, 0)], [(0, 1)]]


def test_tick_waits_for_the_interval(tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion) -> None:
    """An hour has not ended: both rows end in the same shard."""
    with open_writer(commit_interval=3600) as writer:
        writer.add(make_completion(0, 0))
        writer.tick()
        writer.add(make_completion(0, 1))
    assert stored_keys(tmp_path) == [[(0, 0), (0, 1)]]


def test_size_bound_commits_complete_groups_and_leaves_open_ones(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """Complete groups reach the bound: they are written at once. The open group waits, and stays together."""
    rows = {(p, k): make_completion(p, k) for p in range(2) for k in range(2)}
    with open_writer(max_buffer_bytes=rows[1, 0].nbytes + rows[1, 1].nbytes) as writer:
        writer.add(rows[0, 0])
        writer.add(rows[1, 1])
        writer.add(rows[1, 0])
        writer.close_group(1)
        writer.add(rows[0, 1])
    assert stored_keys(tmp_path) == [[(1, 0), (1, 1)], [(0, 0), (0, 1)]]


def test_below_the_size_bound_complete_groups_wait(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """One byte short of the bound, both groups end in one shard."""
    rows = [make_completion(p, 0) for p in range(2)]
    with open_writer(max_buffer_bytes=rows[0].nbytes + rows[1].nbytes + 1) as writer:
        for row in rows:
            writer.add(row)
            writer.close_group(row.prompt_index)
    assert stored_keys(tmp_path) == [[(0, 0), (1, 0)]]


def test_tick_bounds_the_memory_of_open_groups(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """Twice the bound in groups that never complete is written although the interval has not ended; less is not."""
    rows = [make_completion(p, 0) for p in range(3)]
    with open_writer(max_buffer_bytes=(rows[0].nbytes + rows[1].nbytes) // 2) as writer:
        writer.add(rows[0])
        writer.tick()
        writer.add(rows[1])
        tick_until_committed(writer, tmp_path)
        writer.add(rows[2])
    assert stored_keys(tmp_path) == [[(0, 0), (1, 0)], [(2, 0)]]


def test_an_exception_commits_what_was_added(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """An engine that dies takes nothing finished with it."""

    def die(writer: ShardWriter) -> None:
        raise EngineError("dead")

    with pytest.raises(EngineError, match="dead"):
        add_one(open_writer(), make_completion(0, 0), die)
    assert stored_keys(tmp_path) == [[(0, 0)]]


def add_one(opened: Any, completion: Completion, then: Callable[[ShardWriter], None]) -> None:
    with opened as writer:
        writer.add(completion)
        then(writer)


def tick_until_it_raises(writer: ShardWriter) -> None:
    """The first call starts a commit that fails; a later one finds out."""
    while True:
        writer.tick()


@pytest.mark.parametrize(
    "then", [ShardWriter.flush, tick_until_it_raises, lambda writer: None], ids=["flush", "tick", "leave"]
)
def test_error_of_the_thread_is_raised_by_the_next_call(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion, then: Callable[[ShardWriter], None]
) -> None:
    """`flush`, `tick` or leaving the block: one line that names the file; nothing is lost in silence."""

    def break_directory(writer: ShardWriter) -> None:
        (tmp_path / "data").rmdir()
        (tmp_path / "data").write_text("not a directory")
        then(writer)

    with pytest.raises(DatasetError, match=r"data/\.tmp-w0-000000: cannot be written: .*Not a directory") as raised:
        add_one(open_writer(commit_interval=1e-9), make_completion(0, 0), break_directory)
    assert "\n" not in str(raised.value)


FULL_DISK = """
import math, resource, signal, sys
from pathlib import Path
import conftest
from rollgen.errors import DatasetError
from rollgen.format.commit import WriterSlot
from rollgen.format.writer import ShardWriter

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = Path(sys.argv[1])
try:
    with (
        WriterSlot(directory, "w0") as slot,
        ShardWriter(slot, conftest.some_manifest(), commit_interval=math.inf) as writer,
    ):
        writer.add(conftest.random_completion(0, 0))
        writer.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        writer.add(conftest.random_completion(1, 0, tokens=5000))
except DatasetError as error:
    print(error)
"""


def test_full_disk_leaves_what_was_committed(tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: one clear error, the temporary file gone, the first shard whole."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=True, timeout=180)
    assert done.stderr == ""
    assert done.stdout.startswith(f"{tmp_path}/data/.tmp-w0-000001: cannot be written: ")
    assert done.stdout.endswith("File too large\n")
    assert done.stdout.count("\n") == 1
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["part-w0-000000.parquet"]
    verify_shard(tmp_path / "data" / "part-w0-000000.parquet")


def test_no_temporary_name_remains(tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion) -> None:
    """A committed shard has one name: the temporary link is gone."""
    with open_writer() as writer:
        writer.add(make_completion(0, 0))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["part-w0-000000.parquet"]


def test_a_directory_that_comes_back_costs_nothing(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """A commit fails, more is added, what was wrong is mended: the shard that failed and the rest are stored, once."""
    data = tmp_path / "data"
    with open_writer() as writer:
        writer.add(make_completion(0, 0))
        writer.flush()
        data.rename(tmp_path / "away")
        writer.add(make_completion(1, 0))
        for _ in range(2):
            with pytest.raises(DatasetError, match="cannot be written"):
                writer.flush()
        writer.add(make_completion(2, 0))
        (tmp_path / "away").rename(data)
    assert stored_keys(tmp_path) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert len(read_journal(tmp_path).committed) == 3


def test_a_failed_journal_line_is_written_later(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """The shard has its final name already: it is not written twice, and the next one gets the next name."""
    journal = tmp_path / "journal" / "w0.jsonl"
    with open_writer() as writer:
        journal.mkdir()  # in the way of the file
        writer.add(make_completion(0, 0))
        with pytest.raises(DatasetError, match="cannot be written: Is a directory"):
            writer.flush()
        assert stored_keys(tmp_path) == [[(0, 0)]]
        journal.rmdir()
        writer.add(make_completion(1, 0))
    assert stored_keys(tmp_path) == [[(0, 0)], [(1, 0)]]
    assert list(read_journal(tmp_path).committed) == ["part-w0-000000.parquet", "part-w0-000001.parquet"]


def test_a_shard_that_cannot_be_written_holds_none_before_it_up(
    tmp_path: Path, open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """What has its name is committed, and the error is that of the next one, which comes after it once it can."""
    journal, in_the_way = tmp_path / "journal" / "w0.jsonl", tmp_path / "data" / ".tmp-w0-000001"
    with open_writer() as writer:
        journal.mkdir()
        writer.add(make_completion(0, 0))
        with pytest.raises(DatasetError, match="Is a directory"):
            writer.flush()
        journal.rmdir()
        in_the_way.mkdir()
        writer.add(make_completion(1, 0))
        with pytest.raises(DatasetError, match=r"\.tmp-w0-000001: cannot be written"):
            writer.flush()
        assert list(read_journal(tmp_path).committed) == ["part-w0-000000.parquet"]
        in_the_way.rmdir()
    assert stored_keys(tmp_path) == [[(0, 0)], [(1, 0)]]
    assert list(read_journal(tmp_path).committed) == ["part-w0-000000.parquet", "part-w0-000001.parquet"]


class SmallDisk(WriterSlot):
    """Has room for one shard that is not sent away, as a workspace; at first nothing can be sent."""

    is_cut_off = True
    waiting = 0

    def publish(self, temporary: Path, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
        """As `WriterSlot` does; so below."""
        if self.waiting:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.waiting += 1
        return super().publish(temporary, rows=rows, tokens=tokens, mask_ids=mask_ids)

    def append(self, line: JournalLine) -> None:
        if self.is_cut_off:
            raise DatasetError("no storage")
        super().append(line)
        self.waiting -= 1


def test_sending_makes_room(
    tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: MakeCompletion
) -> None:
    """Once the storage is back, the disk that it has filled is no error: all is stored, in order."""
    with (
        SmallDisk(tmp_path, "w0") as slot,
        ShardWriter(slot, make_manifest(), commit_interval=math.inf) as writer,
    ):
        for prompt in range(3):
            writer.add(make_completion(prompt, 0))
            with pytest.raises(DatasetError, match="no storage"):
                writer.flush()
        slot.is_cut_off = False
    assert stored_keys(tmp_path) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert len(read_journal(tmp_path).committed) == 3


def test_a_row_that_cannot_be_encoded_takes_nothing_with_it(
    open_writer: Callable, make_completion: MakeCompletion
) -> None:
    """Every later call says so, the last one too: nothing is dropped in silence."""
    broken = replace(make_completion(1, 0), seed=2**63)

    def flush_and_leave(writer: ShardWriter) -> None:
        writer.add(make_completion(1, 1))
        writer.add(broken)
        with pytest.raises(OverflowError):
            writer.flush()

    with pytest.raises(OverflowError):
        add_one(open_writer(), make_completion(0, 0), flush_and_leave)
