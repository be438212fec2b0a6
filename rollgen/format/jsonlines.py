"""JSON-lines files that outlive a crash: the journal and the failure log.

Whoever appends ends each line with a newline in the same write, so a line without one is an interrupted append: readers
skip it, and the next writer cuts it off before it appends.

JSON is taken strictly (`parse_object`), so that all readers see the same: no key twice, no NaN, no half of a surrogate
pair, numbers of the type and range that the field has. Memory holds one line, of MAX_LINE_BYTES at most.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar

from pydantic import Field, TypeAdapter

from rollgen.errors import DatasetError
from rollgen.format.files import open_descriptor, open_regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Line = TypeVar("_Line", bound="DataclassInstance")

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Count32 = Annotated[int, Field(ge=0, lt=1 << 31)]
"""Types of fields, by what the columns of the same meaning can hold."""

MAX_LINE_BYTES: Final = 16 << 20
_TAIL_BYTES: Final = 64 << 10


def line_files(directory: Path) -> list[Path]:
    """The files of lines in a directory, sorted by name."""
    return sorted(directory.glob("*.jsonl"))


def encode_line(line: DataclassInstance) -> bytes:
    """One dataclass as a line of such a file."""
    return json.dumps(asdict(line)).encode() + b"\n"


def append_line(path: Path, line: DataclassInstance, *, durable: bool) -> None:
    """Append one dataclass as a line; with `durable`, it is on disk on return. An OSError leaves nothing of it."""
    with os.fdopen(open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as file:
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
            raise DatasetError(f"{path}:{number}: damaged line; `rollgen repair` takes it out")
        yield number, line


@cache
def _parser(kind: type[_Line]) -> TypeAdapter[_Line]:
    """Made once: it takes longer to make than a short file to read."""
    return TypeAdapter(kind)


def parse_lines(path: Path, kind: type[_Line], containing: bytes = b"") -> Iterator[tuple[int, _Line | None]]:
    """The same for those who go on after damage: None for a damaged line, and for one that is too long, the last then.

    Only lines `containing` these bytes are parsed and given: most of many can be passed over. Raises DatasetError for
    anything but a regular file.
    """
    parser = _parser(kind)
    with open_regular(path) as file:
        for number, text in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
            if text.endswith(b"\n"):
                if containing not in text:
                    continue
                try:
                    parse_object(text)
                    line = parser.validate_json(text, strict=True)
                except ValueError:
                    line = None
                yield number, line
            elif len(text) == MAX_LINE_BYTES:
                yield number, None
                return


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object in which every reader finds the same. Raises ValueError that says what is wrong."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=refuse_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return fields


def refuse_constant(name: str) -> NoReturn:
    """For `json`'s `parse_constant`: NaN and the infinities. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """Raises ValueError for a number such as 1e999, which would become an infinity."""
    value = float(text)
    return refuse_constant(text) if math.isinf(value) else value


def _write_all(file: io.FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def truncate_torn_tail(path: Path) -> None:
    """Cut off a last line that has no newline. The caller is the file's only writer."""
    if not path.exists():
        return
    with open_regular(path) as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
    if end != size:
        with os.fdopen(open_descriptor(path, os.O_RDWR), "r+b") as file:
            file.truncate(end)
