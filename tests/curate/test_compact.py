"""Compaction: every row is what it was, prompts are together, and no instant of a crash shows anything else.

Completions have 8 tokens unless said.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.deaths import contents

from rollgen.config import digest
from rollgen.curate.compact import Compaction, compact
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.columns import split_row_groups
from rollgen.format.commit import Part, WriterSlot
from rollgen.format.done import PlannedKeys
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import PLANLESS, Manifest, Retry, read_manifest, replace_manifest
from rollgen.format.reader import open_dataset, verify_shard
from rollgen.format.recovery import recover
from rollgen.format.replacement import Replacement, decide
from rollgen.format.schema import FOOTER_ENGINE, SUPPORT_LOGPROB_LIST
from rollgen.inspect.status import run_status
from rollgen.rollouts import Completion

MakeCompletion = Callable[..., Completion]
MakeManifest = Callable[..., Manifest]
ReadShards = Callable[[Path], dict[str, list[dict[str, Any]]]]
RETRY = Retry(generation=1, started_at="", where={"finish_reason": "length"}, max_tokens=99, samples=1)


def multiset(shards: dict[str, list[dict[str, Any]]]) -> Counter[str]:
    return Counter(repr(row) for rows in shards.values() for row in rows)


def key_of(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["prompt_index"], row["sample_index"], row["generation"]


Row = tuple[int, int, int, int, int, bool]
"""(prompt, sample, generation, shard, tokens, not truncated)"""
some_rows = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 3), st.integers(0, 2), st.integers(0, 6), st.integers(1, 9), st.booleans()
    ),
    unique_by=lambda row: row[:3],
    max_size=40,
)


def is_small(directory: Path, shard_tokens: int) -> list[str]:
    lines = read_journal(directory).committed.values()
    return [line.file for line in lines if line.tokens < shard_tokens / 2]


@settings(max_examples=20)
@given(some_rows, st.integers(1, 120), st.booleans(), st.booleans(), st.integers(0, 7))
def test_rows_stay_and_prompts_come_together(
    make_manifest: MakeManifest,
    make_completion: MakeCompletion,
    store: Callable[..., Path],
    read_shards: ReadShards,
    rows: list[Row],
    shard_tokens: int,
    support_logprobs: bool,
    planless: bool,
    without_generation: int,
) -> None:
    """Of groups that are split, grown, made again, null masks, shards of 1.0 before others, row groups of 10 tokens."""
    identity = {"support_logprobs": support_logprobs} | ({PLANLESS: True} if planless else {})
    first = make_manifest(
        support_logprobs=support_logprobs, identity=identity, config_digest=digest(identity), format_version="1.0"
    )
    manifest = first.with_retry(RETRY)
    shards: list[list[Completion]] = [[] for _ in range(7)]
    for prompt, sample, generation, shard, tokens, full in rows:
        made = make_completion(
            prompt,
            sample,
            tokens=tokens,
            full=full,
            support_logprobs=support_logprobs,
            generation=generation if shard >= without_generation else 0,
        )
        if made.generation == generation:
            shards[shard].append(made)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 10)
        patch.setattr("rollgen.format.columns.MAX_ROW_GROUP_IDS", 60)
        patch.setattr("rollgen.curate.copying.CACHE_BYTES", 4000)  # one or two row groups
        directory = store(Path(name), first, shards[:without_generation])
        store(directory, manifest, shards[without_generation:], writer="w1")
        replace_manifest(directory, manifest)
        before = read_shards(directory)
        done = compact(directory, shard_tokens=shard_tokens)
        after = read_shards(directory)
        assert multiset(after) == multiset(before)
        assert (done.shards_before, done.shards_after) == (len(before), len(after))
        homes = Counter(prompt for rows in after.values() for prompt in {row["prompt_index"] for row in rows})
        assert set(homes.values()) <= {1}
        for stored in open_dataset(directory).shards:
            assert stored.line is not None
            verify_shard(stored.path, line=stored.line, config_digest=manifest.config_digest)
            stored_rows = after[stored.path.name]
            assert sorted(map(key_of, stored_rows)) == list(map(key_of, stored_rows))
            assert stored.line.tokens == sum(row["response_length"] for row in stored_rows)
            assert stored.line.mask_ids == sum(len(ids or ()) for row in stored_rows for ids in row["sampling_mask"])
        assert len(is_small(directory, shard_tokens)) <= 1, "small shards are left"
        assert compact(directory, shard_tokens=shard_tokens).replaced == 0, "there was more to do"


def test_weights_and_experts_stay(
    tmp_path: Path,
    make_manifest: MakeManifest,
    make_completion: MakeCompletion,
    store: Callable,
    read_shards: ReadShards,
) -> None:
    """Of every row, in shards that still have these columns; 24 to 78 numbers a row, and groups close at 100."""
    manifest = make_manifest(extras=True)
    shards = [[make_completion(prompt, k, extras=True) for prompt in range(3)] for k in range(4)]
    directory = store(tmp_path / "run", manifest, shards)
    before = read_shards(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollgen.format.columns.MAX_ROW_GROUP_EXPERT_IDS", 100)
        assert compact(directory, shard_tokens=1_000).written == 1
    after = read_shards(directory)
    assert multiset(after) == multiset(before)
    [row, *_] = after["part-compact-000000.parquet"]
    assert row["weight_version_starts"] == [0, 3, 6]
    assert len(row["routed_experts"]) == (row["prompt_length"] + row["response_length"] - 1) * 6
    assert pq.read_metadata(list_shards(directory)[0]).num_row_groups > 1


def keys_of(shards: dict[str, list[dict[str, Any]]]) -> list[list[tuple[int, int]]]:
    return [[key_of(row)[:2] for row in rows] for rows in shards.values()]


def test_what_is_done_and_what_is_said(split: Path, read_shards: ReadShards) -> None:
    """Small are those below 16 tokens, none; the two that share prompts become one of 32, closed at 32 or more."""
    size = {path.name: path.stat().st_size for path in list_shards(split)}
    done = compact(split, shard_tokens=32)
    new = split / "data" / "part-compact-000000.parquet"
    kept = ["part-w0-000002.parquet", "part-w0-000003.parquet"]
    assert keys_of(read_shards(split)) == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (3, 0)], [(4, 0), (5, 0)]]
    assert done == Compaction(
        shards_before=4,
        shards_after=3,
        bytes_before=sum(size.values()),
        bytes_after=new.stat().st_size + sum(size[name] for name in kept),
        replaced=2,
        written=1,
        split_prompts=2,
        rows=8,
        tokens=64,
        completed_earlier=False,
    )
    assert sorted(path.name for path in (split / "data").iterdir()) == [new.name, *kept]


@pytest.mark.parametrize(
    ("limit", "value", "changes", "groups"),
    [
        ("ROW_GROUP_TOKENS", 20, {}, [3, 3, 2]),
        ("MAX_ROW_GROUP_IDS", 16, {"largest": 1}, [2, 2, 2, 2]),
        ("MAX_ROW_GROUP_CHARACTERS", 3 << 20, {"prompt": "é" * (1 << 20), "text": "", "metadata": None}, [3, 3, 2]),
        ("MAX_ROW_GROUP_CHARACTERS", 3000, {"stop_reason": "." * 950}, [4, 4]),
        ("MAX_ROW_GROUP_PROMPT_TOKENS", 4, {}, [3, 2, 2, 1]),
    ],
    ids=["tokens", "ids", "characters", "characters of stop reasons", "tokens of prompts"],
)
def test_row_groups_are_those_of_a_writer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_manifest: MakeManifest,
    make_completion: MakeCompletion,
    store: Callable[..., Path],
    limit: str,
    value: int,
    changes: dict[str, Any],
    groups: list[int],
) -> None:
    """Eight rows of 8 tokens, 8 supports of one id, 2^20 characters, or 1 to 4 tokens of their four prompts.

    From row groups of one row and of all. The row that reaches the limit is the last one, whatever runs the old row
    groups are read in.
    """
    rows = [make_completion(prompt, sample, **changes) for prompt in range(4) for sample in range(2)]
    directory = store(tmp_path / "run", make_manifest(), [rows[5:]])
    with monkeypatch.context() as patch:
        patch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 1)
        store(directory, make_manifest(), [rows[:2], rows[2:5]], writer="w1")
    monkeypatch.setattr(f"rollgen.format.columns.{limit}", value)
    compact(directory)
    [new] = list_shards(directory)
    metadata = pq.read_metadata(new)
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == groups
    assert [len(group) for group in split_row_groups(rows)] == groups


def test_dry_run_says_the_same_and_changes_nothing(split: Path) -> None:
    """It does not take the writer's place either."""
    before = contents(split)
    foreseen = compact(split, shard_tokens=32, dry_run=True)
    assert contents(split) == before
    assert not (split / "journal" / "compact.lock").exists()
    assert foreseen == replace(compact(split, shard_tokens=32), bytes_after=None)


