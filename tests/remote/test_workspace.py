"""A workspace in one process: what goes up, what is here meanwhile, what is removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollgen.directory import clean_directory
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WHOLE, WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.reader import KEY_COLUMNS, open_dataset, open_shard, read_row_group, stored_keys
from rollgen.format.writer import ShardWriter
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
