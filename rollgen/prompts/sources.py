"""What was named as prompts: files of any kind, directories, patterns, URLs, standard input, pipes, rows in memory.

    prompts.jsonl   text, gzip, zstd or Parquet: the content decides (`streams.py`, `tables.py`)
    data/           the files in it that end in one of `ENDINGS`, by name; directories inside are not entered
    data/*.jsonl    a pattern that the shell did not expand (`**` enters directories), unless a file has that name
    s3://b/p.jsonl  a file in object storage, also a folder or a pattern there: copied to a temporary file first
    -               standard input; like a named pipe, or a shell's `<(...)`, copied to a temporary file first
    {"prompt": ..}  rows from Python, written to a temporary file first

because everything is read twice and must not change meanwhile. A URL holds no credentials: one that does is refused,
unseen. A place in an error is `FILE:LINE` (of the decompressed
text, from 1, blank lines counted; `-:LINE` for standard input), `FILE: row N` in Parquet and `row N` in memory (from
0).
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeAlias

from rollgen.errors import DatasetError, UsageError
from rollgen.format.manifest import PromptSource
from rollgen.prompts.parameters import check_encodable
from rollgen.prompts.readers import object_line
from rollgen.prompts.streams import Tally, is_parquet, read_lines
from rollgen.prompts.tables import read_rows
from rollgen.remote.objects import ObjectStore, is_url, local_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PromptInput: TypeAlias = str | Path | Mapping[str, Any]
"""A path, a URL, a pattern, `-`, or one row."""

_TEXT_ENDINGS = (".jsonl", ".ndjson")
_COMPRESSED_ENDINGS = (".gz", ".zst")
ENDINGS = (*_TEXT_ENDINGS, *(text + packed for text in _TEXT_ENDINGS for packed in _COMPRESSED_ENDINGS), ".parquet")
"""Of the files that are taken from a directory."""
_STDIN = frozenset({"-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"})
_PATTERN_SIGNS = frozenset("*?[")
_BUFFER = 1 << 20
_MOST_BYTES = 256 << 20
_MOST_GROWTH = 10_000
"""Rows may come to more bytes than the former if they come to less than the latter times the size of their file.

