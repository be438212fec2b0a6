"""What is not a regular file, in the place of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from models.disk import NO_HARD_LINKS, no_hard_links

from rollgen.errors import DatasetError, UsageError
from rollgen.format.files import link, new_file, open_descriptor, open_regular, read_regular, refuse_links


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


WRITING = os.O_WRONLY | os.O_APPEND | os.O_CREAT


@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "link to nothing", "link to itself"])
def test_nothing_else_is_written(tmp_path: Path, kind: str) -> None:
    """Neither waited for, nor followed, nor made."""
    path, target = tmp_path / "x", tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        target.write_bytes(b"precious")
        path.symlink_to(target)
    else:
        path.symlink_to(target if kind == "link to nothing" else path)
    with pytest.raises((DatasetError, IsADirectoryError), match=r"x: not a regular file; |Is a directory"):
        open_descriptor(path, WRITING)
    assert not target.exists() or target.read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["nothing", "file", "pipe", "link", "link to nothing"])
def test_a_new_file(tmp_path: Path, kind: str) -> None:
    """It takes the place of what had its name, and nothing behind that is touched."""
    path, target = tmp_path / "x", tmp_path / "target"
    if kind == "file":
        path.write_bytes(b"a longer content")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind.startswith("link"):
        path.symlink_to(target)
    if kind == "link":
        target.write_bytes(b"precious")
    with new_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert not path.is_symlink()
    assert target.exists() is (kind == "link")
    assert kind != "link" or target.read_bytes() == b"precious"


def test_links_that_do_no_harm(tmp_path: Path) -> None:
    """The directory may be one, and so may shards, the card, and what is not of the format."""
    directory = tmp_path / "run"
    (directory / "data").mkdir(parents=True)
    for name in ("data/part-w0-000000.parquet", "README.md", "notes"):
        (directory / name).symlink_to("/nowhere")
    (tmp_path / "link").symlink_to(directory)
    refuse_links(tmp_path / "link")
    refuse_links(tmp_path / "nothing")


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "journal",
        "failures",
        "logs",
        "tokenizer",
        "quarantine",
        "retired",
        "rollgen.json",
        "plan.parquet",
        "retry-1.parquet",
        "journal/w0.jsonl",
        "journal/w0.lock",
        "journal/start-section.lock",
        "journal/replacement.json",
        "failures/w0.jsonl",
    ],
)
def test_links_that_may_do_harm(tmp_path: Path, name: str) -> None:
    """What is behind them would be written, cut, emptied or deleted."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("/nowhere")
    with pytest.raises(UsageError, match=rf"/{name}: is a link, and what is written into a dataset must not go"):
        refuse_links(tmp_path)


def test_a_second_name(tmp_path: Path) -> None:
    """It is never taken from another file; where there are no hard links, the error is not one of permissions."""
    (tmp_path / "x").write_bytes(b"abc")
    link(tmp_path / "x", tmp_path / "y")
    assert (tmp_path / "y").samefile(tmp_path / "x")
    with pytest.raises(FileExistsError):
        link(tmp_path / "x", tmp_path / "y")
    with no_hard_links(), pytest.raises(DatasetError, match=f"^{tmp_path}: {NO_HARD_LINKS}"):
        link(tmp_path / "x", tmp_path / "z")
