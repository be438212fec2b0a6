"""What is not a regular file, in the place of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollgen.errors import DatasetError
from rollgen.format.files import open_regular, read_regular


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "link to a device"])
def test_no_file(tmp_path: Path, kind: str) -> None:
    """It is neither waited for nor read."""
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DatasetError, match=f"^{path}: not a regular file; "):
        open_regular(path)


def test_a_link_to_a_file(tmp_path: Path) -> None:
    """It is the file, as in the caches of downloads."""
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert read_regular(tmp_path / "link", 3) == b"abc"


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    """No more than the limit is read."""
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DatasetError, match="x: larger than 1 MiB"):
        read_regular(tmp_path / "x", 1 << 20)
