"""`rollgen repair`: what is damaged is set aside, and the journal made again from the shards that are not.

    look       every shard as `rollgen verify` does, every line of journals and failures: what stays, what goes, which
               lines are right
    journal    one new file with the missing lines and the retirements takes the place of REPAIRER's, at once
    shards     those that were retired move to quarantine/
    files      a journal or failures file with damaged or wrong lines: linked to a name in quarantine/, then one
               without them takes its place, at once

Nothing is deleted, and no name in quarantine/ is taken twice. Killed anywhere, the dataset reads as its lines say or is
refused as before, and the next repair does the rest. No writer may be alive meanwhile, and none can start. Lines that
stay are copied byte by byte. A torn last line is no damage: it is left to the file's next writer, and where the file is
replaced it stays in the old one.

A sound shard passes every check of `verify`, its rows against the plan too where plan and retry lists are in order.
Where it differs from its journal line, one of the two is damaged:

    the SHA-256 of the whole file is the line's      the shard is what was committed, and the line gets right counts
    only that SHA-256 differs                        size, footer and counts are the line's and each page passes its
                                                     checksum: whichever of the two is damaged, every value is what was
                                                     committed, because no other byte decides one. The line is made anew
    else                                             set aside: nothing vouches for the footer, which has no checksum
    there is no line that can be read                the shard is the only witness: verified, it gets one, as after a
                                                     crash

A retirement counts, except that of a shard which is in its place and was committed with other bytes, hashes or counts:
then its name is damaged, and it was another's.

Manifest, plan and retry lists cannot be made again from shards (a resume makes the plan again). Without a manifest
nothing can be judged. Cost: twice that of `verify`, which follows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.commit import WriterSlot, live_writers, quarantine_place
from rollgen.format.failures import Failure
from rollgen.format.files import open_regular
from rollgen.format.journal import (
    RECORD_FILE,
    JournalLine,
    Totals,
    file_sha256,
    footer_sha256,
    is_unfinished,
    list_shards,
    parse_shard_name,
)
from rollgen.format.jsonlines import MAX_LINE_BYTES, encode_line, parse_lines
from rollgen.format.manifest import Manifest, fsync_directory, read_manifest
from rollgen.format.replacement import complete
from rollgen.format.schema import DATA_DIR, FAILURES_DIR, JOURNAL_DIR, MANIFEST_FILE, QUARANTINE_DIR
from rollgen.verify.dataset import Progress, Verification, verify_dataset
from rollgen.verify.files import CheckTable, check_content
from rollgen.verify.findings import Findings
from rollgen.verify.planned import Keys, Planned, check_planless
from rollgen.verify.records import check_planned

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rollgen.rollouts import Int64Array

REPAIRER = "repair"
"""The writer whose journal takes the lines that a repair makes."""

Action = Literal["completed", "quarantined", "retired", "journalled", "rewritten"]
_Line = TypeVar("_Line", bound="DataclassInstance")
_Lines = list[tuple[bytes, _Line | None]]
"""The complete lines of a file: as they are, and what they say; None for a damaged one."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was done, or would be."""

    action: Action
    """completed: an interrupted replacement; quarantined: a shard was set aside; retired: one that is missing;
    journalled: a shard got its line; rewritten: a file got rid of lines."""
    file: str
    """Relative to the dataset."""
    reason: str
    """Untrusted text: it may quote the data."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The outcome."""

    changes: tuple[Change, ...]
    verification: Verification | None
    """Of the dataset afterwards: its findings are what could not be mended. None after a dry run."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        verification = None if self.verification is None else self.verification.to_json()
        return {
            "clean": None if self.verification is None else self.verification.is_clean,
            "dry_run": self.verification is None,
            "changes": [asdict(change) for change in self.changes],
            "verification": verification,
        }


def repair_dataset(directory: Path, *, dry_run: bool = False, progress: Progress | None = None) -> Repair:
    """Repair a dataset directory; a `dry_run` only looks.

    Raises ResumeRefused while a writer is alive, UsageError when no lock can be had because the directory cannot be
    written, and DatasetError when there is no readable manifest, when a replacement of shards was interrupted and
    cannot be completed, or when a file cannot be read or written: what was done by then stays done.
    """
    read_manifest(directory)  # before the slot, which makes directories
    try:
        if dry_run:
            return Repair(_foresee(directory, progress), None)
        with WriterSlot(directory, REPAIRER, afresh=True):
            completed = [_completion()] if is_unfinished(directory) else []
            complete(directory)
            work = _look(directory, progress)
            _carry_out(work)
            return Repair((*completed, *work.changes), verify_dataset(directory, progress=progress))
    except OSError as error:
        raise DatasetError(
            f"{error.filename or directory}: cannot be read or written: {error.strerror or error}; nothing is lost: "
            "mend that, and repair again"
        ) from error


def _foresee(directory: Path, progress: Progress | None) -> tuple[Change, ...]:
    if alive := live_writers(directory):
        raise ResumeRefused(f"{directory}: writer {min(alive)!r} is alive; wait for it, or stop it")
    if is_unfinished(directory):
        return (_completion(),)
    return tuple(_look(directory, progress).changes)


def _completion() -> Change:
    return Change("completed", f"{JOURNAL_DIR}/{RECORD_FILE}", "a compaction was interrupted; the rest comes after it")


@dataclass(slots=True)
class _Work:
    """What is to be done, in this order."""

    directory: Path
    lines: list[JournalLine] = field(default_factory=list)
    """To be added to the journal."""
    moves: list[Path] = field(default_factory=list)
    """Shards for quarantine/."""
    rewrites: dict[Path, bytes] = field(default_factory=dict)
    """Journals and failures files that lose lines, with what is left of them."""
    changes: list[Change] = field(default_factory=list)

    def note(self, action: Action, path: Path, reason: str) -> None:
        """Tell what is done, and why."""
        self.changes.append(Change(action, str(path.relative_to(self.directory)), reason))

    def add_line(self, action: Action, line: JournalLine, reason: str) -> None:
        """A line for the journal."""
        self.lines.append(line)
        self.note(action, self.directory / DATA_DIR / line.file, reason)

    def set_aside(self, shard: Path, reason: str) -> None:
        """A shard for quarantine/."""
        self.moves.append(shard)
        self.note("quarantined", shard, reason)


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard that could be read, whatever it holds."""

    path: Path
    line: JournalLine
    """What its line must be; of a broken one, what can be told."""
    keys: Keys
    problem: str = ""
    """Why it has to be set aside; untrusted text."""


