"""Replacing shards by others that hold the same rows, as one step: it happened or it did not, whenever a crash comes.

The new shards are complete, verified and on disk under their temporary names when one file decides that they take over:

    data/.tmp-<writer>-journal   the writer's journal as it will be, with the new shards' lines and the retirements
    journal/replacement.json     the record: lines of the new shards, names of those that they replace, a checksum

Before the record exists nothing has changed. Once it exists the replacement will be completed, by whoever next takes a
writer's slot (`WriterSlot` calls `complete`), and until then readers refuse the dataset: they would see rows twice.
Every step of `complete` may be done again, so it may be interrupted anywhere:

    1  record, journal and new shards are checked, wherever these are by now: whatever is wrong, nothing has been done
    2  the new shards are linked to their final names
    3  the prepared journal takes the place of the old one
    4  the old shards are deleted, or moved to retired/
    5  the record is deleted

All that takes room was written before the record. What is left are links, renames and deletions: where a directory has
to grow for a name, or the file system for its own books, a full disk can still stop them until there is room.

Who replaces makes the whole: no other writer is alive while there is a record. Where it cannot be carried out, `rollgen
repair` sets it aside, with all shards in place, new and old, from which to choose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from rollgen.config import digest
from rollgen.errors import DatasetError, Unreadable
from rollgen.format.files import link, open_regular, read_regular, write_durably
from rollgen.format.journal import (
    RECORD_FILE,
    JournalLine,
    file_sha256,
    is_unfinished,
    parse_shard_name,
    read_journal,
    temporary_name,
    totals,
)
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import fsync_directory
from rollgen.format.reader import open_shard
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, RETIRED_DIR

COMPACTOR = "compact"
"""The writer whose shards hold what others have sampled: `rollgen compact`."""
REPAIRER = "repair"
"""The writer whose journal takes the lines that `rollgen repair` makes."""
_MAX_RECORD_BYTES = 64 << 20
_CHECKSUM = "sha256"
"""Key of the record: of the canonical JSON of the others."""
_FIX = "put that back from a copy, or go on without the compaction with `rollgen repair`"


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


def prepare_retired(directory: Path, names: Iterable[str]) -> None:
    """Make retired/, and see that these shards can be moved there. Raises DatasetError when they cannot.

    To be called before it is decided to `keep` them: later is too late.
    """
    kept = directory / RETIRED_DIR
    try:
        kept.mkdir(exist_ok=True)
    except FileExistsError:
        raise DatasetError(f"{kept}: is there already, and no directory; move it away") from None
    except OSError as error:
        raise DatasetError(f"{kept}: cannot be made: {error.strerror}; nothing has changed") from error
    if not os.access(kept, os.W_OK | os.X_OK):
        raise DatasetError(f"{kept}: cannot be written; change its permissions, or move it away")
    if kept.stat().st_dev != (directory / DATA_DIR).stat().st_dev:
        raise DatasetError(f"{kept}: is on another file system than {DATA_DIR}/; move it away")
    for name in names:
        if (kept / name).exists():
            raise DatasetError(f"{kept / name}: is there already; move it away")


def decide(directory: Path, replacement: Replacement) -> None:
    """Write the record: from now on the replacement will happen. The new shards are on disk already.

    Raises OSError, nothing having changed, when there is no room for record and journal, and DatasetError for a record
    that would be refused.
    """
    if problem := _problem(replacement):
        raise DatasetError(f"{directory}: cannot be compacted: {problem}; nothing has changed")
    record = _record_temporary(directory, replacement.writer)
    content = asdict(replacement)
    try:
        _prepare_journal(directory, replacement)
        write_durably(record, json.dumps(content | {_CHECKSUM: digest(content)}).encode())
        fsync_directory(record.parent)  # the names of the new shards too
        os.replace(record, _record(directory))
    finally:
        if not is_unfinished(directory):
            record.unlink(missing_ok=True)
            _journal_temporary(directory, replacement.writer).unlink(missing_ok=True)


def complete(directory: Path) -> None:
    """Do what the record says, or what is left of it; nothing without a record. No writer may be alive but the caller.

    Raises DatasetError when the record, the journal or one of the new shards is damaged, nothing having been done then,
    and when the directory cannot be written.
    """
    if not is_unfinished(directory):
        return
    try:
        _carry_out(directory, _read(_record(directory)))
    except OSError as error:
        raise DatasetError(
            f"{error.filename or directory}: cannot be read or written: {error.strerror or error}; the next command "
            "that writes here completes the compaction"
        ) from error


def check(directory: Path) -> Replacement:
    """What `complete` would do; nothing is changed. Raises OSError, Unreadable, and DatasetError when it cannot."""
    replacement = _read(_record(directory))
    _check(directory, replacement)
    return replacement


def read_damaged(directory: Path) -> Replacement | None:
    """What the record of a replacement that cannot be completed says; None when it is the record that is damaged."""
    try:
        return _read(_record(directory))
    except DatasetError:
        return None


def release_added(directory: Path) -> None:
    """Give new shards that a replacement has on disk their final names, though it cannot be completed."""
    data = directory / DATA_DIR
    for path in sorted(data.glob(f".tmp-{COMPACTOR}-*")):
        final = data / f"part-{path.name.removeprefix('.tmp-')}.parquet"
        if parse_shard_name(final.name) is None:
            continue  # its journal, or a record
        if not final.exists():
            path.rename(final)
        elif final.samefile(path):
            path.unlink()
    fsync_directory(data)


def is_sound(directory: Path, line: JournalLine) -> bool:
    """Whether a new shard is in its place, and the file that was verified. Raises OSError and Unreadable."""
    return _is_sound(directory / DATA_DIR / line.file, line)


def _check(directory: Path, replacement: Replacement) -> bool:
    """Whether the journal is the new one already. Raises DatasetError for what makes the replacement impossible."""
    switched = _check_journal(directory, replacement)
    for line in replacement.added:
        _check_added(directory / DATA_DIR, line)
    return switched


def _carry_out(directory: Path, replacement: Replacement) -> None:
    data = directory / DATA_DIR
    fsync_directory(directory / JOURNAL_DIR)  # who decided may have died before that
    switched = _check(directory, replacement)
    for line in replacement.added:
        if not (data / line.file).exists():
            link(_temporary(data, line), data / line.file)
    fsync_directory(data)
    if not switched:
        _switch_journal(directory, replacement)
    put_away = _keep if replacement.keep else _delete
    put_away(directory, replacement.retired)
    for line in replacement.added:
        _temporary(data, line).unlink(missing_ok=True)
    fsync_directory(data)
    _record(directory).unlink()
    fsync_directory(directory / JOURNAL_DIR)


def _record(directory: Path) -> Path:
    return directory / JOURNAL_DIR / RECORD_FILE


def _record_temporary(directory: Path, writer: str) -> Path:
    return directory / DATA_DIR / f".tmp-{writer}-{RECORD_FILE}"  # in data/: removed with the writer's others


def _journal_temporary(directory: Path, writer: str) -> Path:
    return directory / DATA_DIR / f".tmp-{writer}-journal"


def _temporary(data: Path, line: JournalLine) -> Path:
    place = parse_shard_name(line.file)
    assert place is not None  # `_read` has checked it
    return data / temporary_name(*place)


def _read(path: Path) -> Replacement:
    """The record, sound and consistent in itself. Raises DatasetError."""
    text = read_regular(path, _MAX_RECORD_BYTES)
    replacement = _parse(text)
    problem = "damaged" if replacement is None else _problem(replacement)
    if replacement is None or problem is not None:
        raise DatasetError(f"{path}: {problem}; {_FIX}")
    return replacement


def _parse(text: bytes) -> Replacement | None:
    """None for anything but a record whose checksum is right."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.pop(_CHECKSUM, None) != digest(content):
            return None
        return TypeAdapter(Replacement).validate_json(text, strict=True)
    except (ValueError, RecursionError):  # not JSON, not Unicode, a field of another type
        return None