def test_a_prompt_is_never_divided(split: Path, read_shards: ReadShards) -> None:
    """Even when it alone exceeds the target: 16 tokens of prompt 0, where 9 are wanted. Others are large enough."""
    compact(split, shard_tokens=9)
    assert keys_of(read_shards(split))[:2] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_names_go_on_after_those_that_were_replaced(split: Path) -> None:
    """The compacted shard is compacted again: its name is not used twice."""
    compact(split, shard_tokens=32)
    compact(split, shard_tokens=1000)
    assert [path.name for path in list_shards(split)] == ["part-compact-000001.parquet"]
    assert len(read_journal(split).retired) == 5


def test_kept_files_are_moved(split: Path) -> None:
    """To `retired/`, as they were; readers do not look there, and a resumed run does not trip over them."""
    before = {path.name: path.read_bytes() for path in list_shards(split)}
    compact(split, keep=True)
    assert {path.name: path.read_bytes() for path in (split / "retired").iterdir()} == before
    assert len(open_dataset(split).shards) == 1
    planned = PlannedKeys(
        np.array([0, 2, 4, 5, 6, 8, 9]),
        lambda indices: pa.array([f"p{index}" for index in indices]),
        lambda table: None,
    )
    with WriterSlot(split, "w0") as slot:
        assert slot.temporary().name == ".tmp-w0-000004"
        recovery = recover(slot, read_manifest(split).config_digest, planned)
    assert recovery.done.tolist() == [True] * 7 + [False, True]  # the second sample of prompt 4 has never been made
    assert recovery.findings == ()