class _Journal:
    """All lines of all writers, damaged ones among them."""

    def __init__(self, directory: Path, in_place: Collection[str]) -> None:
        """`in_place` are the names of the shards in data/."""
        self.files = {path: _named(_read_lines(path, JournalLine)) for path in _line_files(directory / JOURNAL_DIR)}
        self.committed: dict[str, list[JournalLine]] = {}
        """By file name, the distinct lines of its commit; one, unless there is damage."""
        for line in self._lines():
            if not line.retired and line not in self.committed.setdefault(line.file, []):
                self.committed[line.file].append(line)
        self.mistaken = {line for line in self._lines() if line.file in in_place and self._contradicts(line)}
        """Retirements of shards that are there and whose commits say otherwise: their names are damaged."""
        self.retired = {line.file for line in self._lines() if line.retired and line not in self.mistaken}

    def _lines(self) -> Iterator[JournalLine]:
        return (line for lines in self.files.values() for _, line in lines if line is not None)

    def _contradicts(self, line: JournalLine) -> bool:
        """Whether it is a retirement that differs from the commit in more than that."""
        committed = self.committed.get(line.file, [])
        return line.retired and bool(committed) and replace(line, retired=False) not in committed


def _look(directory: Path, progress: Progress | None) -> _Work:
    """Find all that is to be done; nothing is changed."""
    manifest, records, work = read_manifest(directory), Findings(directory), _Work(directory)
    planned = check_planned(directory, manifest, records)
    paths = list_shards(directory)
    journal = _Journal(directory, {path.name for path in paths})
    shards = _Judge(directory, manifest, _check_of(planned, records), journal).all(paths, progress)
    shards = _without_copies(shards, journal)
    for path in paths:
        if path.name in journal.retired:
            work.set_aside(path, "it is retired, and was left in its place")
    for shard in shards:
        _settle(shard, journal.committed.get(shard.path.name, []), work)
    for name in sorted(journal.committed.keys() - journal.retired - {path.name for path in paths}):
        work.add_line("retired", replace(journal.committed[name][0], retired=True), "missing")
    _sift_journal(journal, paths, shards, work)
    _sift_failures(None if records.total else planned, work)
    return work


