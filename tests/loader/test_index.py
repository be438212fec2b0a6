"""The index: which rows are handed out, where they are, and what a damaged file costs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from models.memory import counted

from rollgen.config import digest
from rollgen.errors import DatasetError, MissingFile, Unreadable, UsageError
from rollgen.format import reader
from rollgen.format.manifest import Manifest
from rollgen.format.retries import RetryList
from rollgen.loader import RolloutStream
from rollgen.loader import index as index_module
from rollgen.loader.index import Index, OnDamage, open_index
from rollgen.rollouts import Completion

MakeCompletion = Callable[..., Completion]
WriteShards = Callable[..., Path]


def keys_of(index: Index) -> list[tuple[int, int, int]]:
    return list(zip(index.dataset.tolist(), index.prompt_index.tolist(), index.sample_index.tolist(), strict=True))


@pytest.fixture
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group ends at 20 generated tokens instead of some 57 thousand."""
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 20)


@pytest.fixture
def three_shards(
    write_shards: WriteShards,
    make_completion: MakeCompletion,
    once: Callable[[str, Callable[[], Path]], Path],
    small_row_groups: None,
) -> Path:
    """Prompts 0 to 2, a shard each; samples 0 to 3 of 10 tokens: two row groups in each shard."""
    rows = [[make_completion(p, k, tokens=10) for k in range(4)] for p in range(3)]
    return once("three shards", lambda: write_shards(rows))


def test_rows_are_located(three_shards: Path) -> None:
    """The row group of each sample, its place inside, and the file: a shard, and a number in it."""
    index = open_index([three_shards])
    assert keys_of(index) == [(0, p, k) for p in range(3) for k in range(4)]
    # Prompt p has 1 + p tokens.
    assert index.tokens.tolist() == [10 + 1 + p for p in range(3) for _ in range(4)]
    group, row = index.locate(np.array([0, 3, 4, 11]))
    assert (group.tolist(), row.tolist()) == ([0, 1, 2, 5], [0, 1, 0, 1])
    shard, number = index.place(5)
    assert (shard.path.name, number) == ("part-w0-000002.parquet", 1)
    assert index.losses == ()


def test_two_datasets(tmp_path: Path, write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """One after the other; the same key in both is two samples."""
    first = write_shards([[make_completion(0, k) for k in range(2)]]).rename(tmp_path / "first")
    second = write_shards([[make_completion(0, 0)], [make_completion(1, 0)]])
    index = open_index([first, second])
    assert keys_of(index) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0)]
    assert [shard.path.parents[1] for shard in index.shards] == [first, second, second]
    assert [dataset.directory for dataset in index.datasets] == [first, second]


@pytest.mark.parametrize("alias", ["same", "dotted", "linked"])
def test_the_same_dataset_twice(tmp_path: Path, three_shards: Path, alias: str) -> None:
    """Under whatever name: each sample would weigh double."""
    (tmp_path / "link").symlink_to(three_shards)
    other = {"same": three_shards, "dotted": three_shards / ".." / three_shards.name, "linked": tmp_path / "link"}
    with pytest.raises(UsageError, match="given twice"):
        open_index([three_shards, other[alias]])


def test_two_vocabularies(
    tmp_path: Path,
    write_shards: WriteShards,
    make_completion: MakeCompletion,
) -> None:
    """Their supports would index different logits."""
    first = write_shards([[make_completion(0, 0)]]).rename(tmp_path / "first")
    second = write_shards([[make_completion(0, 0)]])
    manifest = json.loads((second / "rollgen.json").read_text())
    del manifest["sha256"]
    manifest |= {"vocab_size": 600}
    (second / "rollgen.json").write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    with pytest.raises(UsageError, match=r"vocabulary is 600, that of .*first 512"):
        open_index([first, second])


def test_no_directory_at_all() -> None:
    """An empty list of datasets is a mistake, not an empty stream."""
    with pytest.raises(UsageError, match="no dataset directory"):
        open_index([])


