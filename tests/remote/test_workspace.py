"""A workspace in one process: what goes up, what is here meanwhile, what is removed."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest

from rollgen.directory import clean_directory
from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable, Unsent, UsageError
from rollgen.format.commit import WHOLE, Holder, Part, WriterSlot
from rollgen.format.done import PlannedKeys, PlannedSamples, Problem
from rollgen.format.failures import FailureLog
from rollgen.format.journal import JournalLine, list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.reader import KEY_COLUMNS, open_dataset, open_shard, read_row_group, stored_keys, verify_shard
from rollgen.format.recovery import recover_shards
from rollgen.format.writer import ShardWriter
from rollgen.inspect.card import refresh_card
from rollgen.remote import lease
from rollgen.remote import workspace as workspace_module
from rollgen.remote.lease import Sign
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace, glimpse, workspace_directory


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://workspaces/{uuid4().hex}")


@pytest.fixture
def notes() -> list[str]:
    """What the user is told."""
    return []


def anything(directory: Path) -> Problem:
    """Every row is of the dataset."""
    return lambda table: None


def some_samples(problem: Problem = lambda table: None) -> PlannedSamples:
    """Two samples of each of ten prompts are planned."""
    offsets = np.arange(0, 22, 2)
    return PlannedSamples(PlannedKeys(offsets, lambda indices: pa.array([f"p{index}" for index in indices]), problem))


@pytest.fixture
def workspace(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> Iterator[Workspace]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Workspace(store.url, "w0", clean=True, note=notes.append, problem_in=anything) as workspace:
        yield workspace


@pytest.fixture
def filled(
    workspace: Workspace, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Any]
) -> Workspace:
    """Two shards of two samples, committed."""
    manifest = make_manifest()
    with WriterSlot(workspace.directory, "w0", WHOLE, remote=workspace) as slot:
        with slot.section():
            assert create_manifest(slot.directory, manifest)
        FailureLog(slot.directory, "w0").record("p9", 9, 0, "engine", "no")
        with ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for index in range(4):
                writer.add(make_completion(index))
                if index % 2:
                    writer.flush()
    return workspace


def test_a_commit(filled: Workspace, store: ObjectStore) -> None:
    """Shards, their lines and the failures are there under the same numbers, and no shard is here any more."""
    assert store.list().keys() == {
        "data/part-w0-000000.parquet",
        "data/part-w0-000001.parquet",
        "failures/w0.jsonl",
        "journal/w0-000000.jsonl",
        "journal/w0-000001.jsonl",
        "journal/w0.lock",
        "rollgen.json",
    }
    assert filled.next_number == 2
    assert list_shards(filled.directory) == []


def test_a_commit_that_is_there_is_not_made_again(filled: Workspace, store: ObjectStore) -> None:
    """Asked again, as by a slot whose own journal could not be written for lack of room."""
    before = store.list()
    filled.commit(read_journal(filled.directory).committed["part-w0-000001.parquet"])
    assert store.list() == before
    assert filled.next_number == 2


def test_a_shard_that_cannot_be_removed_once(
    filled: Workspace,
    store: ObjectStore,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is committed: the next try removes it, and the next shard gets the next number, though it was built before."""
    real, failed = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "part-w0-000002.parquet" and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with (
        WriterSlot(filled.directory, "w0", remote=filled) as slot,
        ShardWriter(slot, make_manifest(), commit_interval=math.inf) as writer,
    ):
        writer.add(make_completion(4))
        with pytest.raises(DatasetError, match="Input/output error"):
            writer.flush()
        writer.add(make_completion(5))
    assert [line.file for line in writer.committed] == ["part-w0-000002.parquet", "part-w0-000003.parquet"]
    assert len(store.list("data")) == filled.next_number == 4
    assert list_shards(filled.directory) == []


