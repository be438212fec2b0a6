"""What a user is told of a run into object storage: the URL, and the local place where the local disk has failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from uuid import uuid4

import pytest

from rollgen.errors import DatasetError
from rollgen.format.commit import WHOLE
from rollgen.loop.place import open_place
from rollgen.remote.workspace import workspace_directory


def fail_in(out: str, name: str, cause: Exception | None) -> None:
    """Be told of something wrong with this file of the workspace, by one who has caught `cause`."""
    with open_place(out, "w0", WHOLE, clean=False, note=lambda text: None) as place:
        raise DatasetError(f"{place.directory / name}: wrong") from cause


@pytest.mark.parametrize(
    ("name", "cause", "url"),
    [
        ("rollgen.json", None, True),
        ("rollgen.json", FileNotFoundError(), True),
        ("rollgen.json", ValueError(), True),
        ("plan.parquet", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), False),
        ("plan.parquet", PermissionError(), False),
        ("data/part-w0-000000.parquet", None, False),
    ],
    ids=["damaged", "missing", "senseless", "full disk", "permission", "a shard that waits"],
)
def test_what_errors_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cause: Exception | None, url: bool
) -> None:
    """Copies of objects are called by the URL; whoever has to make room is told where."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = f"memory://places/{uuid4().hex}"
    with pytest.raises(DatasetError) as caught:
        fail_in(out, name, cause)
    place = out if url else workspace_directory(out, "w0")
    assert str(caught.value) == f"{place}/{name}: wrong"