No text that someone wrote compresses that well, but 785 bytes of Parquet can refer 4,096 times to one text of 16 MiB.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the input: a non-blank line of text, or a row of a table as such a line."""

    prefix: str
    """Place and number together are the place in an error: `data/p.jsonl:`, `p.parquet: row `."""
    number: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.prefix}{self.number}"

    @property
    def short(self) -> str:
        """The place without the directory: datasets travel."""
        return f"{self.prefix.rpartition('/')[2]}{self.number}"


@dataclass(frozen=True, slots=True)
class _Source:
    """One file to read."""

    label: str
    """In errors: the path as given, or as found."""
    path: Path
    """Where it lies: elsewhere if it was copied."""
    name: str
    """In the manifest."""
    first_row: int | None = None
    """Number of the first row in memory; None for what was a file."""

    def lines(self, tally: Tally) -> Iterator[Line]:
        """Its rows. `tally` gets the bytes of the file as they were needed, all of them for Parquet."""
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            rows: Iterable[tuple[int, bytes]]
            if is_parquet(file):
                for block in iter(partial(file.read, _BUFFER), b""):
                    tally.add(block)
                prefix, first, rows = f"{self.label}: row ", 0, enumerate(read_rows(self.path, self.label))
            else:
                prefix, first = (f"{self.label}:", 0) if self.first_row is None else ("row ", self.first_row - 1)
                rows = read_lines(file, self.label, tally)
            yielded = 0
            for number, data in rows:
                yielded += len(data)
                if yielded > _MOST_BYTES and yielded > _MOST_GROWTH * size:
                    raise UsageError(
                        f"{self.label}: {yielded >> 20} MiB of rows, and more to come, from a file of {size} bytes; "
                        "that is no file of prompts"
                    )
                yield Line(prefix, first + number, data)


class PromptFiles:
    """The rows of several inputs, one after the other, at most `limit` of them. Can be iterated again and again.

    A context manager: on exit the temporary copies of what cannot be read twice are deleted. Raises UsageError on
    creation when an input is missing, cannot be read or is named twice, and while iterating when one is damaged or
    holds no row. Files after the one that reaches `limit` are not opened again.
    """

    def __init__(self, files: Sequence[PromptInput], limit: int | None = None) -> None:
        if not files:
            raise UsageError("no prompts given; name a file, a directory, a pattern or - for standard input")
        self.limit = limit
        self.sources: list[PromptSource] = []
        """The files as the last complete iteration found them: of each the part that was read."""
        with ExitStack() as copies:
            self._files = tuple(_open_all(files, copies))
            self._copies = copies.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._copies.close()

    def __str__(self) -> str:
        return ", ".join(file.label for file in self._files)

    def __iter__(self) -> Iterator[Line]:
        sources: list[PromptSource] = []
        rows = 0
        for file in self._files:
            before, tally = rows, Tally()
            for line in file.lines(tally):
                rows += 1
                yield line
                if rows == self.limit:
                    break
            if rows == before:
                raise UsageError(f"{file.label}: no prompts: the file is empty; give JSON Lines, one object a line")
            sources.append(PromptSource(name=file.name, bytes=tally.bytes, sha256=tally.sha256))
            if rows == self.limit:
                break
        self.sources = sources


def default_stem(files: Sequence[PromptInput]) -> str:
    """What a run of these prompts is called: `data/prompts.jsonl.gz` gives `prompts`, a directory its own name.

    Standard input gives `stdin`; a pattern the directory it is in; `prompts` where there is no name.
    """
    first = files[0] if files else {}
    if isinstance(first, Mapping):
        return "prompts"
    if str(first) in _STDIN:
        return "stdin"
    path = Path(first)
    if is_url(str(first)) and not _PATTERN_SIGNS & set(path.name) and not path.name.endswith(ENDINGS):
        return path.name
    if path.is_dir():
        return path.resolve().name or "prompts"
    if path.is_fifo():
        return "pipe" if path.name.isdigit() else path.stem
    if not path.exists() and _PATTERN_SIGNS & set(str(path)):
        named = [part for part in path.parts[:-1] if not _PATTERN_SIGNS & set(part)]
        return Path(*named).name or "prompts"
    return (path.with_suffix("") if path.suffix in _COMPRESSED_ENDINGS else path).stem


def _open_all(files: Iterable[PromptInput], copies: ExitStack) -> Iterator[_Source]:
    """Every file that is named, in order; those that cannot be read twice copied, the copies left to `copies`."""
    seen: dict[object, str] = {}
    row_count = 0
    for in_memory, group in groupby(files, lambda item: isinstance(item, Mapping)):
        if in_memory:
            rows = [item for item in group if isinstance(item, Mapping)]
            yield _copy_rows(rows, row_count, copies)
            row_count += len(rows)
            continue
        for item in group:
            if is_url(str(item)):
                yield from _open_url(str(item), seen, copies)
                continue
            try:
                yield from (_open(name, seen, copies) for name in _expand(str(item)))
            except OSError as error:
                raise UsageError(f"{error.filename or item}: cannot read it: {error.strerror}") from None


def _expand(name: str) -> list[str]:
    """The files that a name stands for. Raises UsageError if there are none, OSError."""
    if name.lower().startswith("file://"):
        name = str(local_path(name))
    path = Path(name)
    if path.is_dir():
        files = [file for file in path.iterdir() if file.name.endswith(ENDINGS) and not file.name.startswith(".")]
        if not files:
            raise UsageError(f"{name}: no prompt files in this directory; they end in {', '.join(ENDINGS)}")
        return sorted(map(str, files))
    if not path.exists() and _PATTERN_SIGNS & set(name):
        found = glob.glob(name, recursive=True)  # noqa: PTH207 (pathlib's matches hidden files, as no shell does)
        files = [file for file in map(Path, found) if not file.is_dir()]
        if not files:
            raise UsageError(f"{name}: no file matches this pattern; check the path")
        return sorted(map(str, files))
    return [name]


def _open(name: str, seen: dict[object, str], copies: ExitStack) -> _Source:
    """One input that is not a directory. Raises UsageError if it was `seen` or is not to be read, OSError."""
    if name in _STDIN:
        _see("-", name, seen)
        with os.fdopen(0, "rb", closefd=False) as stdin:
            return _Source("-", _copy(stdin, "-", copies), "-")
    if problem := check_encodable("its name", name):  # the manifest could not hold it
        raise UsageError(f"{name}: {problem}")
    path = Path(name)
    status = path.stat()
    _see((status.st_dev, status.st_ino), name, seen)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
        raise UsageError(f"{name}: not a regular file, directory or pipe; save the prompts to a file first")
    with path.open("rb") as file:
        copied = _copy(file, name, copies) if stat.S_ISFIFO(status.st_mode) else path
    return _Source(name, copied, path.name)


def _open_url(url: str, seen: dict[object, str], copies: ExitStack) -> Iterator[_Source]:
    """The files in object storage that a URL stands for, copied. Raises UsageError if there are none."""
    try:
        store, names = _find(url)
        for name in names:
            label, path = f"{store.url}/{name}", _new_file(copies)
            _see(label, label, seen)
            store.download(name, path)
            yield _Source(label, path, name.rpartition("/")[2])
    except DatasetError as error:  # the storage's part in this
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{url}: cannot copy it to a temporary file ({error.strerror}); set TMPDIR") from None


def _find(url: str) -> tuple[ObjectStore, list[str]]:
    """The objects that a URL stands for: of this very name, that match it as a pattern, or in that folder, by name."""
    folder = ObjectStore(url)
    root, name = _split(folder.url)
    store = ObjectStore(root)
    if name and not url.endswith("/") and store.exists(name):
        return store, [name]
    if _PATTERN_SIGNS & set(name):
        names = [found for found in store.list() if _matches(found.split("/"), name.split("/"))]
        if not names:
            raise UsageError(f"{url}: no object matches this pattern; check the URL")
        return store, names
    found = folder.list()
    names = [file for file in found if file.endswith(ENDINGS) and "/" not in file and not file.startswith(".")]
    if not names:
        what = f"no prompt files in this folder; they end in {', '.join(ENDINGS)}" if found else "nothing is there"
        raise UsageError(f"{url}: {what}; check the URL")
    return folder, names


def _split(url: str) -> tuple[str, str]:
    """Where to look, and for what: the last part of a URL, or all from the first one with a sign of a pattern."""
    parts = url.split("/")  # scheme, nothing, bucket, ...
    signs = [at for at, part in enumerate(parts) if _PATTERN_SIGNS & set(part)]
    at = max(3, min([*signs, len(parts) - 1]))
    return "/".join(parts[:at]), "/".join(parts[at:])


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern, as in a shell: `**` is any number of folders."""
    if not patterns:
        return not names
    if patterns[0] == "**" and _matches(names, patterns[1:]):
        return True
    if not names or (names[0].startswith(".") and not patterns[0].startswith(".")):
        return False
    if patterns[0] == "**":
        return _matches(names[1:], patterns)
    return fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def _see(identity: object, name: str, seen: dict[object, str]) -> None:
    """Refuse a file that was named before, by whatever path."""
    if identity in seen:
        before = "" if seen[identity] == name else f", before as {seen[identity]}"
        raise UsageError(f"{name}: named twice{before}; name each input once")
    seen[identity] = name


def _copy(stream: BinaryIO, label: str, copies: ExitStack) -> Path:
    path = _new_file(copies)
    try:
        with path.open("wb") as copy:
            shutil.copyfileobj(stream, copy, _BUFFER)
    except OSError as error:
        raise UsageError(f"{label}: cannot copy it to {path.parent} ({error.strerror}); set TMPDIR") from None
    return path


def _copy_rows(rows: Sequence[Mapping[str, Any]], first: int, copies: ExitStack) -> _Source:
    """Rows from memory as a file. Raises UsageError naming row and field of a value that JSON cannot hold."""
    path = _new_file(copies)
    with path.open("wb") as copy:
        for number, row in enumerate(rows, first):
            try:
                copy.write(object_line(row) + b"\n")
            except ValueError as error:
                raise UsageError(f"row {number}: {error}") from None
    return _Source("rows in memory", path, "rows", first)


def _new_file(copies: ExitStack) -> Path:
    return Path(copies.enter_context(tempfile.TemporaryDirectory(prefix="rollgen-"))) / "prompts"