FILTERS = {
    "number": (pc.field("sample_index") == 2, [(0, p, 2) for p in range(3)]),
    "text": (pc.field("prompt_id").isin(["p1"]), [(0, 1, k) for k in range(4)]),
    "both": ((pc.field("prompt_index") == 2) & ~(pc.field("sample_index") < 3), [(0, 2, 3)]),
    "list": (pc.list_value_length(pc.field("prompt_token_ids")) > 2, [(0, 2, k) for k in range(4)]),
    "null": (pc.field("stop_reason") != "x", []),
    "text like a place": (pc.field("prompt_id") != "FieldPath(1)", [(0, p, k) for p in range(3) for k in range(4)]),
    "constant": (pc.scalar(True), [(0, p, k) for p in range(3) for k in range(4)]),
}


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters(three_shards: Path, name: str, on_damage: index_module.OnDamage) -> None:
    """Any expression over the columns; what it says about a null is not true."""
    expression, expected = FILTERS[name]
    assert keys_of(open_index([three_shards], filter=expression, on_damage=on_damage)) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (pc.field("reward") > 0, r"No match for FieldRef.Name\(reward\); there are: prompt_id, .*, metadata$"),
        (pc.field("sample_index"), "must evaluate to bool"),
        (pc.field("support_logprobs").is_valid(), "cannot be evaluated on the columns"),
        (pc.field("text").cast("int64") > 3, "fails on a value: Failed to parse string"),
        (pc.field(2) >= 1, "names a column by its place"),
    ],
    ids=["unknown column", "not a truth value", "column not stored", "bad value", "by place"],
)
def test_filters_that_cannot_be(three_shards: Path, expression: pc.Expression, message: str) -> None:
    """One line that shows the expression, whether it can never be evaluated or fails on what is stored."""
    with pytest.raises(UsageError, match=f"filter: .*{message}") as caught:
        open_index([three_shards], filter=expression)
    assert "\n" not in str(caught.value)


