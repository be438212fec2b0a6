"""Replacing shards by others that hold the same rows, as one step: it happened or it did not, whenever a crash comes.

The new shards are complete, verified and on disk under their temporary names when one file decides that they take over:

    journal/replacement.json   the record: the lines of the new shards, and the names of the shards that they replace

Before the record exists nothing has changed. Once it exists the replacement will be completed, by whoever next takes a
writer's slot (`WriterSlot` calls `complete`), and until then readers refuse the dataset: they would see rows twice.
Every step of `complete` may be done again, so it may be interrupted anywhere:

    1  the new shards are hashed, wherever they are by now, and linked to their final names
    2  the journal takes their lines, then the retirements of the old shards
    3  the old shards are deleted, or moved to retired/
    4  the record is deleted

Who replaces makes the whole: no other writer is alive while there is a record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rollgen.errors import DatasetError
from rollgen.format.journal import (
    Journal,
    JournalLine,
    file_sha256,
    list_shards,
    parse_shard_name,
    read_journal,
    temporary_name,
)
from rollgen.format.jsonlines import append_line, truncate_torn_tail
from rollgen.format.manifest import fsync_directory
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, RETIRED_DIR

RECORD_FILE = "replacement.json"
COMPACTOR = "compact"
"""The writer whose shards hold what others have sampled: `rollgen compact`."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """The content of the record."""

    writer: str
    """Whose shards the new ones are, and whose journal takes the lines."""
    added: tuple[JournalLine, ...]
    retired: tuple[str, ...]
    """Names of the shards that are replaced."""
    keep: bool
    """Whether their files go to retired/ or are deleted."""


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
    return _record(directory).exists()


def decide(directory: Path, replacement: Replacement) -> None:
    """Write the record: from now on the replacement will happen. The new shards are on disk already."""
    temporary = directory / DATA_DIR / f".tmp-{replacement.writer}-{RECORD_FILE}"  # removed with the writer's others
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(replacement), file)
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(temporary.parent)  # the names of the new shards
    os.replace(temporary, _record(directory))
    fsync_directory(_record(directory).parent)


def complete(directory: Path) -> None:
    """Do what the record says, or what is left of it; nothing without a record. No writer may be alive but the caller.

    Raises DatasetError when the record or one of the new shards is damaged, nothing having been deleted then, and when
    the directory cannot be written.
    """
    if not is_unfinished(directory):
        return
    replacement = _read(_record(directory))
    try:
        _carry_out(directory, replacement)
    except OSError as error:
        raise DatasetError(
            f"{error.filename or directory}: cannot be written: {error.strerror or error}; the next command that "
            "writes here completes the compaction"
        ) from error


def _carry_out(directory: Path, replacement: Replacement) -> None:
    data = directory / DATA_DIR
    for line in replacement.added:
        _check_added(data, line)
    for line in replacement.added:
        if not (data / line.file).exists():
            os.link(_temporary(data, line), data / line.file)
    fsync_directory(data)
    _append_lines(directory, replacement)
    put_away = _keep if replacement.keep else _delete
    put_away(directory, replacement.retired)
    for line in replacement.added:
        _temporary(data, line).unlink(missing_ok=True)
    fsync_directory(data)
    _record(directory).unlink()
    fsync_directory(_record(directory).parent)


def _record(directory: Path) -> Path:
    return directory / JOURNAL_DIR / RECORD_FILE


def _refuse_unfinished(directory: Path) -> None:
    if is_unfinished(directory):
        raise DatasetError(
            f"{directory}: is being compacted, or that was interrupted: try again, or finish it with "
            f"`rollgen compact {directory}`"
        )


def _read(path: Path) -> Replacement:
    try:
        replacement = TypeAdapter(Replacement).validate_json(path.read_bytes(), strict=True)
    except ValidationError:
        raise DatasetError(f"{path}: damaged; put the file back from a copy") from None
    for name in (*(line.file for line in replacement.added), *replacement.retired):
        if parse_shard_name(name) is None:
            raise DatasetError(f"{path}: {name!r} is not the name of a shard")
    return replacement


def _temporary(data: Path, line: JournalLine) -> Path:
    place = parse_shard_name(line.file)
    assert place is not None  # `_read` has checked it
    return data / temporary_name(*place)


def _check_added(data: Path, line: JournalLine) -> None:
    """A new shard is the file that was verified, under whichever name it has by now. Raises DatasetError."""
    path = data / line.file
    if not path.exists():
        path = _temporary(data, line)
    if not path.exists() or file_sha256(path) != line.sha256:
        raise DatasetError(
            f"{path}: missing or damaged, though {JOURNAL_DIR}/{RECORD_FILE} counts on it; put it back from a copy, or "
            "delete that record and the shards that it adds, if all that it retires are still in place"
        )


def _append_lines(directory: Path, replacement: Replacement) -> None:
    """The new lines before the retirements, which none may precede: what is retired is stored elsewhere."""
    path = directory / JOURNAL_DIR / f"{replacement.writer}.jsonl"
    truncate_torn_tail(path)
    journal = read_journal(directory)
    known = journal.committed.keys() | journal.retired
    _append(path, (line for line in replacement.added if line.file not in known))
    retired = (journal.committed[name] for name in replacement.retired if name in journal.committed)
    _append(path, (replace(line, retired=True) for line in retired))
    fsync_directory(path.parent)


def _append(path: Path, lines: Iterable[JournalLine]) -> None:
    """Append lines; on disk on return."""
    for line in lines:
        append_line(path, line, durable=False)
    with path.open("ab") as file:
        os.fsync(file.fileno())


def _keep(directory: Path, names: Iterable[str]) -> None:
    kept = directory / RETIRED_DIR
    kept.mkdir(exist_ok=True)
    for name in names:
        if (directory / DATA_DIR / name).exists():
            (directory / DATA_DIR / name).rename(kept / name)
    fsync_directory(kept)


def _delete(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        (directory / DATA_DIR / name).unlink(missing_ok=True)
