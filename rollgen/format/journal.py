"""The journal: which shards a dataset has, under which names, and what vouches for their bytes.

    data/part-<writer>-<seq>.parquet   a committed shard
    data/.tmp-<writer>-<seq>           the same shard before that
    journal/<writer>.jsonl             one line for each shard; a second one, with `"retired": true`, takes it out again
    journal/replacement.json           only while shards are being replaced: readers refuse the dataset then

`commit.py` and `replacement.py` say in which order these come to be.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from rollgen.errors import DatasetError
from rollgen.format.files import fsync_file, open_regular
from rollgen.format.jsonlines import Count, line_files, read_lines
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR

_SHARD_NAME = re.compile(r"part-(?P<writer>[A-Za-z0-9_]+)-(?P<sequence>[0-9]{6,18})\.parquet")
_HASH_CHUNK = 1 << 20
RECORD_FILE = "replacement.json"


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One committed shard."""

    file: str
    """Name inside `data/`."""
    bytes: Count
    sha256: str
    footer_sha256: str
    """Of the Parquet footer (metadata, its length and the magic bytes): page checksums do not cover it."""
    rows: Count
    tokens: Count
    """Generated tokens."""
    mask_ids: Count
    retired: bool = False
    """The file is no longer part of the dataset: it was lost, set aside as damaged, or replaced."""


class Journal(NamedTuple):
    """All lines of all writers. Shard names are never used twice, so a retirement is final whatever the order."""

    committed: dict[str, JournalLine]
    """By file name, retired ones left out."""
    retired: dict[str, JournalLine]
    """By file name, the lines that took them out."""


class Totals(NamedTuple):
    """What some shards hold together, by the names of the journal's lines."""

    rows: int
    tokens: int
    mask_ids: int


def shard_name(writer: str, sequence: int) -> str:
    """Final file name of a writer's shard."""
    return f"part-{writer}-{sequence:06d}.parquet"


def temporary_name(writer: str, sequence: int) -> str:
    """File name of the same shard while it is built: one that no reader looks at."""
    return f".tmp-{writer}-{sequence:06d}"


def parse_shard_name(name: str) -> tuple[str, int] | None:
    """`(writer, sequence)` of a shard's file name, or None for a file that is not a shard."""
    match = _SHARD_NAME.fullmatch(name)
    return (match["writer"], int(match["sequence"])) if match else None


def list_shards(directory: Path) -> list[Path]:
    """The committed shards of a dataset, sorted by name. Temporary and foreign files are left out."""
    data = directory / DATA_DIR
    shards = (path for path in data.glob("part-*.parquet") if parse_shard_name(path.name))
    return sorted(shards, key=attrgetter("name"))


def read_journal(directory: Path) -> Journal:
    """Read the journals of all writers. A torn last line is an interrupted commit: skipped.

    Raises DatasetError, naming file and line, for a damaged line anywhere else, and for two lines that say different
    things of a shard: a repair that was interrupted leaves such, and the next one takes the wrong line out.
    """
    committed: dict[str, JournalLine] = {}
    retired: dict[str, JournalLine] = {}
    contradictions: dict[str, str] = {}
    for path in line_files(directory / JOURNAL_DIR):
        for number, line in read_lines(path, JournalLine):
            if parse_shard_name(line.file) is None:
                raise DatasetError(
                    f"{path}:{number}: {line.file!r} is not the name of a shard; `rollgen repair` takes that line out"
                )
            if line.retired:
                retired[line.file] = line
            elif committed.setdefault(line.file, line) != line:
                contradictions.setdefault(line.file, f"{path}:{number}")
    for name in retired:
        committed.pop(name, None)
        contradictions.pop(name, None)
    if contradictions:
        name, place = min(contradictions.items())
        raise DatasetError(
            f"{place}: {name} has another line, which says something else; `rollgen repair` takes the wrong one out"
        )
    return Journal(committed, retired)


def committed_shards(directory: Path) -> tuple[Journal, list[Path]]:
    """The journal and the shards in place, of one and the same moment between replacements.

    Files of shards that the journal retires may be among them. Raises DatasetError while a replacement is going on.
    """
    while True:
        journal = read_journal(directory)  # before the listing: a run may commit in between
        paths = list_shards(directory)
        _refuse_unfinished(directory)
        if read_journal(directory).retired == journal.retired:
            return journal, paths  # and nothing was retired meanwhile: no replacement has come and gone


def is_unfinished(directory: Path) -> bool:
    """Whether shards are being replaced, or an interrupted replacement waits to be completed."""
    return (directory / JOURNAL_DIR / RECORD_FILE).exists()


def totals(lines: Iterable[JournalLine]) -> Totals:
    """The counts of all these lines."""
    counts = [(line.rows, line.tokens, line.mask_ids) for line in lines]
    return Totals(*(sum(column) for column in zip((0, 0, 0), *counts, strict=True)))


def footer_sha256(path: Path) -> str:
    """SHA-256 of a Parquet file's footer: metadata, length and magic. Raises DatasetError when there is none."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        if size < 12:
            raise DatasetError(f"{path}: {size} bytes is too short for a Parquet file")
        file.seek(size - 8)
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > size - 12:
            raise DatasetError(f"{path}: no Parquet footer: the file is truncated or damaged")
        file.seek(size - 8 - length)
        return hashlib.sha256(file.read(length + 8)).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a whole file, read in chunks."""
    sha256 = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_HASH_CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()


def durable_line(path: Path, name: str, *, rows: int, tokens: int, mask_ids: int) -> JournalLine:
    """The line of a closed file that is on disk from now on, and is to be the shard `name`.

    Raises OSError, and DatasetError when it is no Parquet file.
    """
    fsync_file(path)
    return JournalLine(
        file=name,
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
        footer_sha256=footer_sha256(path),
        rows=rows,
        tokens=tokens,
        mask_ids=mask_ids,
    )


def _refuse_unfinished(directory: Path) -> None:
    if is_unfinished(directory):
        raise DatasetError(
            f"{directory}: is being compacted, or that was interrupted: try again, or finish it with "
            f"`rollgen compact {directory}`"
        )
