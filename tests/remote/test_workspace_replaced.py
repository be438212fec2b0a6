"""A workspace whose dataset is removed, or whose place somebody else takes: nothing of others is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollgen.directory import clean_directory
from rollgen.errors import ResumeRefused
from rollgen.format.commit import WHOLE, Holder, Part
from rollgen.format.failures import FailureLog
from rollgen.format.journal import JournalLine, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.remote import lease
from rollgen.remote.lease import Sign
from rollgen.remote.mirror import Mirror
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace

TIME = "2026-01-02T03:04:05+00:00"
"""When a run of these tests was made."""


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


@pytest.mark.parametrize("is_replaced", [False, True])
def test_failures_that_were_not_sent(
    store: ObjectStore, tmp_path: Path, make_manifest: Callable[..., Manifest], is_replaced: bool
) -> None:
    """Those of a dataset that has been replaced meanwhile do not get into the one that is there now."""
    (tmp_path / "failures").mkdir()
    path = tmp_path / "rollgen.json"
    create_manifest(tmp_path, make_manifest())
    store.put(path, path.name)
    FailureLog(tmp_path, "w0").record("p9", 9, 0, "engine", "no")
    if is_replaced:
        store.replace(path.name, path.read_bytes().replace(TIME.encode(), b"2026-01-02T03:04:06+00:00"))
    mirror = Mirror(store, tmp_path, "w0")
    mirror.pull(store.list())
    mirror.push_own()
    assert ("failures/w0.jsonl" in store.list()) is not is_replaced
