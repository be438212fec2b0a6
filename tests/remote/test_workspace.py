"""A workspace in one process: what goes up, what is here meanwhile, what is removed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollgen.directory import clean_directory
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WHOLE, Holder, Part, WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.reader import KEY_COLUMNS, open_dataset, open_shard, read_row_group, stored_keys
from rollgen.format.recovery import recover_shards
from rollgen.format.writer import ShardWriter
from rollgen.inspect.card import refresh_card
from rollgen.remote import lease
from rollgen.remote.lease import Sign
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace, glimpse


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://workspaces/{uuid4().hex}")


@pytest.fixture
def workspace(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Workspace(store.url, "w0", note=lambda text: None) as workspace:
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


def test_cleared(filled: Workspace, store: ObjectStore) -> None:
    """The dataset goes, other objects and the lock stay, and numbers go on."""
    store.create("notes.txt", b"")
    with filled.section():
        clean_directory(filled.directory)
        filled.clear()
    assert store.list().keys() == {"journal/w0.lock", "notes.txt"}
    assert filled.next_number == 2


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
    marked: list[int] = []
    with WriterSlot(filled.directory, "w0", WHOLE, remote=filled) as slot:
        recover_shards(slot, make_manifest().config_digest, lambda keys, place: marked.extend(keys.prompt_index))
    assert marked == [2, 3]
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
        Workspace(store.url, "w0", note=lambda text: None).__enter__()
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
