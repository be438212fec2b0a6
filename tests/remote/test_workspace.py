"""A workspace in one process: what goes up, what is here meanwhile, where it lies."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.disk import NO_HARD_LINKS, no_hard_links
from models.plans import anything

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable, Unsent, UsageError
from rollgen.format.commit import WHOLE, Holder, WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.journal import JournalLine, list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import Manifest
from rollgen.format.reader import KEY_COLUMNS, open_dataset, open_shard, read_row_group, stored_keys
from rollgen.format.writer import ShardWriter
from rollgen.inspect.card import refresh_card
from rollgen.remote.lease import SECTION_LOCK, Lease, Watch
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace, glimpse, workspace_directory


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
    assert list(read_journal(filled.directory).committed)[2:] == ["part-w0-000002.parquet", "part-w0-000003.parquet"]
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
    begun, go_on, shutdown = [], threading.Event(), ThreadPoolExecutor.shutdown

    def fetch(workspace: Workspace, line: JournalLine, size: int, columns: Sequence[str], path: Path) -> Path:
        begun.append(path)
        assert go_on.wait(180)
        return path

    def leave(threads: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(threads, wait=False, cancel_futures=cancel_futures)
        go_on.set()
        shutdown(threads, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", leave)
    monkeypatch.setattr(Workspace, "_fetch", fetch)
    line = next(iter(read_journal(filled.directory).committed.values()))
    shards = filled.fetched([replace(line, file=f"part-w1-{n:06d}.parquet") for n in range(40)], KEY_COLUMNS)
    next(shards)
    while len(begun) < 16:
        time.sleep(0.01)
    shards.close()
    assert len(begun) == 16


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


@pytest.mark.timeout(180)
def test_a_section_that_is_not_waited_for(workspace: Workspace, store: ObjectStore, notes: list[str]) -> None:
    """Its holder lives: whoever gives up is told so, and can ask again."""
    slot = WriterSlot(workspace.directory, "w0", WHOLE, remote=workspace)
    other = Lease(store, SECTION_LOCK, Holder(), Watch(store))
    other.acquire(notes.append)
    with (
        pytest.raises(ResumeRefused, match=r"start-section\.lock: another rollgen is writing"),
        slot.section(lambda: True),
    ):
        pass
    other.release()
    with slot.section(lambda: True):
        assert SECTION_LOCK in store.list()


def test_a_workspace_without_hard_links(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage has nothing to do with it, nor has --out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (
        no_hard_links(),
        pytest.raises(UsageError, match=rf"^{tmp_path}/cache/.*: {NO_HARD_LINKS}name another place in XDG_CACHE_HOME$"),
    ):
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


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ((ObjectStore, "put"), Unsent),
        ((ObjectStore, "put"), PermissionError),
        ((ObjectStore, "put"), KeyboardInterrupt),
        ((Lease, "check"), Unreadable),
        ((Lease, "check"), ResumeRefused),
    ],
    ids=["not taken", "not readable here", "Ctrl-C", "no answer", "another has gone on"],
)
def test_what_cannot_be_sent_at_the_end_waits(
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
    step: tuple[type, str],
    error: type[BaseException],
) -> None:
    """Failures and logs of a run that ends while the storage fails: here, told of, and sent by the next start."""

    def fails(*args: object) -> None:
        raise error("as it was to")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    workspace = Workspace(store.url, "w0", note=notes.append, problem_in=anything).__enter__()
    FailureLog(workspace.directory, "w0").record("p9", 9, 0, "engine", "no")
    (workspace.directory / "logs").mkdir()
    (workspace.directory / "logs/20250101T000000-w0.log").write_text("what happened\n")
    with monkeypatch.context() as patched:
        patched.setattr(*step, fails)
        with pytest.raises(error, match="as it was to"):
            workspace.__exit__(None)
    assert store.list() == {}
    assert notes == [
        f"{store.url}: failures and logs that could not be sent wait in {workspace.directory} and go with --resume on "
        "this machine"
    ]
    with Workspace(store.url, "w0", note=notes.append, problem_in=anything):
        pass
    assert store.list().keys() == {"failures/w0.jsonl", "logs/20250101T000000-w0.log"}
    assert not workspace.directory.exists()
    assert len(notes) == 1


def test_an_end_that_owes_nothing_removes_the_workspace(
    filled: Workspace, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """Also when the storage does not answer any more: all that is in it has been sent."""

    def fails(lease: Lease) -> None:
        raise Unreadable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Lease, "check", fails)
        with pytest.raises(Unreadable):
            filled.__exit__(None)
    assert not filled.directory.exists()
    assert notes == []
    filled.__enter__()  # for the fixture to leave
