"""Files of lines, damaged lines among them: what a repair has to choose from."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollgen.format.files import open_regular
from rollgen.format.journal import JournalLine, parse_shard_name
from rollgen.format.jsonlines import MAX_LINE_BYTES, line_files, parse_lines
from rollgen.format.schema import JOURNAL_DIR

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Line = TypeVar("_Line", bound="DataclassInstance")
Lines = list[tuple[bytes, _Line | None]]
"""The complete lines of a file: as they are, and what they say; None for a damaged one."""


def read_all_lines(path: Path, kind: type[_Line]) -> Lines[_Line]:
    """Raises OSError, and DatasetError for anything but a regular file."""
    parsed = (line for _, line in parse_lines(path, kind))
    with open_regular(path) as file:
        texts = iter(partial(file.readline, MAX_LINE_BYTES), b"")
        return list(zip(texts, parsed, strict=False))  # a torn last line is not parsed


class JournalLines:
    """All lines of all writers."""

    def __init__(self, directory: Path, in_place: Collection[str] = (), revived: Collection[str] = ()) -> None:
        """`in_place` are the names of the shards in data/, `revived` those whose retirements are not to count."""
        self.files = {path: _named(read_all_lines(path, JournalLine)) for path in line_files(directory / JOURNAL_DIR)}
        self.committed: dict[str, dict[JournalLine, None]] = {}
        """By file name, the distinct lines of its commit, in their order; one, unless there is damage."""
        for line in self._lines():
            if not line.retired:
                self.committed.setdefault(line.file, {})[line] = None
        self.hashes = frozenset(line.sha256 for lines in self.committed.values() for line in lines)
        """SHA-256 of everything that was ever committed."""
        self.mistaken = {
            line
            for line in self._lines()
            if line.retired and (line.file in revived or (line.file in in_place and self._contradicts(line)))
        }
        """Retirements of shards that are there and whose commits say otherwise, because their names are damaged, and
        those that are not to count."""
        self.retired = {line.file for line in self._lines() if line.retired and line not in self.mistaken}

    def _lines(self) -> Iterator[JournalLine]:
        return (line for lines in self.files.values() for _, line in lines if line is not None)

    def _contradicts(self, line: JournalLine) -> bool:
        """Whether a retirement differs from the commit in more than that."""
        committed = self.committed.get(line.file, {})
        return bool(committed) and replace(line, retired=False) not in committed


def _named(lines: Lines[JournalLine]) -> Lines[JournalLine]:
    """With a line about something that is no shard as the damaged one that it is."""
    return [(text, line if line and parse_shard_name(line.file) else None) for text, line in lines]
