r"""Prompt files: bytes to lines, lines to JSON objects. Nothing is inferred, and what is not used is kept as it was.

Lines end at `\n` and nowhere else: U+2028, U+2029 and U+0085 inside a string are data. A byte order mark, `\r\n`, blank
lines and a missing last newline are fine. Files are read twice and must not change meanwhile.

A line must be one JSON object (RFC 8259) in UTF-8. Refused, because readers disagree on what they mean: NaN and
Infinity, and a key that occurs twice in an object, at any depth. Numbers of any size are fine: metadata is kept as the
source text of its values, so that 70-digit integers, `1e400`, `0.10` and `\ud800` (half of a surrogate pair) survive
to the letter. Integers beyond 640 digits count as infinite where a number is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import dataclass
from json.decoder import JSONDecodeError
from typing import TYPE_CHECKING, Any

from rollgen.errors import UsageError
from rollgen.format.manifest import PromptSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INTEGER_DIGITS = 640
"""Python converts this many digits under any `sys.set_int_max_str_digits`."""
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Line:
    """One non-blank line of a prompt file."""

    file: Path
    number: int
    """From 1, blank lines counted: what an editor shows."""
    data: bytes

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def short(self) -> str:
        """The place without the directory: datasets travel."""
        return f"{self.file.name}:{self.number}"


class PromptFiles:
    """The lines of several files, one after the other, at most `limit` of them. Can be iterated again and again.

    Raises UsageError on creation when a file is missing, is not a regular file or cannot be read, and while iterating
    when a file holds no line. Files after the one that reaches `limit` are not opened again.
    """

    def __init__(self, files: Sequence[Path], limit: int | None = None) -> None:
        for file in files:
            _check_readable(file)
        self.files = tuple(files)
        self.limit = limit
        self.sources: list[PromptSource] = []
        """The files as the last complete iteration found them: of each the part that was read."""

    def __iter__(self) -> Iterator[Line]:
        sources: list[PromptSource] = []
        count = 0
        for file in self.files:
            before, sha256, size = count, hashlib.sha256(), 0
            with file.open("rb") as stream:
                for number, data in enumerate(stream, 1):
                    sha256.update(data)
                    size += len(data)
                    stripped = data.removeprefix(_BYTE_ORDER_MARK).strip(b" \t\r\n")
                    if stripped:
                        count += 1
                        yield Line(file, number, stripped)
                    if count == self.limit:
                        break
            if count == before:
                raise UsageError(f"{file}: no prompts: the file is empty; give JSON Lines, one object a line")
            sources.append(PromptSource(name=file.name, bytes=size, sha256=sha256.hexdigest()))
            if count == self.limit:
                break
        self.sources = sources


def parse_object(data: bytes) -> tuple[dict[str, Any], str]:
    """A line's JSON object and the line as text. Raises ValueError saying what is wrong and what to do.

    Raises RecursionError for JSON nested some hundred levels deep.
    """
    try:
        text = data.decode("utf-8")
        fields = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    except JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}; write one JSON object a line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {_JSON_TYPES[type(fields)]}, not an object; write one JSON object a line")
    return fields, text


def member_texts(text: str) -> dict[str, tuple[str, str]]:
    """Source texts of the key (quotes included) and the value of each member of an object that `parse_object` took."""
    members: dict[str, tuple[str, str]] = {}
    position = _skip_space(text, text.index("{") + 1)
    while text[position] != "}":
        key_start = position
        key, position = _DECODER.raw_decode(text, key_start)
        key_text = text[key_start:position]
        value_start = _skip_space(text, _skip_space(text, position) + 1)  # + 1: the colon
        _, position = _DECODER.raw_decode(text, value_start)
        members[key] = (key_text, text[value_start:position])
        position = _skip_space(text, position)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return members


def _check_readable(file: Path) -> None:
    try:
        mode = file.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{file}: not a regular file; prompts are read twice, so save them to a file first")
        file.open("rb").close()
    except OSError as error:
        raise UsageError(f"{file}: cannot read it: {error.strerror}") from None


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {json.dumps(repeated)} occurs twice in one object; keep one")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; use null or a string")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _INTEGER_DIGITS else float(digits)


_JSON_TYPES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=_integer)