def _check_of(planned: Planned | None, records: Findings) -> CheckTable:
    """The check of rows against the plan. Damaged records are no measure: then there is none."""
    if records.total:
        return lambda _: ()
    return planned.check if planned else check_planless


class _Judge:
    """Decides which shards are sound."""

    def __init__(self, directory: Path, manifest: Manifest, check: CheckTable, journal: _Journal) -> None:
        self._directory = directory
        self._manifest = manifest
        self._check = check
        self._journal = journal
        self._manifest_has_checksum = "sha256" in json.loads((directory / MANIFEST_FILE).read_bytes())

    def all(self, paths: Sequence[Path], progress: Progress | None) -> list[_Shard]:
        """Those that are not retired and of which something can be said; the others are left alone."""
        shards, done, whole = [], 0, sum(path.lstat().st_size for path in paths)
        for path in paths:
            if path.name not in self._journal.retired:
                with suppress(OSError, DatasetError):  # cannot be read: `verify` reports it
                    if (shard := self._judge(path)) is not None:
                        shards.append(shard)
            done += path.lstat().st_size
            if progress is not None:
                progress(done, whole)
        return shards

    def _judge(self, path: Path) -> _Shard | None:
        found = Findings(self._directory)
        sha256 = file_sha256(path)
        content = check_content(path, self._manifest, self._check, found)
        if "footer" in found.by_kind and not self._manifest_has_checksum:
            return None  # of the two it may be the manifest, which an older writer made, and then it is so for all
        totals, keys = (Totals(0, 0, 0), Keys.joined([])) if content is None else (content.totals, content.keys)
        footer = "" if content is None else footer_sha256(path)
        line = JournalLine(path.name, path.stat().st_size, sha256, footer, *totals)
        if found.total:
            first = found.kept[0]
            problem = f"{first.place}: {first.problem}" if first.place else first.problem
        elif (keys.steps() == 0).any():
            problem = "holds a sample twice"
        else:
            problem = _mistrust(line, self._journal.committed.get(path.name, []))
        return _Shard(path, line, keys, problem)


def _mistrust(line: JournalLine, committed: Sequence[JournalLine]) -> str:
    """Why a shard that is sound in itself, and should have this line, is not what was committed; empty if it is."""
    if not committed or any(_vouches(other, line) for other in committed):
        return ""
    return "not the file that was committed: its journal line has another SHA-256, and differs in more than that"


def _vouches(committed: JournalLine, line: JournalLine) -> bool:
    """Whether every value of a file is what was committed; `line` is what it should have. See above."""
    return committed.sha256 == line.sha256 or replace(committed, sha256=line.sha256) == line


def _without_copies(shards: Sequence[_Shard], journal: _Journal) -> list[_Shard]:
    """A sound shard whose samples are all in others is a copy: one without a line, or else the one of the later name.

    Shards that share some of their samples stay as they are: which rows to keep is not for a program to say.
    """
    sound = [shard for shard in shards if not shard.problem]
    numbers = _numbers(Keys.joined([shard.keys for shard in sound]))
    holders = np.bincount(numbers)
    parts = np.split(numbers, np.cumsum([shard.line.rows for shard in sound], dtype=np.int64))[:-1]
    copies: set[Path] = set()
    for shard, own in sorted(
        zip(sound, parts, strict=True),
        key=lambda part: (part[0].path.name not in journal.committed, part[0].path.name),
        reverse=True,
    ):
        if own.size and (holders[own] > 1).all():
            holders[own] -= 1
            copies.add(shard.path)
    problem = "a copy: all of its samples are in other shards"
    return [replace(shard, problem=problem) if shard.path in copies else shard for shard in shards]


