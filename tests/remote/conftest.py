"""An S3 server for all tests of this folder, whole runs into it, and workspaces of a storage in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from models.datasets import write_prompts
from models.plans import anything
from models.program import Program
from models.storage import s3_server
from models.stored_run import StoredRuns

from rollgen.format.commit import WHOLE, WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace

PROMPTS = 12


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as root:
        yield root


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """`program(*arguments)` runs `rollgen` in a process of its own, with a replayed engine."""
    return Program(tmp_path_factory.mktemp("scratch"))


@pytest.fixture
def make_runs(program: Program, tmp_path: Path, tiny_model: Path) -> Callable[[str], StoredRuns]:
    """`make_runs(root)`: runs of twelve prompts into a new folder of a bucket."""

    def make(root: str) -> StoredRuns:
        runs = StoredRuns(program, tmp_path, tiny_model, f"{root}/{uuid4().hex}")
        write_prompts(runs.prompts, PROMPTS)
        return runs

    return make


@pytest.fixture
def stored_runs(make_runs: Callable[[str], StoredRuns], bucket: str) -> StoredRuns:
    """Runs of twelve prompts into a new folder of the bucket."""
    return make_runs(bucket)


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore(f"memory://workspaces/{uuid4().hex}")


@pytest.fixture
def notes() -> list[str]:
    """What the user is told."""
    return []


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
