"""What a workspace does about shards that are lost, that arrive damaged, or that could not be sent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from models.plans import some_samples

from rollgen.errors import DatasetError, MissingFile, Unreadable, Unsent
from rollgen.format.commit import WHOLE, Part, WriterSlot
from rollgen.format.done import PlannedSamples, Problem
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import Manifest
from rollgen.format.reader import open_shard, stored_keys, verify_shard
from rollgen.format.recovery import recover_shards
from rollgen.format.writer import ShardWriter
from rollgen.remote import workspace as workspace_module
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace


def test_a_shard_that_is_not_found_once(
    filled: Workspace, store: ObjectStore, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed, so that it is asked for again; nothing is retired."""
    errors = once(monkeypatch, lambda name: MissingFile(name))
    recover(filled, make_manifest())
    assert errors == ["data/part-w0-000000.parquet"]
    assert len(read_journal(filled.directory).committed) == 2


def test_a_shard_that_is_listed_and_never_found(
    filled: Workspace, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known about it: nothing changes."""
    once(monkeypatch, lambda name: MissingFile(name), times=9)
    with pytest.raises(Unreadable, match="it is listed"):
        recover(filled, make_manifest())
    assert len(read_journal(filled.directory).committed) == 2


def test_a_shard_that_is_lost_beside_one_that_is_never_found(
    filled: Workspace, store: ObjectStore, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are looked at before the first is retired."""
    store.delete("data/part-w0-000000.parquet")
    once(monkeypatch, lambda name: MissingFile(name), times=9, shard="w0-000001.parquet")
    with pytest.raises(Unreadable, match="it is listed"):
        recover(filled, make_manifest())
    assert len(read_journal(filled.directory).committed) == 2


def test_a_shard_that_arrives_cut_short_once(
    filled: Workspace, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched again, and is sound."""
    once(monkeypatch, lambda name: DatasetError(f"{name}: ends before byte 9"))
    recover(filled, make_manifest())
    assert len(read_journal(filled.directory).committed) == 2


def once(
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[str], Exception],
    *,
    times: int = 1,
    shard: str = "w0-000000.parquet",
) -> list[str]:
    """Requests for a part of the first shard, or another one, fail, so many of them. Returns their names."""
    real, failed = ObjectStore.read_range, []

    def read_range(store: ObjectStore, name: str, start: int, stop: int) -> bytes:
        if name.endswith(shard) and len(failed) < times:
            failed.append(name)
            raise error(name)
        return real(store, name, start, stop)

    monkeypatch.setattr(ObjectStore, "read_range", read_range)
    return failed


def recover(
    workspace: Workspace, manifest: Manifest, problem: Problem = lambda table: None, part: Part = WHOLE
) -> tuple[PlannedSamples, tuple[str, ...]]:
    """What is stored, and the findings."""
    samples = some_samples(problem)
    with WriterSlot(workspace.directory, "w0", part, remote=workspace) as slot:
        return samples, recover_shards(slot, manifest.config_digest, samples)


def make_waiting(workspace: Workspace, tmp_path: Path, manifest: Manifest, rows: Sequence[Any]) -> None:
    """A shard with these rows waits to be sent."""
    with (
        WriterSlot(tmp_path / "made", "w0") as slot,
        ShardWriter(slot, manifest, commit_interval=math.inf, max_buffer_bytes=1 << 30) as writer,
    ):
        for row in rows:
            writer.add(row)
    (tmp_path / "made/data/part-w0-000000.parquet").rename(workspace.directory / "data/part-w0-000002.parquet")


@pytest.mark.parametrize(("part", "sent"), [(WHOLE, [0, 1, 2, 3, 4, 5]), (Part(1, 2), [0, 1, 2, 3, 5])], ids=str)
def test_what_waits_is_stored_in_part(
    filled: Workspace,
    store: ObjectStore,
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
    part: Part,
    sent: list[int],
) -> None:
    """Others have made some of it: the rest, of this writer's part, is a shard of its own, in order."""
    make_waiting(filled, tmp_path, make_manifest(), [make_completion(prompt) for prompt in (1, 3, 4, 5)])
    samples, [finding] = recover(filled, make_manifest(), part=part)
    assert (np.flatnonzero(samples.done[0]) // 2).tolist() == sent
    if part == WHOLE:
        assert finding.endswith("added, without 2 of 4 samples: 2 stored already")
    else:
        left_out, _, kept = finding.partition("; all of it is kept in ")
        assert left_out.endswith("added, without 3 of 4 samples: 2 stored already, 1 of other parts")
        with open_shard(Path(kept)) as shard:
            assert stored_keys(shard).prompt_index.tolist() == [1, 3, 4, 5]
    new = tmp_path / "new.parquet"
    store.download("data/part-w0-000002.parquet", new)
    line = read_journal(filled.directory).committed["part-w0-000002.parquet"]
    verify_shard(new, line=line, config_digest=make_manifest().config_digest)
    assert line.rows == len(sent) - 4
    assert recover(filled, make_manifest())[1] == ()


def test_what_waits_is_of_other_parts(
    filled: Workspace, tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Any]
) -> None:
    """They may be nowhere else: it is kept, and nobody says that they are stored."""
    make_waiting(filled, tmp_path, make_manifest(), [make_completion(prompt) for prompt in (1, 4, 6)])
    samples, [finding] = recover(filled, make_manifest(), part=Part(1, 2))
    found, _, kept = finding.partition("; kept in ")
    assert found.endswith("last attempt; not sent, without 3 of 3 samples: 1 stored already, 2 of other parts")
    assert samples.done[0].sum() == 4
    assert list_shards(filled.directory) == []
    with open_shard(Path(kept)) as shard:
        assert stored_keys(shard).prompt_index.tolist() == [1, 4, 6]


def test_the_only_copy_is_on_disk_before_it_is_replaced(
    filled: Workspace,
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that fails right after the rename keeps the rows that are sent."""
    make_waiting(filled, tmp_path, make_manifest(), [make_completion(prompt) for prompt in (1, 4)])
    fsync, replaced = os.fsync, os.replace
    synced: set[int] = set()
    seen: list[bool] = []

    def note_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        if Path(target).name == "part-w0-000002.parquet":
            seen.append(Path(source).stat().st_ino in synced)
        replaced(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", note_fsync)
        patched.setattr(os, "replace", note_replace)
        recover(filled, make_manifest())
    assert seen == [True]


def test_all_that_waits_is_stored(
    filled: Workspace,
    store: ObjectStore,
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
) -> None:
    """It is not needed any more."""
    make_waiting(filled, tmp_path, make_manifest(), [make_completion(prompt) for prompt in (1, 3)])
    before = store.list()
    _, [finding] = recover(filled, make_manifest())
    assert finding.endswith("all of it has been stored since")
    assert list_shards(filled.directory) == []
    assert store.list().keys() == before.keys()


def test_what_waits_is_of_another_dataset(
    filled: Workspace,
    store: ObjectStore,
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
) -> None:
    """The ids are right and the prompts are not. It is kept where a start and an end remove nothing."""
    make_waiting(filled, tmp_path, make_manifest(), [make_completion(4, prompt="before")])
    before = store.list()

    def problem(table: pa.Table) -> str | None:
        return "row 0: prompt is not the plan's" if "before" in table["prompt"].to_pylist() else None

    samples, [finding] = recover(filled, make_manifest(), problem)
    assert not samples.done[0][8]
    assert store.list().keys() == before.keys()
    kept = Path(finding.rpartition(" ")[2])
    assert "prompt is not the plan's: it is of another dataset" in finding
    assert kept.exists()
    assert not kept.is_relative_to(filled.directory)


def test_an_outage(
    filled: Workspace,
    store: ObjectStore,
    notes: list[str],
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit is tried until the storage is back; the user is told once, and more is added meanwhile."""
    monkeypatch.setattr(workspace_module, "_PAUSES", (0.01, 0.02))
    tries = failing_uploads(monkeypatch, 3)
    with (
        WriterSlot(filled.directory, "w0", WHOLE, remote=filled) as slot,
        ShardWriter(slot, make_manifest(), commit_interval=1e-9) as writer,
    ):
        for prompt in range(4, 8):
            writer.add(make_completion(prompt))
            writer.tick()
        assert len(read_journal(filled.directory).committed) == 2  # and nobody waits for it
    assert len(tries) >= 4
    assert [note for note in notes if "is tried again for 300 s" in note] == notes
    assert len(notes) == 1
    assert sum(line.rows for line in read_journal(filled.directory).committed.values()) == 4 + 4


@pytest.mark.parametrize("ended", ["given up", "too long"])
def test_an_outage_that_lasts(
    filled: Workspace,
    notes: list[str],
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    ended: str,
) -> None:
    """The run ends with the storage's error, at once when somebody wants that, and all that was added waits here."""
    monkeypatch.setattr(workspace_module, "OUTAGE_SECONDS", 0.2 if ended == "too long" else 300)
    monkeypatch.setattr(workspace_module, "_PAUSES", (0.05, 0.05) if ended == "too long" else (60, 60))
    failing_uploads(monkeypatch, 10**6)
    manifest = make_manifest()
    with pytest.raises(DatasetError, match="no storage"), WriterSlot(filled.directory, "w0", remote=filled) as slot:
        sample_until_it_raises(slot, manifest, map(make_completion, range(4, 10)), filled, give_up=ended == "given up")
    assert len(notes) <= 1
    monkeypatch.undo()
    samples, findings = recover(filled, manifest)
    assert samples.done[0][::2].all()
    assert len(findings) >= 1


@pytest.mark.parametrize("cause", ["damaged since", "is another file"])
def test_what_no_other_try_mends(
    filled: Workspace, store: ObjectStore, notes: list[str], monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """Damage here, or somebody else's object there: it is told at once."""
    monkeypatch.setattr(workspace_module, "OUTAGE_SECONDS", 0.2)
    monkeypatch.setattr(workspace_module, "_PAUSES", (0.05, 0.05))
    line = replace(read_journal(filled.directory).committed["part-w0-000001.parquet"], file="part-w0-000002.parquet")
    shard = store.read("data/part-w0-000001.parquet", 1 << 20)
    if cause == "is another file":
        store.create(f"data/{line.file}", b"another")
    waiting = filled.directory / "data" / line.file
    waiting.write_bytes(shard if cause == "is another file" else shard[:-1])
    with pytest.raises(DatasetError, match=cause):
        filled.commit(line)
    assert waiting.exists()
    assert notes == []


def sample_until_it_raises(
    slot: WriterSlot, manifest: Manifest, rows: Iterator[Any], workspace: Workspace, *, give_up: bool
) -> None:
    with ShardWriter(slot, manifest, commit_interval=1e-9) as writer:
        for row in rows:
            writer.add(row)
            writer.tick()
        if give_up:
            workspace.give_up()


def failing_uploads(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """So many uploads fail. Returns the names that were tried."""
    real, tried = ObjectStore.upload, []

    def upload(store: ObjectStore, path: Path, name: str, sha256: str) -> None:
        tried.append(name)
        if len(tried) <= times:
            raise Unsent("no storage")
        real(store, path, name, sha256)

    monkeypatch.setattr(ObjectStore, "upload", upload)
    return tried


def test_recovery_sends_what_waits_under_the_numbers_of_its_commits(
    filled: Workspace, store: ObjectStore, make_manifest: Callable[..., Manifest]
) -> None:
    """Also after a lost shard was retired and a damaged one dropped: shard and commit have one number."""
    shard = store.read("data/part-w0-000001.parquet", 1 << 20)
    for name in ("data/part-w0-000000.parquet", "data/part-w0-000001.parquet"):
        store.delete(name)
    for number, content in ((2, b"damaged"), (3, shard)):
        (filled.directory / f"data/part-w0-{number:06d}.parquet").write_bytes(content)
    samples = some_samples()
    with WriterSlot(filled.directory, "w0", WHOLE, remote=filled) as slot:
        recover_shards(slot, make_manifest().config_digest, samples)
    assert np.flatnonzero(samples.done[0]).tolist() == [4, 6]  # sample 0 of prompts 2 and 3
    assert store.list("data").keys() == {"data/part-w0-000004.parquet"}
    journal = read_journal(filled.directory)
    assert journal.committed.keys() == {"part-w0-000004.parquet"}
    assert b"part-w0-000004.parquet" in store.read("journal/w0-000004.jsonl", 1 << 12)
