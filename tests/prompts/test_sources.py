"""What is named as prompts: files, directories, patterns, standard input, pipes, rows in memory."""

import gzip
import hashlib
import os
import threading
from pathlib import Path

import pytest

from rollgen.errors import UsageError
from rollgen.prompts import sources
from rollgen.prompts.sources import ENDINGS, PromptFiles, default_stem


@pytest.fixture
def pipe(tmp_path):
    """`pipe(content)`: a named pipe that will be written once."""
    writers = []

    def make(content):
        path = tmp_path / "pipe"
        os.mkfifo(path)
        writers.append(threading.Thread(target=path.write_bytes, args=[content]))
        writers[-1].start()
        return path

    yield make
    for writer in writers:
        writer.join()


def places(files, limit=None):
    """(place, data) of all lines; the same twice."""
    with PromptFiles(files, limit) as lines:
        read = [(str(line), line.data.decode()) for line in lines]
        assert [(str(line), line.data.decode()) for line in lines] == read
    return read


def lines_of(tmp_path, content, limit=None):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    return [(line.number, line.data) for line in PromptFiles([path], limit)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"a\nb\n", [(1, b"a"), (2, b"b")], id="plain"),
        pytest.param(b"a\nb", [(1, b"a"), (2, b"b")], id="no last newline"),
        pytest.param(b"\xef\xbb\xbfa\n", [(1, b"a")], id="byte order mark"),
        pytest.param(b"a\n\xef\xbb\xbfb\n", [(1, b"a"), (2, b"b")], id="byte order mark of an appended file"),
        pytest.param(b"a\r\nb\r\n", [(1, b"a"), (2, b"b")], id="CRLF"),
        pytest.param(b"\n \t\na\n\n\nb\n\n", [(3, b"a"), (6, b"b")], id="blank lines are counted, not read"),
        pytest.param("a\u2028b\u2029c\u0085d\n".encode(), [(1, "a\u2028b\u2029c\u0085d".encode())], id="U+2028"),
        pytest.param(b"a\x0cb\x0bc\x1cd\n", [(1, b"a\x0cb\x0bc\x1cd")], id="other line breaks of str.splitlines"),
        pytest.param(b"a\rb\n", [(1, b"a\rb")], id="a lone CR is data"),
    ],
)
def test_lines_end_at_newline_only(tmp_path, content, expected):
    """Nothing but `\\n` ends a line, and line numbers are those of an editor."""
    assert lines_of(tmp_path, content) == expected


def test_limit_stops_reading(tmp_path):
    """Rows beyond the limit are not read; the source covers what was read."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"a\nbb\nccc\n")
    files = PromptFiles([path], limit=2)
    assert [line.data for line in files] == [b"a", b"bb"]
    assert files.sources[0].bytes == 5  # "a\n" and "bb\n"


def test_files_after_the_limit_may_be_empty(tmp_path):
    """A file that is not reached is not judged."""
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(b"a\n")
    second.write_bytes(b"")
    assert len(list(PromptFiles([first, second], limit=1))) == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"], ids=["empty", "blank lines", "only a mark"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    """An empty file is a mistake that the user wants to hear about."""
    with pytest.raises(UsageError, match=r"prompts\.jsonl: no prompts"):
        lines_of(tmp_path, content)


def test_missing_and_odd_files_are_refused_at_once(tmp_path):
    """Before anything is read."""
    with pytest.raises(UsageError, match=r"absent\.jsonl: cannot read it: No such file"):
        PromptFiles([tmp_path / "absent.jsonl"])
    with pytest.raises(UsageError, match="/dev/null: not a regular file, directory or pipe"):
        PromptFiles(["/dev/null"])
    with pytest.raises(UsageError, match="no prompts given"):
        PromptFiles([])


def test_a_directory_is_its_prompt_files_by_name(tmp_path):
    """Of the known endings, hidden ones and those of directories inside left out."""
    for name in ("b.jsonl", "a.ndjson", ".c.jsonl", "README.md", "config.json"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b"d"))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "e.jsonl").write_bytes(b"e")
    found = [("a.ndjson", "a.ndjson"), ("b.jsonl", "b.jsonl"), ("d.jsonl.gz", "d")]
    assert places([tmp_path]) == [(f"{tmp_path / name}:1", data) for name, data in found]


def test_a_directory_without_prompts_is_refused(tmp_path):
    """With the endings it could have had."""
    (tmp_path / "prompts.csv").write_bytes(b"a")
    with pytest.raises(
        UsageError, match=r"no prompt files in this directory; they end in \.jsonl, .*\.parquet"
    ) as error:
        PromptFiles([str(tmp_path)])
    assert all(ending in str(error.value) for ending in ENDINGS)


def test_a_pattern_stands_for_its_files(tmp_path, monkeypatch):
    """By name; `**` enters directories; hidden files do not match; a file of that very name comes first."""
    monkeypatch.chdir(tmp_path)
    Path("data/more").mkdir(parents=True)
    for name in ("data/b.jsonl", "data/a.jsonl", "data/.h.jsonl", "data/more/c.jsonl"):
        Path(name).write_bytes(b"x")
    assert [place for place, _ in places(["data/*.jsonl"])] == ["data/a.jsonl:1", "data/b.jsonl:1"]
    assert len(places(["data/**/*.jsonl"])) == 3
    Path("data/[ab].jsonl").write_bytes(b"literal")
    assert places(["data/[ab].jsonl"]) == [("data/[ab].jsonl:1", "literal")]
    with pytest.raises(UsageError, match=r"data/\*\.txt: no file matches this pattern"):
        PromptFiles(["data/*.txt"])


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input(stdin, name):
    """Read once, copied, and called `-` everywhere."""
    stdin(b"a\n\nb\n")
    with PromptFiles([name]) as lines:
        assert [str(line) for line in lines] == [str(line) for line in lines] == ["-:1", "-:3"]
        assert (lines.sources[0].name, lines.sources[0].bytes) == ("-", 5)


def test_a_compressed_pipe(pipe):
    """What `<(cat x.gz)` gives: no name tells what it is."""
    path = pipe(gzip.compress(b"a\nb\n"))
    assert places([path]) == [(f"{path}:1", "a"), (f"{path}:2", "b")]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(["a.jsonl", "a.jsonl"], "a.jsonl: named twice; name each input once", id="same name"),
        pytest.param(["a.jsonl", "./data/../a.jsonl"], "named twice, before as a.jsonl", id="another path"),
        pytest.param(["link.jsonl", "a.jsonl"], "a.jsonl: named twice, before as link.jsonl", id="link"),
        pytest.param(["data", "data/b.jsonl"], "data/b.jsonl: named twice", id="inside a directory"),
        pytest.param(["-", "/dev/stdin"], "/dev/stdin: named twice, before as -", id="standard input"),
    ],
)
def test_nothing_may_be_named_twice(tmp_path, monkeypatch, stdin, names, message):
    """Every prompt in it would be there twice."""
    monkeypatch.chdir(tmp_path)
    stdin(b"x")
    Path("data").mkdir()
    Path("a.jsonl").write_bytes(b"a")
    Path("data/b.jsonl").write_bytes(b"b")
    Path("link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(UsageError, match=message):
        PromptFiles(names)


def test_rows_from_memory_and_files_in_any_order(tmp_path):
    """Rows are counted from 0 over all of them; the order is the one given."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"{}\n")
    read = places([{"a": 1}, {"b": "\ud800"}, str(path), {"c": None}])
    assert read == [
        ("row 0", '{"a": 1}'),
        ("row 1", '{"b": "\\ud800"}'),
        (f"{path}:1", "{}"),
        ("row 2", '{"c": null}'),
    ]
    with pytest.raises(UsageError, match="row 1: b: a bytes is not a JSON value"):
        PromptFiles([{"a": 1}, {"b": b"x"}])