def test_a_filter_reads_its_own_columns_only(three_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and supports are a hundred times the rest."""
    asked: list[str] = []

    def read_row_group(shard: Any, group: int, columns: Any, **options: Any) -> Any:
        asked.extend(columns)
        return reader.read_row_group(shard, group, columns, **options)

    monkeypatch.setattr(index_module, "read_row_group", read_row_group)
    open_index([three_shards], filter=(pc.field("finish_reason") == "stop") & (pc.field("sample_index") > 0))
    narrow = {"prompt_index", "sample_index", "prompt_length", "response_length", "replayable"}
    assert set(asked) == {*narrow, "finish_reason"}


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_filter_holds_one_row_group(
    write_shards: WriteShards,
    make_completion: MakeCompletion,
    monkeypatch: pytest.MonkeyPatch,
    on_damage: OnDamage,
) -> None:
    """Of a wide column: a shard of 64 row groups of a megabyte of text does not lie in memory at once."""
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 8)
    directory = write_shards([[make_completion(0, sample, text="x" * 1_000_000) for sample in range(64)]])
    with counted() as pool:
        index = open_index([directory], filter=pc.field("text") != "", on_damage=on_damage)
    assert (len(index), len(index.groups)) == (64, 64)
    assert 1_000_000 < pool.max_memory() < 16_000_000


@pytest.fixture
def retried(write_shards: WriteShards, make_completion: MakeCompletion) -> Path:
    """Samples 0 to 2 of a prompt; then sample 1 again, with finish reason `length`."""
    first = [make_completion(0, k, finish_reason="length" if k == 1 else "stop") for k in range(3)]
    return write_shards([first, [make_completion(0, 1, tokens=20, generation=1)]], retries=1)


def test_latest_generation_before_the_filter(retried: Path) -> None:
    """A filter chooses among latest rows: it does not bring back a row that was made again."""
    assert keys_of(open_index([retried])) == [(0, 0, 0), (0, 0, 2), (0, 0, 1)]
    assert len(open_index([retried], filter=pc.field("finish_reason") == "length")) == 0
    assert open_index([retried], filter=pc.field("generation") == 1).rows.tolist() == [3]
    assert len(open_index([retried], all_generations=True)) == 4


@pytest.mark.parametrize("byte", ["footer", "wide column"])
def test_a_lost_generation_is_not_replaced_by_an_earlier_one(
    retried: Path, damage: Callable[..., Path], byte: str
) -> None:
    """The cut row of a sample that was made again is not current, whatever became of the later one."""
    retries = RetryList(1, np.array([0]), np.array([1], np.int32), np.array([99], np.int32))
    retries.write(retried / "retry-1.parquet")
    if byte == "footer":
        os.truncate(retried / "data/part-w0-000001.parquet", 300)
    else:
        damage(retried, 1, "token_ids")
    stream = RolloutStream(retried, on_damage="skip")
    assert sorted(int(k) for batch in stream for k in batch.sample_index) == [0, 2]
    assert sum(loss.samples for loss in stream.losses) == (2 if byte == "footer" else 1)


def test_a_missing_shard_is_not_damage(three_shards: Path) -> None:
    """It was removed, or is elsewhere: skipping it would train on whatever part of a dataset is at hand."""
    (three_shards / "data/part-w0-000001.parquet").unlink()
    with pytest.raises(MissingFile, match=r"000001\.parquet: missing, though committed"):
        open_index([three_shards], on_damage="skip")


@pytest.mark.parametrize("already_open", [False, True])
def test_what_the_machine_cannot_read_is_not_damage(
    three_shards: Path, monkeypatch: pytest.MonkeyPatch, already_open: bool
) -> None:
    """Neither for the index nor for batches: with memory, or another disk, the samples would be there."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    stream = RolloutStream(three_shards, on_damage="skip")
    monkeypatch.setattr("rollgen.format.parquet.CheckedParquet.read", fail)
    with pytest.raises(Unreadable, match=r"row group 0: this machine could not read it: out of memory"):
        next(iter(stream)) if already_open else open_index([three_shards], on_damage="skip")
    assert stream.losses == ()


def test_a_directory_that_goes_while_it_is_read(three_shards: Path) -> None:
    """An error, not an epoch of empty batches."""
    stream = RolloutStream(three_shards, on_damage="skip")
    shutil.rmtree(three_shards)
    with pytest.raises(MissingFile, match="missing"):
        next(iter(stream))


def test_unreplayable_rows(write_shards: WriteShards, make_completion: MakeCompletion) -> None:
    """Refused with their number, unless allowed or filtered away."""
    directory = write_shards([[make_completion(0, k, replayable=k != 1) for k in range(3)]])
    with pytest.raises(UsageError, match=r"first of 1 samples .* allow_unreplayable=True"):
        open_index([directory])
    assert len(open_index([directory], allow_unreplayable=True)) == 3
    assert keys_of(open_index([directory], filter=pc.field("replayable"))) == [(0, 0, 0), (0, 0, 2)]


@pytest.mark.parametrize("column", ["sample_index", "response_length"])
def test_a_damaged_narrow_column(
    three_shards: Path, damage: Callable[..., Path], caplog: pytest.LogCaptureFixture, column: str
) -> None:
    """Opening finds it. Skipped, it costs its row group, and the log says so once."""
    path = damage(three_shards, 1, column, row_group=1)
    with pytest.raises(DatasetError, match=rf"{path.name}: row group 1: damaged"):
        open_index([three_shards])
    with caplog.at_level(logging.WARNING):
        index = open_index([three_shards], on_damage="skip")
    assert keys_of(index) == [(0, p, k) for p in range(3) for k in range(4) if p != 1 or k < 2]
    ((place, samples, reason),) = index.losses
    assert (place, samples) == (f"{path}: row group 1", 2)
    assert "damaged" in reason
    assert [record.getMessage() for record in caplog.records] == [f"2 samples are lost: {reason}"]
    # Numbers of row groups are of those that were read: the lost one is not counted.
    assert [index.place(int(group))[1] for group in index.locate(np.arange(len(index)))[0]] == [
        0,
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("journal", [True, False], ids=["committed", "without journal line"])
@pytest.mark.parametrize("kind", ["truncated", "emptied", "footer"])
def test_a_damaged_shard(three_shards: Path, kind: str, journal: bool) -> None:
    """Without its journal line nobody knows how many samples it had. A fingerprint can be taken all the same."""
    path = three_shards / "data" / "part-w0-000000.parquet"
    if not journal:
        shutil.rmtree(three_shards / "journal")
    content = bytearray(path.read_bytes())
    content[-6] ^= 0xFF  # in the length of the footer
    path.write_bytes({"truncated": content[: len(content) // 2], "emptied": b"", "footer": bytes(content)}[kind])
    with pytest.raises(DatasetError, match=path.name):
        open_index([three_shards])
    index = open_index([three_shards], on_damage="skip")
    assert keys_of(index) == [(0, p, k) for p in (1, 2) for k in range(4)]
    assert [(loss.place, loss.samples) for loss in index.losses] == [(str(path), 4 if journal else 0)]
    assert len(index.fingerprint()) == 64


def test_everything_damaged(three_shards: Path) -> None:
    """An index of nothing, not a crash of its arithmetic."""
    for path in (three_shards / "data").glob("*.parquet"):
        os.truncate(path, 40)
    index = open_index([three_shards], on_damage="skip")
    assert (len(index), len(index.losses)) == (0, 3)


def test_fingerprint(
    tmp_path: Path, three_shards: Path, write_shards: WriteShards, make_completion: MakeCompletion
) -> None:
    """It changes with what is handed out, and not with where the directory is."""
    index = open_index([three_shards])
    filtered = open_index([three_shards], filter=pc.field("sample_index") > 0)
    moved = open_index([three_shards.rename(tmp_path / "moved")])
    assert moved.fingerprint() == index.fingerprint() != filtered.fingerprint()
    rows = [[make_completion(p, k, tokens=10) for k in range(4)] for p in range(3)]
    rows[1][2] = replace(rows[1][2], text=(rows[1][2].text or "").upper())
    other = open_index([write_shards(rows)])
    assert other.fingerprint() != index.fingerprint()
    assert open_index([tmp_path / "moved", tmp_path / "dataset"]).fingerprint() != (
        open_index([tmp_path / "dataset", tmp_path / "moved"]).fingerprint()
    )


def test_fingerprint_of_what_damage_left(three_shards: Path, damage: Callable[..., Path]) -> None:
    """All row groups have equal lengths: losing one of them leaves other samples than losing another."""
    fingerprints = set()
    for shard, row_group in ((0, 0), (0, 1), (2, 0)):
        damage(three_shards, shard, "sample_index", row_group)
        fingerprints.add(open_index([three_shards], on_damage="skip").fingerprint())
        damage(three_shards, shard, "sample_index", row_group)  # the bit flips back
    assert len(fingerprints) == 3
    assert open_index([three_shards]).fingerprint() not in fingerprints


def test_what_a_row_group_costs(three_shards: Path) -> None:
    """The samples that it would have handed out: not those that a filter takes out anyway."""
    error = DatasetError("broken")
    index = open_index([three_shards], filter=pc.field("sample_index") != 2)
    assert [index.loss(group, error).samples for group in range(6)] == [2, 1, 2, 1, 2, 1]
    assert index.loss(3, error).place.endswith("part-w0-000001.parquet: row group 1")


def test_manifests_come_along(three_shards: Path) -> None:
    """The vocabulary is the model's, from the manifest."""
    index = open_index([three_shards])
    assert isinstance(index.datasets[0].manifest, Manifest)
    assert index.vocab_size == 512