def test_columns_are_here_meanwhile(filled: Workspace) -> None:
    """As shards of the dataset, of which everything else is not there, and never reads as zeros."""
    with filled.present(KEY_COLUMNS):
        shards = open_dataset(filled.directory).shards
        for number, stored in enumerate(shards):
            with stored.open() as shard:
                assert stored_keys(shard).prompt_index.tolist() == [2 * number, 2 * number + 1]
                with pytest.raises(DatasetError, match="damaged"):
                    read_row_group(shard, 0)
        assert len(shards) == 2
    assert list_shards(filled.directory) == []


def test_fetched_files_do_not_pile_up(filled: Workspace) -> None:
    """Each is gone once the next one is asked for."""
    lines = [line for _, line in sorted(read_journal(filled.directory).committed.items())]
    for shard in filled.fetched(lines, KEY_COLUMNS):
        with open_shard(shard.path(), line=shard.line, place=shard.place) as reader:
            assert reader.place == f"{filled.url}/data/{shard.line.file}"
    assert not list((filled.directory / "data").iterdir())


def test_fetches_that_nobody_waits_for(filled: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves waits for the 16 that have begun, and no others begin."""
    begun, go_on = [], threading.Event()

    def fetch(workspace: Workspace, line: JournalLine, size: int, columns: Sequence[str], path: Path) -> Path:
        begun.append(path)
        go_on.wait(60)
        return path

    monkeypatch.setattr(Workspace, "_fetch", fetch)
    line = next(iter(read_journal(filled.directory).committed.values()))
    shards = filled.fetched([replace(line, file=f"part-w1-{n:06d}.parquet") for n in range(40)], KEY_COLUMNS)
    next(shards)
    while len(begun) < 16:
        time.sleep(0.01)
    threading.Timer(0.2, go_on.set).start()
    shards.close()
    assert len(begun) == 16


def test_cleared(filled: Workspace, store: ObjectStore) -> None:
    """The dataset goes, other objects and the lock stay, and numbers go on."""
    store.create("notes.txt", b"")
    with filled.section():
        clean_directory(filled.directory)
        filled.clear()
    assert store.list().keys() == {"journal/w0.lock", "notes.txt"}
    assert filled.next_number == 2


def test_fences_of_all_times_stay(
    filled: Workspace, store: ObjectStore, make_manifest: Callable[..., Manifest]
) -> None:
    """Whatever only retires shards keeps writers away that may come back after more than one replacement."""
    lost = JournalLine("part-w0-000007.parquet", 0, "", "", 0, 0, 0, retired=True)
    both = encode_line(next(iter(read_journal(filled.directory).committed.values()))) + encode_line(lost)
    store.create("journal/w0-000007.jsonl", encode_line(lost))
    store.create("journal/w0-000008.jsonl", both)
    for _ in range(2):
        clear(filled)
        assert [name for name in store.list("journal") if name.endswith(".jsonl")] == ["journal/w0-000007.jsonl"]
        store.create("rollgen.json", b"")


def test_a_run_that_nobody_wants_to_replace(
    filled: Workspace, store: ObjectStore, make_manifest: Callable[..., Manifest]
) -> None:
    """One that was not seen at the start, though it was there, is not removed."""
    filled._clean = False
    before = store.list()
    with pytest.raises(ResumeRefused, match="a run has appeared there"):
        clear(filled)
    assert {name: size for name, size in store.list().items() if not name.endswith(".lock")} == {
        name: size for name, size in before.items() if not name.endswith(".lock")
    }


def test_a_manifest_that_is_listed_and_not_found(
    filled: Workspace, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is an error of the storage, and not the lack of a dataset, which a new one would replace."""

    def info(store: ObjectStore, name: str) -> dict[str, Any]:
        raise MissingFile(name)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "_info", info)
        with pytest.raises(MissingFile, match=r"rollgen\.json"):
            filled._mirror.pull_shared()
    assert (filled.directory / "rollgen.json").exists()


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
        assert not writer.committed  # and nobody waits for it
    assert len(tries) >= 4
    assert [note for note in notes if "is tried again for 300 s" in note] == notes
    assert len(notes) == 1
    assert sum(line.rows for line in writer.committed) == 4


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


