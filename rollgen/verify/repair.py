"""`rollgen repair`: what is damaged is set aside, and the journal made again from the shards that are not.

    look       every shard as `rollgen verify` does, every line of journals and failures: what stays, what goes, which
               lines are right
    journal    one new file with the missing lines and the retirements takes the place of REPAIRER's, at once
    shards     those that were retired move to quarantine/
    files      a journal or failures file with damaged or wrong lines: linked to a name in quarantine/, then one
               without them takes its place, at once

Nothing is deleted, and no name in quarantine/ is taken twice. Killed anywhere, the dataset reads as its lines say or is
refused, as before or because a wrong line and the right one are both there, and the next repair does the rest. No
writer may be alive meanwhile, and none can start. Lines that stay are copied byte by byte. A torn last line is no
damage: it is left to the file's next writer, and where the file is replaced it stays in the old one.

Which shards are sound, and which are left alone, says `judge.py`. A retirement counts, except that of a shard which is
in its place and was committed with other bytes, hashes or counts: then its name is damaged, and it was another's.

A compaction that was interrupted is completed first; that deletes or moves what it replaces, as it was told to. Where
it cannot be completed, because its record, the journal or a new shard is damaged, all shards that it has made get their
names, and copies are set aside: the old shards where all new ones are sound, else the new ones. Its record, which keeps
readers away, goes to quarantine/ at the very end.

Manifest, plan and retry lists cannot be made again from shards (a resume makes the plan again). Without a manifest
nothing can be judged. Cost: twice that of `verify`, which follows.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from rollgen.errors import DatasetError, ResumeRefused, Unreadable
from rollgen.format import replacement
from rollgen.format.commit import WriterSlot, live_writers, quarantine_place
from rollgen.format.failures import Failure
from rollgen.format.files import link, refuse_links, write_durably
from rollgen.format.journal import RECORD_FILE, JournalLine, is_unfinished, list_shards
from rollgen.format.jsonlines import encode_line, line_files
from rollgen.format.manifest import Manifest, fsync_directory, read_manifest
from rollgen.format.replacement import REPAIRER
from rollgen.format.schema import DATA_DIR, FAILURES_DIR, JOURNAL_DIR, QUARANTINE_DIR, RETIRED_DIR
from rollgen.prompts.planned import Planned, check_planless
from rollgen.verify.dataset import Progress, Verification, verify_dataset
from rollgen.verify.files import CheckTable, checking
from rollgen.verify.findings import KEPT_PER_KIND, Findings
from rollgen.verify.judge import Judge, Judged, without_copies
from rollgen.verify.lines import JournalLines, Lines, read_all_lines
from rollgen.verify.records import check_planned, failure_problem

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Action = Literal["completed", "quarantined", "retired", "journalled", "rewritten", "left"]
_Line = TypeVar("_Line", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was done, or would be; or was left, though something is wrong."""

    action: Action
    """completed: an interrupted replacement; quarantined: a file was set aside; retired: a shard that is missing;
    journalled: a shard got its line; rewritten: a file got rid of lines; left: a shard that this cannot judge."""
    file: str
    """Relative to the dataset."""
    reason: str
    """Untrusted text: it may quote the data."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The outcome."""

    changes: tuple[Change, ...]
    left: tuple[Change, ...]
    """What is wrong, or may be, and was not touched."""
    dry_run: bool
    verification: Verification | None
    """Of the dataset afterwards: its findings are what could not be mended. None where a dry run has changes to tell:
    they come first."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is wrong any more."""
        return self.verification is not None and self.verification.is_clean and not self.left

    def to_json(self) -> dict[str, Any]:
        """JSON-able, and bounded: see `shown`."""
        return {
            "clean": None if self.verification is None else self.is_settled,
            "dry_run": self.dry_run,
            "changes": [asdict(change) for change in shown(self.changes)],
            "changes_by_action": dict(Counter(change.action for change in self.changes)),
            "left": [asdict(change) for change in shown(self.left)],
            "left_total": len(self.left),
            "verification": None if self.verification is None else self.verification.to_json(),
        }


def shown(changes: Iterable[Change]) -> list[Change]:
    """The first of each action, as many as of a kind of findings."""
    seen: Counter[Action] = Counter()
    first = []
    for change in changes:
        seen[change.action] += 1
        if seen[change.action] <= KEPT_PER_KIND:
            first.append(change)
    return first