def test_compaction_is_no_speed(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """`rollgen status` measures sampling by the times of commits: a shard of 48 tokens a second, before it."""
    directory = make_dataset(tmp_path / "run", shards=4, prompts=3, n=2)
    started = datetime.fromisoformat(read_manifest(directory).attempts[-1].started_at).timestamp()
    os.utime(directory / "rollgen.json", (started, started))
    for seconds, path in enumerate(list_shards(directory), 1):
        os.utime(path, (started + seconds, started + seconds))
    assert run_status(directory).tokens_per_second == 48.0
    compact(directory)
    assert run_status(directory).tokens_per_second is None


def test_rows_of_several_engines(
    tmp_path: Path, make_manifest: MakeManifest, make_completion: MakeCompletion, store: Callable
) -> None:
    """The footer of the new shard names each; a shard that holds both already adds none."""
    manifest = make_manifest()
    later = replace_engine(manifest, "2")
    for number, state in enumerate((manifest, later, manifest)):
        store(tmp_path, state, [[make_completion(number, 0)]])
        compact(tmp_path)
    (path,) = list_shards(tmp_path)
    assert pq.read_metadata(path).metadata[FOOTER_ENGINE] == b"fake 1, fake 2"


def replace_engine(manifest: Manifest, version: str) -> Manifest:
    (attempt,) = manifest.attempts
    newer = attempt.model_copy(update={"engine": attempt.engine.model_copy(update={"version": version})})
    return manifest.model_copy(update={"attempts": [newer]})


def test_each_new_shard_names_the_engines_of_its_rows(
    tmp_path: Path, make_manifest: MakeManifest, make_completion: MakeCompletion, store: Callable
) -> None:
    """Three prompts are of one engine, three of another; a shard is closed at 17 tokens, and so has three of 8."""
    manifest = make_manifest()
    for number, version in enumerate("111222"):
        store(tmp_path, replace_engine(manifest, version), [[make_completion(number, 0)]])
    compact(tmp_path, shard_tokens=17)
    engines = [pq.read_metadata(path).metadata[FOOTER_ENGINE] for path in list_shards(tmp_path)]
    assert engines == [b"fake 1", b"fake 2"]


def test_a_dataset_that_takes_its_place(
    split: Path, tmp_path: Path, make_run: Callable[..., Path], read_shards: ReadShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the lock is had: the new shards are of that one, as their footers say, or no reader would take them.

    It has twelve samples in two shards.
    """
    other = make_run(tmp_path / "other", 1)

    class Late(WriterSlot):
        def __enter__(self) -> Any:
            shutil.rmtree(split)
            shutil.copytree(other, split)
            return super().__enter__()

    monkeypatch.setattr("rollgen.curate.compact.WriterSlot", Late)
    assert compact(split).written == 1
    assert multiset(read_shards(split)) == multiset(read_shards(other))


def test_a_shard_without_rows(
    tmp_path: Path, make_manifest: MakeManifest, make_completion: MakeCompletion, store: Callable
) -> None:
    """Only other software writes one, and readers take it: it is no reason to compact, and does not stay in the way."""
    store(tmp_path, make_manifest(), [[make_completion(0, 0)]])
    (path,) = list_shards(tmp_path)
    with WriterSlot(tmp_path, "w0") as slot:
        temporary = slot.temporary()
        pq.write_table(pq.read_table(path).slice(0, 0), temporary, write_page_checksum=True)
        slot.append(slot.publish(temporary, rows=0, tokens=0, mask_ids=0))
        temporary.unlink()
    assert compact(tmp_path, shard_tokens=8).replaced == 0
    assert len(list_shards(tmp_path)) == 2


def test_a_record_that_would_be_refused(split: Path) -> None:
    """It is not written: readers would refuse the dataset, and nobody could complete it."""
    before = contents(split)
    with pytest.raises(DatasetError, match="cannot be compacted: adds no shard; nothing has changed"):
        decide(split, Replacement("compact", (), ("part-w0-000000.parquet",), keep=False))
    assert contents(split) == before


def test_nothing_stored(tmp_path: Path, make_manifest: MakeManifest, store: Callable) -> None:
    """A run before its first commit."""
    store(tmp_path, make_manifest(), [])
    assert compact(tmp_path).replaced == 0


def test_a_dataset_of_1_0_stays_one(
    tmp_path: Path, make_manifest: MakeManifest, make_completion: MakeCompletion, store: Callable
) -> None:
    """Its new shard has the columns of the old ones."""
    store(tmp_path, make_manifest(format_version="1.0"), [[make_completion(0, 0)], [make_completion(1, 0)]])
    columns = pq.read_schema(list_shards(tmp_path)[0]).names
    compact(tmp_path)
    assert pq.read_schema(list_shards(tmp_path)[0]).names == columns
    assert "generation" not in columns


def flip(path: Path, column: str, row_group: int) -> None:
    """Flip a bit in the last page of a column."""
    metadata = pq.read_metadata(path).row_group(row_group)
    chunks = [metadata.column(index) for index in range(metadata.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]
    damaged = bytearray(path.read_bytes())
    damaged[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("column", ["prompt_index", "sampling_mask", "logprobs", "text"])
def test_a_damaged_shard_is_refused(split: Path, column: str) -> None:
    """File and row group are named, and nothing has changed; another new shard may have been written by then."""
    flip(list_shards(split)[3], column, 0)
    before = contents(split)
    with pytest.raises(DatasetError, match=r"part-w0-000003\.parquet: row group 0: damaged"):
        compact(split, shard_tokens=33)
    assert contents(split) == before


def test_a_shard_without_its_line_is_refused(split: Path) -> None:
    """A resume verifies it and adds the line: compaction repairs nothing."""
    journal = split / "journal" / "w0.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(DatasetError, match=r"000003\.parquet: has no journal line: .*`rollgen repair` verifies it"):
        compact(split)


def test_a_lost_shard_is_refused(split: Path) -> None:
    """As by any reader."""
    list_shards(split)[0].unlink()
    with pytest.raises(DatasetError, match=r"000000\.parquet: missing, though committed"):
        compact(split)


def test_a_copied_shard_is_refused(
    split: Path, make_manifest: MakeManifest, make_completion: MakeCompletion, store: Callable
) -> None:
    """Which of the two rows to keep is not for a program to say."""
    store(split, make_manifest(), [[make_completion(1, 0)]])
    with pytest.raises(DatasetError, match=r"w0-000004\.parquet: holds samples that part-w0-000000\.parquet holds too"):
        compact(split)


def without_engine(table: pa.Table) -> pa.Table:
    kept = {key: value for key, value in table.schema.metadata.items() if key != FOOTER_ENGINE}
    return table.replace_schema_metadata(kept)


UNFIT: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "a later version's column": (
        lambda table: table.append_column("entropy", table["temperature"]),
        "has columns that this version does not know: entropy; upgrade rollgen",
    ),
    "another's column": (
        lambda table: table.append_column("support_logprobs", table["sampling_mask"].cast(SUPPORT_LOGPROB_LIST)),
        "the manifest says support_logprobs is False, this shard not",
    ),
    "no engine": (without_engine, r"its footer has no rollgen\.engine; not a rollgen shard"),
}


@pytest.mark.parametrize(("change", "expected"), UNFIT.values(), ids=UNFIT)
def test_what_would_be_lost_is_refused(split: Path, change: Callable[[pa.Table], pa.Table], expected: str) -> None:
    """Columns that a new shard could not have, and footers that do not say what it should."""
    table = change(pq.read_table(list_shards(split)[0]))
    with WriterSlot(split, "w0") as slot:
        temporary = slot.temporary()
        pq.write_table(table, temporary, write_page_checksum=True)
        slot.append(slot.publish(temporary, rows=2, tokens=16, mask_ids=0))
        temporary.unlink()
    with pytest.raises(DatasetError, match=rf"w0-000004\.parquet: {expected}"):
        compact(split)


def test_a_journal_that_counts_otherwise(split: Path) -> None:
    """What was read is not what was once committed: nothing is replaced."""
    journal = split / "journal" / "w0.jsonl"
    journal.write_text(journal.read_text().replace('"tokens": 16', '"tokens": 17', 1))
    before = contents(split)
    with pytest.raises(DatasetError, match="hold 64 tokens, the journal says 65"):
        compact(split)
    assert contents(split) == before


@pytest.mark.parametrize(("writer", "part"), [("w0", Part(0, 1)), ("w3", Part(3, 4)), ("compact", Part(0, 1))])
def test_live_writers_exclude_it(split: Path, writer: str, part: Part) -> None:
    """Whatever part they make, another compaction too."""
    before = contents(split)
    with WriterSlot(split, writer, part), pytest.raises(ResumeRefused, match=r"writing this dataset|is alive"):
        compact(split)
    assert contents(split) == before


def test_no_dataset(tmp_path: Path) -> None:
    """Nothing is made in a directory that holds none."""
    with pytest.raises(DatasetError, match=r"rollgen\.json: not found"):
        compact(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_no_reader_would_take(split: Path) -> None:
    """It is refused before it is written."""
    with pytest.raises(UsageError, match="shard_tokens: 134217729 is too large for a shard; the limit is 134217728"):
        compact(split, shard_tokens=(1 << 27) + 1)


def test_retired_is_in_the_way(split: Path) -> None:
    """Before anything is written; readers and later compactions go on."""
    (split / "retired").touch()
    before = contents(split)
    with pytest.raises(DatasetError, match="retired: is there already, and no directory; move it away"):
        compact(split, keep=True)
    assert contents(split) == before
    assert compact(split).replaced == 4