def _numbers(keys: Keys) -> Int64Array:
    """int64 [N]: the same number for the same key, from 0."""
    order = keys.order()
    numbers = np.zeros(len(order), np.int64)
    numbers[order[1:]] = np.cumsum(keys.take(order).steps() != 0)
    return numbers


def _settle(shard: _Shard, committed: Sequence[JournalLine], work: _Work) -> None:
    """A line for a sound shard that has none or a wrong one; a broken one goes."""
    if shard.problem:
        work.lines.append(replace(committed[0] if committed else shard.line, retired=True))
        work.set_aside(shard.path, shard.problem)
    elif shard.line not in committed:
        reason = "its journal line was wrong" if committed else "it had no journal line that can be read"
        work.add_line("journalled", shard.line, reason)


def _sift_journal(journal: _Journal, paths: Sequence[Path], shards: Sequence[_Shard], work: _Work) -> None:
    """Leave out what is damaged, and what contradicts the one line that counts for a shard."""
    unknown = {path.name for path in paths} - {shard.path.name for shard in shards} - journal.retired
    right = {name: lines[0] for name, lines in journal.committed.items() if name not in unknown}
    right |= {shard.path.name: shard.line for shard in shards if not shard.problem}

    def stays(line: JournalLine) -> bool:
        if line.retired:
            return line not in journal.mistaken
        return line.file in unknown or line == right[line.file]

    for path, lines in journal.files.items():
        _sift(path, lines, stays, work)


def _sift_failures(planned: Planned | None, work: _Work) -> None:
    """Leave out what is damaged, and what is about no prompt of the plan."""

    def stays(failure: Failure) -> bool:
        return planned is None or 0 <= failure.prompt_index < planned.plan.prompts

    for path in _line_files(work.directory / FAILURES_DIR):
        _sift(path, _read_lines(path, Failure), stays, work)


def _sift(path: Path, lines: _Lines[_Line], stays: Callable[[_Line], bool], work: _Work) -> None:
    kept = [text for text, line in lines if line is not None and stays(line)]
    if out := len(lines) - len(kept):
        work.rewrites[path] = b"".join(kept)
        some = "1 line that is" if out == 1 else f"{out} lines that are"
        work.note("rewritten", path, f"without {some} damaged or wrong; as it was, it is in {QUARANTINE_DIR}/")


def _line_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.jsonl"))


def _read_lines(path: Path, kind: type[_Line]) -> _Lines[_Line]:
    parsed = (line for _, line in parse_lines(path, kind))
    with open_regular(path) as file:
        texts = iter(partial(file.readline, MAX_LINE_BYTES), b"")
        return list(zip(texts, parsed, strict=False))  # a torn last line is not parsed


def _named(lines: _Lines[JournalLine]) -> _Lines[JournalLine]:
    """With a line about something that is no shard as the damaged one that it is."""
    return [(text, line if line and parse_shard_name(line.file) else None) for text, line in lines]


def _carry_out(work: _Work) -> None:
    directory, rewrites = work.directory, dict(work.rewrites)
    if work.lines:
        journal = directory / JOURNAL_DIR / f"{REPAIRER}.jsonl"
        there = _read_lines(journal, JournalLine) if journal.exists() else []
        kept = rewrites.pop(journal, b"".join(text for text, _ in there))
        fsync_directory(directory / DATA_DIR)  # a shard's name before its line
        _switch(directory, journal, kept + b"".join(map(encode_line, work.lines)))
    _move(directory, work.moves)
    for path, content in rewrites.items():
        _switch(directory, path, content)


def _move(directory: Path, shards: Collection[Path]) -> None:
    if shards:
        for path in shards:
            path.rename(quarantine_place(directory, path, path.name))
        fsync_directory(directory / QUARANTINE_DIR)
        fsync_directory(directory / DATA_DIR)


def _switch(directory: Path, path: Path, content: bytes) -> None:
    """Give a file of lines its new content, at once. The file as it was stays in quarantine/, unless nothing goes."""
    temporary = directory / f".tmp-{REPAIRER}-{path.name}"  # beside the manifest: a writer that is alone removes it
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not content.startswith(path.read_bytes()):
            place = quarantine_place(directory, path, f"{path.parent.name}-{path.name}")
            if not place.exists():
                os.link(path, place)
            fsync_directory(place.parent)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