def repair_dataset(directory: Path, *, dry_run: bool = False, progress: Progress | None = None) -> Repair:
    """Repair a dataset directory; a `dry_run` only looks.

    Raises ResumeRefused while a writer is alive, UsageError when no lock can be had because the directory cannot be
    written, and DatasetError when there is no readable manifest, or when a file other than a shard cannot be read or
    written: what was done by then stays done.
    """
    read_manifest(directory)  # before the slot, which makes directories
    try:
        if dry_run:
            return _foresee(directory, progress)
        with WriterSlot(directory, REPAIRER, afresh=True):
            first = _first(directory)
            replacement_left = bool(first) and first[0].action == "quarantined"
            if first and not replacement_left:
                replacement.complete(directory)
            work = _look(directory, progress, _Undone.of(directory) if replacement_left else _Undone())
            _carry_out(work)
            if replacement_left:
                _set_record_aside(directory)
            verification = verify_dataset(directory, progress=progress)
            return Repair((*first, *work.changes), tuple(work.left), dry_run=False, verification=verification)
    except OSError as error:
        raise DatasetError(
            f"{error.filename or directory}: cannot be read or written: {error.strerror or error}; nothing is lost: "
            "mend that, and repair again"
        ) from error
    except MemoryError as error:
        reason = str(error) or "out of memory"
        raise Unreadable(f"{directory}: {reason}; nothing is lost: give the machine more, and repair again") from error


def _foresee(directory: Path, progress: Progress | None) -> Repair:
    """Where there is nothing to do, what is wrong cannot be mended: then it verifies, as the repair would."""
    refuse_links(directory)
    if alive := live_writers(directory):
        raise ResumeRefused(f"{directory}: writer {min(alive)!r} is alive; wait for it, or stop it")
    changes, left = _first(directory), tuple[Change, ...]()
    if not changes:
        work = _look(directory, progress, _Undone())
        changes, left = tuple(work.changes), tuple(work.left)
    verification = None if changes else verify_dataset(directory, progress=progress)
    return Repair(changes, left, dry_run=True, verification=verification)


def _first(directory: Path) -> tuple[Change, ...]:
    """What has to be done about an interrupted replacement, before anything else can be told."""
    if not is_unfinished(directory):
        return ()
    record = f"{JOURNAL_DIR}/{RECORD_FILE}"
    try:
        interrupted = replacement.check(directory)
    except Unreadable:
        raise
    except DatasetError as error:
        return (Change("quarantined", record, f"a compaction was interrupted, and cannot be completed: {error}"),)
    fate = f"moved to {RETIRED_DIR}/" if interrupted.keep else "deleted"
    old = f"{len(interrupted.retired):,} shards that it replaces are {fate}"
    return (Change("completed", record, f"a compaction was interrupted; the {old}, the rest comes after that"),)


class _Undone(NamedTuple):
    """What is to be known of a replacement that cannot be completed."""

    first_to_go: frozenset[str] = frozenset()
    """Shards that are the copies where old and new ones hold the same."""
    revived: frozenset[str] = frozenset()
    """Shards whose retirements do not count, because new ones are not sound. Only where they cannot overlap with those

    that are: where all old shards are still there, or no new one is sound.
    """

    @classmethod
    def of(cls, directory: Path) -> _Undone:
        """By what its record says. Its new shards get their names."""
        replacement.release_added(directory)
        interrupted = replacement.read_damaged(directory)
        if interrupted is None:
            return cls()
        old = frozenset(interrupted.retired)
        gone = JournalLines(directory).retired  # a repair that died may have begun to set new shards aside
        sound = [line.file not in gone and replacement.is_sound(directory, line) for line in interrupted.added]
        if all(sound):
            return cls(first_to_go=old)
        new = frozenset(line.file for line in interrupted.added)
        in_place = frozenset(name for name in old if (directory / DATA_DIR / name).exists())
        moved = (name for name in old - in_place if (directory / QUARANTINE_DIR / name).exists())  # before a death
        return cls(new, in_place if in_place.union(moved) == old or not any(sound) else frozenset())


def _set_record_aside(directory: Path) -> None:
    record = directory / JOURNAL_DIR / RECORD_FILE
    place = quarantine_place(directory, f"{JOURNAL_DIR}-{RECORD_FILE}")
    record.rename(place)
    fsync_directory(place.parent)
    fsync_directory(record.parent)


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
    left: list[Change] = field(default_factory=list)

    def note(self, action: Action, path: Path, reason: str) -> None:
        """Tell what is done, and why."""
        changes = self.left if action == "left" else self.changes
        changes.append(Change(action, str(path.relative_to(self.directory)), reason))

    def add_line(self, action: Action, line: JournalLine, reason: str) -> None:
        """A line for the journal."""
        self.lines.append(line)
        self.note(action, self.directory / DATA_DIR / line.file, reason)

    def set_aside(self, shard: Path, reason: str) -> None:
        """A shard for quarantine/."""
        self.moves.append(shard)
        self.note("quarantined", shard, reason)


