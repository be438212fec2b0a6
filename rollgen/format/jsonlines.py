"""JSON-lines files that outlive a crash: the journal and the failure log.

Whoever appends ends each line with a newline in the same write, so a line without one is an interrupted append: readers
skip it, and the next writer cuts it off before it appends.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from rollgen.errors import DatasetError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Line = TypeVar("_Line", bound="DataclassInstance")


def encode_line(line: DataclassInstance) -> bytes:
    """One dataclass as a line of such a file."""
    return json.dumps(asdict(line)).encode() + b"\n"


def append_line(path: Path, line: DataclassInstance, *, durable: bool) -> None:
    """Append one dataclass as a line; with `durable`, it is on disk on return. An OSError leaves nothing of it."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            _write_all(file, encode_line(line))
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # a full disk takes the beginning of a line
            raise


def read_lines(path: Path, kind: type[_Line]) -> Iterator[tuple[int, _Line]]:
    """`(line number, line)` of every complete line, unknown keys ignored.

    Raises DatasetError, naming file and line, for a line that is not JSON, lacks a field or has one of another type.
    """
    for number, line in parse_lines(path, kind):
        if line is None:
            raise DatasetError(f"{path}:{number}: damaged line; put the file back from a copy, or delete this line")
        yield number, line


def parse_lines(path: Path, kind: type[_Line]) -> Iterator[tuple[int, _Line | None]]:
    """The same for those who go on after damage: None for a damaged line."""
    parser = TypeAdapter(kind)
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.endswith(b"\n"):
                try:
                    line = parser.validate_json(text, strict=True)
                except ValidationError:
                    line = None
                yield number, line


def _write_all(file: io.FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def truncate_torn_tail(path: Path) -> None:
    """Cut off a last line that has no newline. The caller is the file's only writer."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete != len(content):
        os.truncate(path, complete)
