"""Runs on a local Ray into object storage: every planned sample is stored once, whatever dies or fails.

Ray has been started without a word of the storage: whatever gets there, the driver has sent.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import s3fs
from models.datasets import planned_keys, read_rows
from models.ports import kept_port
from models.runs import Recorder
from models.storage import s3_server

from rollgen.errors import DatasetError
from rollgen.format.journal import list_shards, read_journal
from rollgen.loop.report import RunStats
from rollgen.remote import workspace
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import workspace_directory
from rollgen.verify.dataset import verify_dataset

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
"""One after the other: clusters of one machine would see each other."""

PROMPTS, N = 20, 3


@pytest.fixture
def stored_runs(ray_runs: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of 20 prompts, three samples each, into a new folder of the bucket; they commit often."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ray_runs.out = f"{bucket}/{uuid4().hex}"
    return ray_runs


def check_whole(url: str, copy: Path, n: int = N) -> None:
    """A plain copy of all objects holds exactly what is planned, each shard with its line, and verifies clean."""
    store = ObjectStore(url)
    for name in store.list():
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store.download(name, path)
    assert read_rows(copy).keys() == planned_keys(PROMPTS, n)
    assert read_journal(copy).committed.keys() == {path.name for path in list_shards(copy)}
    assert not list(copy.rglob("*.lock"))
    assert verify_dataset(copy).is_clean
    assert not workspace_directory(url, "w0").exists()


def commits(url: str) -> int:
    """How many there are."""
    return len([name for name in ObjectStore(url).list("journal") if name.endswith(".jsonl")])


def wait_for_commits(url: str, count: int, process: BaseProcess) -> None:
    """Until there are more than so many."""
    deadline = time.monotonic() + 180
    while commits(url) <= count:
        assert process.exitcode is None
        assert time.monotonic() < deadline, "no commit in time"
        time.sleep(0.1)


def test_a_run_in_which_a_replica_is_killed(stored_runs: Any, node_files: Path, tmp_path: Path) -> None:
    """kill -9, in mid-run: its next process makes the rest, and nothing is left on the node. Nothing is owed then."""
    stats = stored_runs("mortal", commit_interval=0.2)
    assert (stats.stored, stats.failed, stats.exit_code) == (60, 0, 0)
    assert stats.restarts == 1
    check_whole(stored_runs.out, tmp_path / "copy")
    wait_until_empty(node_files)
    assert stored_runs(resume=True).stored == 0


def test_interrupted_then_killed_then_continued(stored_runs: Any, tmp_path: Path) -> None:
    """Ctrl-C commits what is finished, kill -9 of the driver loses no commit, three replicas make just the rest."""
    n, out = 12, stored_runs.out
    first = stored_runs.start("third", n)
    wait_for_commits(out, 0, first)
    os.kill(first.pid, signal.SIGINT)
    first.join(180)
    assert first.exitcode == 128 + signal.SIGINT

    second = stored_runs.start("two_thirds", n)
    wait_for_commits(out, commits(out), second)
    second.kill()
    second.join(180)

    stats = stored_runs(resume=True, n=n, replicas=3)
    assert 0 < stats.stored_before < PROMPTS * n
    assert stats.stored_before + stats.stored == PROMPTS * n
    check_whole(out, tmp_path / "copy", n)


class Stopping(Recorder):
    """Stops a server when something is stored."""

    def __init__(self, server: ExitStack) -> None:
        super().__init__()
        self._server = server

    def progress(self, stats: RunStats) -> None:
        super().progress(stats)
        if stats.stored:
            self._server.close()


def test_a_storage_that_fails(stored_runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mid-run: the run ends with the storage's error, and what the driver has goes with the next start."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(workspace, "OUTAGE_SECONDS", 0)
    with kept_port() as port:
        with ExitStack() as server:
            server.enter_context(s3_server(port))  # it has the same objects as that of the bucket
            with pytest.raises(DatasetError, match=f"^{stored_runs.out}/.*: cannot be .*see to the connection"):
                stored_runs("slow", commit_interval=0.2, reporter=Stopping(server))
        notes = stored_runs.reporter.notes
        assert any("finished shards that could not be sent: 1; they wait in" in note for note in notes)
        with s3_server(port):
            stats = stored_runs(resume=True)
    assert any("finished, but not committed by the last attempt" in note for note in stored_runs.reporter.notes)
    assert stats.stored_before + stats.stored == PROMPTS * N
    check_whole(stored_runs.out, tmp_path / "copy")


def wait_until_empty(directory: Path) -> None:
    """Ray ends processes after the job that had them."""
    deadline = time.monotonic() + 180
    while left := [*directory.glob("rollgen-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