def _look(directory: Path, progress: Progress | None, undone: _Undone) -> _Work:
    """Find all that is to be done; nothing is changed."""
    manifest, records, work = read_manifest(directory), Findings(directory), _Work(directory)
    planned = check_planned(directory, manifest, records)
    paths = list_shards(directory)
    journal = JournalLines(directory, {path.name for path in paths}, undone.revived)
    judge = Judge(directory, manifest, _check_of(manifest, planned, records), journal)
    shards = without_copies(judge.all(paths, progress), journal, undone.first_to_go)
    for path in paths:
        if path.name in journal.retired:
            work.set_aside(path, "it is retired, and was left in its place")
    for left in judge.left:
        work.note("left", left.path, left.reason)
    for shard in shards:
        _settle(shard, journal, work)
    for name in sorted(journal.committed.keys() - journal.retired - {path.name for path in paths}):
        line = next(iter(journal.committed[name]))
        work.add_line("retired", replace(line, retired=True), "missing")
    _sift_journal(journal, paths, shards, work)
    _sift_failures(None if records.total or work.left else planned, work)  # a plan that is accused is no measure
    return work


def _check_of(manifest: Manifest, planned: Planned | None, records: Findings) -> CheckTable:
    """The check of rows against the plan. Damaged records are no measure: then there is none."""
    if records.total:
        return lambda _: ()
    return checking(planned.check if planned else partial(check_planless, runs=manifest.run_names))


def _settle(shard: Judged, journal: JournalLines, work: _Work) -> None:
    """A line for a sound shard that has none or a wrong one; a broken one goes."""
    committed = journal.committed.get(shard.path.name, {})
    if shard.problem:
        work.lines.append(replace(next(iter(committed), shard.line), retired=True))
        work.set_aside(shard.path, shard.problem)
    elif shard.line not in committed:
        reason = "its journal line was wrong" if committed else "it had no journal line that can be read"
        work.add_line("journalled", shard.line, reason)


def _sift_journal(journal: JournalLines, paths: Sequence[Path], shards: Sequence[Judged], work: _Work) -> None:
    """Leave out what is damaged, and what contradicts the one line that counts for a shard."""
    unknown = {path.name for path in paths} - {shard.path.name for shard in shards} - journal.retired
    right = {name: next(iter(lines)) for name, lines in journal.committed.items() if name not in unknown}
    right |= {shard.path.name: shard.line for shard in shards if not shard.problem}

    def stays(line: JournalLine) -> bool:
        if line.retired:
            return line not in journal.mistaken
        return line.file in unknown or line == right[line.file]

    for path, lines in journal.files.items():
        _sift(path, lines, stays, work)


def _sift_failures(planned: Planned | None, work: _Work) -> None:
    """Leave out what is damaged, and what contradicts the plan."""

    def stays(failure: Failure) -> bool:
        return planned is None or failure_problem(failure, planned) is None

    for path in line_files(work.directory / FAILURES_DIR):
        _sift(path, read_all_lines(path, Failure), stays, work)


def _sift(path: Path, lines: Lines[_Line], stays: Callable[[_Line], bool], work: _Work) -> None:
    kept = [text for text, line in lines if line is not None and stays(line)]
    if out := len(lines) - len(kept):
        work.rewrites[path] = b"".join(kept)
        some = "1 line that is" if out == 1 else f"{out} lines that are"
        work.note("rewritten", path, f"without {some} damaged or wrong; as it was, it is in {QUARANTINE_DIR}/")


def _carry_out(work: _Work) -> None:
    directory, rewrites = work.directory, dict(work.rewrites)
    if work.lines:
        journal = directory / JOURNAL_DIR / f"{REPAIRER}.jsonl"
        there = read_all_lines(journal, JournalLine) if journal.exists() else []
        kept = rewrites.pop(journal, b"".join(text for text, _ in there))
        fsync_directory(directory / DATA_DIR)  # a shard's name before its line
        _switch(directory, journal, kept + b"".join(map(encode_line, work.lines)))
    _move(directory, work.moves)
    for path, content in rewrites.items():
        _switch(directory, path, content)


def _move(directory: Path, shards: Collection[Path]) -> None:
    if shards:
        for path in shards:
            path.rename(quarantine_place(directory, path.name))
        fsync_directory(directory / QUARANTINE_DIR)
        fsync_directory(directory / DATA_DIR)


def _keep(directory: Path, path: Path) -> None:
    """Link a file into quarantine/, unless an interrupted repair has done that."""
    place = quarantine_place(directory, f"{path.parent.name}-{path.name}")
    with os.scandir(place.parent) as entries:
        if any(os.path.samestat(entry.stat(follow_symlinks=False), path.lstat()) for entry in entries):
            return
    link(path, place)
    fsync_directory(place.parent)


def _switch(directory: Path, path: Path, content: bytes) -> None:
    """Give a file of lines its new content, at once. The file as it was stays in quarantine/, unless nothing goes."""
    temporary = directory / f".tmp-{REPAIRER}-{path.name}"  # beside the manifest: a writer that is alone removes it
    try:
        write_durably(temporary, content)
        if path.exists() and not content.startswith(path.read_bytes()):
            _keep(directory, path)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
