"""Prompts named by URLs: files, folders and patterns in object storage."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from rollgen.errors import UsageError
from rollgen.prompts.sources import ENDINGS, PromptFiles, default_stem


@pytest.fixture
def put() -> Iterator[Callable[..., None]]:
    """`put(path, content)` makes an object below `memory://prompts-test/`, gone when the test ends."""
    system = fsspec.filesystem("memory")

    def make(path: str, content: bytes) -> None:
        system.pipe_file(f"/prompts-test/{path}", content)

    yield make
    system.rm("/prompts-test", recursive=True)


def places(files: list[object]) -> list[tuple[str, str]]:
    """(place, data) of all lines; the same twice."""
    with PromptFiles(files) as lines:
        read = [(str(line), line.data.decode()) for line in lines]
        assert [(str(line), line.data.decode()) for line in lines] == read
    return read


def test_a_file(put: Callable[..., None]) -> None:
    """It is copied once: what becomes of the object afterwards changes nothing; the manifest has its name alone."""
    put("a/p.jsonl", b"1\n2\n")
    with PromptFiles(["memory://prompts-test/a/p.jsonl"]) as lines:
        put("a/p.jsonl", b"3\n")
        assert [str(line) for line in lines] == [f"memory://prompts-test/a/p.jsonl:{n}" for n in (1, 2)]
        assert [line.short for line in lines] == ["p.jsonl:1", "p.jsonl:2"]
        assert [(source.name, source.bytes) for source in lines.sources] == [("p.jsonl", 4)]
        assert str(lines) == "memory://prompts-test/a/p.jsonl"


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder(put: Callable[..., None], slash: str) -> None:
    """Its prompt files by name, compressed ones among them; hidden ones and those of folders inside left out."""
    put("d/b.jsonl", b"b")
    put("d/a.jsonl.gz", gzip.compress(b"a"))
    for name in ("d/.h.jsonl", "d/README.md", "d/more/c.jsonl"):
        put(name, b"x")
    found = [("memory://prompts-test/d/a.jsonl.gz:1", "a"), ("memory://prompts-test/d/b.jsonl:1", "b")]
    assert places([f"memory://prompts-test/d{slash}"]) == found


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("d/*.jsonl", ["d/a.jsonl", "d/b.jsonl"]),
        ("d/[b-z].jsonl", ["d/b.jsonl"]),
        ("d/**/*.jsonl", ["d/a.jsonl", "d/b.jsonl", "d/e/f/c.jsonl"]),
        ("*/e/**", ["d/e/f/c.jsonl"]),
        ("d/.*.jsonl", ["d/.h.jsonl"]),
        ("[d]/[*].jsonl", ["d/*.jsonl"]),
    ],
)
def test_a_pattern(put: Callable[..., None], pattern: str, found: list[str]) -> None:
    """As in a shell: `*` stays in its folder and matches no hidden name, `**` enters folders."""
    for name in ("d/a.jsonl", "d/b.jsonl", "d/.h.jsonl", "d/e/f/c.jsonl", "d/e/.f/c.jsonl", "other.jsonl"):
        put(name, b"x")
    if pattern == "[d]/[*].jsonl":
        put("d/*.jsonl", b"x")
    assert [place for place, _ in places([f"memory://prompts-test/{pattern}"])] == [
        f"memory://prompts-test/{name}:1" for name in found
    ]


def test_a_name_that_looks_like_a_pattern(put: Callable[..., None]) -> None:
    """The object of that very name comes first."""
    put("[ab].jsonl", b"literal")
    put("a.jsonl", b"a")
    assert places(["memory://prompts-test/[ab].jsonl"]) == [("memory://prompts-test/[ab].jsonl:1", "literal")]


def test_with_files_and_rows(tmp_path: Path, put: Callable[..., None]) -> None:
    """In the order given; a `file://` URL is a file."""
    put("p.jsonl", b"remote")
    path = tmp_path / "p q.jsonl"
    path.write_bytes(b"local")
    files = [f"file://{tmp_path}/p%20q.jsonl", "memory://prompts-test/p.jsonl", {"a": 1}]
    assert [data for _, data in places(files)] == ["local", "remote", '{"a": 1}']
    with pytest.raises(UsageError, match="named twice"):
        PromptFiles([str(path), f"file://{tmp_path}/p%20q.jsonl"])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://prompts-test/absent.jsonl", "nothing is there; check the URL"),
        ("memory://prompts-test/d", f"no prompt files in this folder; they end in .*{ENDINGS[-1]}"),
        ("memory://prompts-test/*.csv", "no object matches this pattern"),
        ("nosuch://bucket/p.jsonl", "is nosuch:// right"),
    ],
    ids=["absent", "no prompts", "no match", "unknown scheme"],
)
def test_what_is_not_there(put: Callable[..., None], url: str, message: str) -> None:
    """Bad input, with the URL."""
    put("d/README.md", b"x")
    with pytest.raises(UsageError, match=message) as caught:
        PromptFiles([url])
    assert str(caught.value).startswith(url.rpartition("/")[0])


@pytest.mark.parametrize("url", ["s3://me:hunter2@bucket/p.jsonl", "https://host/p.jsonl?token=hunter2"])
def test_credentials_in_a_url(url: str) -> None:
    """They would be in logs and errors: refused, and not repeated."""
    with pytest.raises(UsageError, match="credentials in the environment") as caught:
        PromptFiles([url])
    assert "hunter2" not in str(caught.value)


def test_the_same_object_twice(put: Callable[..., None]) -> None:
    """Under its name and by a pattern."""
    put("p.jsonl", b"x")
    with pytest.raises(UsageError, match="named twice"):
        PromptFiles(["memory://prompts-test/p.jsonl", "memory://prompts-test/*.jsonl"])


def test_copies_are_deleted(tmp_path: Path, put: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the context, and when a later input is missing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    put("p.jsonl", b"x")
    with PromptFiles(["memory://prompts-test/p.jsonl"]):
        assert list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="nothing is there"):
        PromptFiles(["memory://prompts-test/p.jsonl", "memory://prompts-test/absent"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "stem"),
    [
        ("s3://bucket/data/prompts.jsonl.gz", "prompts"),
        ("s3://bucket/v1.2/", "v1.2"),
        ("s3://bucket", "bucket"),
        ("s3://bucket/data/*.jsonl", "data"),
    ],
)
def test_the_default_name_of_a_run(url: str, stem: str) -> None:
    """By the URL alone: nothing is asked of the storage."""
    assert default_stem([url]) == stem