def _problem(replacement: Replacement) -> str | None:
    """What no replacement would say; None for one that may be carried out."""
    added = [line.file for line in replacement.added]
    names = [*added, *replacement.retired]
    if not added:
        return "adds no shard"
    for name in names:
        if parse_shard_name(name) is None:
            return f"{name!r} is not the name of a shard"
    for name in added:
        if (parsed := parse_shard_name(name)) and parsed[0] != replacement.writer:
            return f"{name!r} is not a shard of the writer {replacement.writer!r}"
    if any(line.retired for line in replacement.added):
        return "adds a shard that is retired"
    if len(set(names)) != len(names):
        return "names a shard twice"
    return None


def _check_journal(directory: Path, replacement: Replacement) -> bool:
    """Whether the journal is the new one already. Raises DatasetError when it is neither the old nor the new one:

    the shards to be retired are known to it, all committed or all retired, and hold as much as the new ones.
    """
    journal = read_journal(directory)
    known = journal.committed.keys() | journal.retired.keys()
    is_old = known.isdisjoint(line.file for line in replacement.added)
    is_new = all(journal.committed.get(line.file) == line for line in replacement.added)
    lines = journal.committed if is_old else journal.retired
    if not (is_old or is_new) or not lines.keys() >= set(replacement.retired):
        raise DatasetError(
            f"{_record(directory)}: the shards of the journal are neither those before nor those after this "
            f"replacement; {_FIX}"
        )
    old, new = totals(lines[name] for name in replacement.retired), totals(replacement.added)
    if old != new:
        raise DatasetError(f"{_record(directory)}: adds {new}, but retires {old}; {_FIX}")
    return is_new


def _check_added(data: Path, line: JournalLine) -> None:
    """A new shard is the file that was verified, under whichever name it has by now. Raises DatasetError."""
    path = data / line.file
    if not path.exists():
        path = _temporary(data, line)
    if not _is_sound(path, line):
        raise DatasetError(f"{path}: missing or damaged, though {JOURNAL_DIR}/{RECORD_FILE} counts on it; {_FIX}")


def _is_sound(path: Path, line: JournalLine) -> bool:
    try:
        open_shard(path, line=line).close()  # size, footer, rows
    except Unreadable:
        raise
    except DatasetError:
        return False
    return file_sha256(path) == line.sha256


def _prepare_journal(directory: Path, replacement: Replacement) -> Path:
    """The writer's journal as it will be, on disk under a temporary name: written unless it is there already."""
    path = _journal_path(directory, replacement.writer)
    old = b""
    if path.exists():
        with open_regular(path) as file:
            old = file.read()
    committed = read_journal(directory).committed
    retired = (replace(committed[name], retired=True) for name in replacement.retired)
    new = old[: old.rfind(b"\n") + 1] + b"".join(map(encode_line, (*replacement.added, *retired)))
    temporary = _journal_temporary(directory, replacement.writer)
    if not _holds(temporary, new):
        write_durably(temporary, new)
    return temporary


def _holds(path: Path, content: bytes) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(len(content) + 1) == content


def _switch_journal(directory: Path, replacement: Replacement) -> None:
    """At once, so that there are two states only: lines and retirements, or neither."""
    path = _journal_path(directory, replacement.writer)
    os.replace(_prepare_journal(directory, replacement), path)
    fsync_directory(path.parent)


def _journal_path(directory: Path, writer: str) -> Path:
    return directory / JOURNAL_DIR / f"{writer}.jsonl"


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
