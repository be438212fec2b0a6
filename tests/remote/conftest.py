"""An S3 server for all tests of this folder, and whole runs into it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from models.datasets import write_prompts
from models.program import Program
from models.storage import s3_server
from models.stored_run import StoredRuns

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