def test_workspaces_of_two_storages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same URL at another endpoint is another dataset; Amazon is one, whatever the region."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    endpoints = ["http://one:9000", "http://two:9000", "https://s3.eu-west-1.amazonaws.com", "https://s3.amazonaws.com"]
    places = []
    for endpoint in endpoints:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        places.append(workspace_directory("s3://bucket/run", "w0"))
    assert len(set(places)) == 3
    assert places[2] == places[3]


def take_over(store: ObjectStore, name: str) -> None:
    """Leave the lock of a process on another machine in place of the one that is there."""
    store.replace(name, replace(Sign.of_this_process(Holder()), host="elsewhere").to_json())


def clear(workspace: Workspace, *taken: str) -> None:
    """Remove the dataset, while these locks are taken over in the section."""
    with workspace.section():
        for name in taken:
            take_over(ObjectStore(workspace.url), name)
        workspace.clear()


def test_taken_over(filled: Workspace, store: ObjectStore) -> None:
    """Who was silent for too long gets into no section, says nothing, and removes nothing."""
    lock = store.read("journal/w0.lock", 1 << 12)
    take_over(store, "journal/w0.lock")
    before = store.list()
    with pytest.raises(ResumeRefused, match="silent for too long"):
        clear(filled)
    with pytest.raises(ResumeRefused, match="silent for too long"):
        filled.declare(Holder())
    assert store.list() == before
    store.replace("journal/w0.lock", lock)


def test_taken_over_in_the_section(filled: Workspace, store: ObjectStore) -> None:
    """The section has gone to another one before anything was removed."""
    before = store.list().keys()
    with pytest.raises(ResumeRefused, match="silent for too long"):
        clear(filled, "journal/start-section.lock")
    assert store.list().keys() == before | {"journal/start-section.lock"}


def test_others_that_come_later(workspace: Workspace, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are seen; only one that works by another plan is waited for until it is known to live."""
    monkeypatch.setattr(lease, "DEAD_SECONDS", 0.2)
    monkeypatch.setattr(lease, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)
    holder = Holder(Part(1, 2), "attempt", "a plan")
    store.create("journal/s1of2.lock", replace(Sign.of_this_process(holder), host="elsewhere").to_json())
    assert workspace.others() == {"s1of2": holder}
    workspace.declare(Holder(WHOLE, "attempt", "a plan"))
    assert workspace.others() == {"s1of2": holder}
    workspace.declare(Holder(WHOLE, "attempt", "another plan"))
    assert workspace.others() == {}


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


def test_the_card_is_that_of_all(filled: Workspace, store: ObjectStore) -> None:
    """Of what others have committed meanwhile, too; it is sent in the section; one that was edited stays."""
    line = next(iter(read_journal(filled.directory).committed.values()))
    other = replace(line, file="part-s1of2-000000.parquet", rows=100)
    store.create("journal/s1of2-000000.jsonl", encode_line(other))
    refresh_card(filled.directory, remote=filled)
    assert "| rows | 104 |" in store.read("README.md", 1 << 20).decode()
    store.replace("README.md", b"mine")
    refresh_card(filled.directory, remote=filled)
    assert store.read("README.md", 10) == b"mine"


@pytest.mark.parametrize("cause", ["a file in its place", "no home"])
def test_no_room_for_a_workspace(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """A mistake in the environment, before anything is asked of the storage."""
    if cause == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="name another place in XDG_CACHE_HOME"):
        Workspace(store.url, "w0", note=print, problem_in=anything).__enter__()
    assert store.list() == {}


def test_a_private_directory(workspace: Workspace) -> None:
    """Prompts and completions lie in it."""
    assert workspace.directory.stat().st_mode & 0o77 == 0


def test_a_glimpse(filled: Workspace, store: ObjectStore) -> None:
    """The small files, without a lock and without a change."""
    before = store.list()
    with glimpse(store.url) as directory:
        assert (directory / "rollgen.json").exists()
        assert len(list((directory / "journal").iterdir())) == 2
    assert store.list() == before
    store.delete("rollgen.json")
    with pytest.raises(UsageError, match=r"holds shards but no rollgen\.json"), glimpse(store.url):
        pass