def test_copies_are_deleted(tmp_path, monkeypatch):
    """With the context, and when creation fails."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with PromptFiles([{"a": 1}]):
        assert list(tmp_path.iterdir())
    with pytest.raises(UsageError):
        PromptFiles([{"a": 1}, "absent"])
    assert not list(tmp_path.iterdir())


def test_places_travel_without_directories(tmp_path):
    """What a dataset stores of them."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"a")
    with PromptFiles([path, {"b": 1}]) as lines:
        assert [line.short for line in lines] == ["p.jsonl:1", "row 0"]


def test_sources_are_the_files_as_given(tmp_path):
    """Bytes and hash of what lies on disk, compressed or not."""
    paths = [tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"]
    contents = [b"a\nb", gzip.compress(b"c\nd\n")]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with PromptFiles(paths) as lines:
        assert len(list(lines)) == 4
        found = [(source.name, source.bytes, source.sha256) for source in lines.sources]
    expected = [(len(content), hashlib.sha256(content).hexdigest()) for content in contents]
    assert found == [("p.jsonl", *expected[0]), ("p.jsonl.gz", *expected[1])]


@pytest.mark.parametrize(
    ("first", "stem"),
    [
        pytest.param("data/prompts.jsonl", "prompts", id="file"),
        pytest.param(Path("prompts.v2.jsonl"), "prompts.v2", id="dots"),
        pytest.param("prompts.jsonl.gz", "prompts", id="gzip"),
        pytest.param("prompts.ndjson.zst", "prompts", id="zstd"),
        pytest.param("prompts.gz", "prompts", id="gzip alone"),
        pytest.param("-", "stdin", id="standard input"),
        pytest.param("/dev/stdin", "stdin", id="standard input by path"),
        pytest.param("data/*.jsonl", "data", id="pattern"),
        pytest.param("*.jsonl", "prompts", id="pattern here"),
        pytest.param("..", "parent", id="directory"),
        pytest.param({"prompt": "Hi"}, "prompts", id="row"),
    ],
)
def test_the_default_name_of_a_run(tmp_path, monkeypatch, first, stem):
    """By the first input alone."""
    (tmp_path / "parent" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "parent" / "here")
    assert default_stem([first, "other.jsonl"]) == stem


def test_rows_without_end_from_a_small_file(tmp_path, monkeypatch):
    """800 rows of 100 bytes come from a file of some 150: fewer than 40 KB may, here, and 1,000 times the file."""
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join([b"x" * 100] * 800)))
    monkeypatch.setattr(sources, "_MOST_BYTES", 40_000)
    assert len(list(PromptFiles([path]))) == 800
    monkeypatch.setattr(sources, "_MOST_GROWTH", 100)
    with pytest.raises(UsageError, match=r"p\.jsonl\.gz: 0 MiB of rows, and more to come, from a file of \d+ bytes"):
        list(PromptFiles([path]))
