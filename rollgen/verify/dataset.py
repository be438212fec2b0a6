"""`verify_dataset`: everything that can be said about a dataset without the model that made it.

Looks, and changes nothing; never raises for damage. A run may go on meanwhile: what was committed when the shards were
listed is verified. One pass over the bytes for their hash, one over the row groups; in memory are one row group, parts
of the plan, and 16 bytes a row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rollgen.errors import DatasetError
from rollgen.format.commit import live_writers
from rollgen.format.journal import RECORD_FILE, is_unfinished, list_shards, parse_shard_name
from rollgen.format.keys import Keys
from rollgen.format.manifest import Manifest
from rollgen.format.schema import (
    DATA_DIR,
    FAILURES_DIR,
    JOURNAL_DIR,
    MANIFEST_FILE,
    QUARANTINE_DIR,
    RETRY_FILES,
    retry_file,
)
from rollgen.prompts.planned import Planned
from rollgen.verify.files import CheckTable, ShardContent, check_bytes, check_content, check_counts, checking
from rollgen.verify.findings import Finding, Findings, Kind
from rollgen.verify.merged import StoredRuns
from rollgen.verify.records import (
    JournalContent,
    check_failures,
    check_journal,
    check_manifest,
    check_planned,
    check_rewards,
)

Progress = Callable[[int, int], None]
"""Called with the bytes of shards that are verified, and those of all."""
_REPLACEMENT_SECONDS: Final = 60
_DIRECTORIES: Final[dict[str, Kind]] = {
    ".": "manifest",
    DATA_DIR: "unreadable",
    JOURNAL_DIR: "journal",
    FAILURES_DIR: "failures",
}
"""Those of a dataset that are verified, and what it is when one may not be read."""


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """planned = stored + owed + skipped; all samples that retries list count as planned ones."""

    planned: int
    stored: int
    owed: int
    skipped: int
    """Of input rows that could not be used."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome."""

    findings: tuple[Finding, ...] = ()
    """Bounded: at most `findings.KEPT_PER_KIND` of each kind."""
    by_kind: dict[str, int] = field(default_factory=dict)
    """How many there are of each kind, kept or not."""
    notes: tuple[str, ...] = ()
    """What is worth knowing and not wrong. Untrusted text."""
    shards: int = 0
    bytes: int = 0
    """Of the shards."""
    rows: int = 0
    tokens: int = 0
    """Generated ones."""
    mask_ids: int = 0
    samples: SampleCounts | None = None
    """None without a plan."""

    @property
    def total(self) -> int:
        """Findings, kept or not."""
        return sum(self.by_kind.values())

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.by_kind

    def with_problem(self, kind: Kind, problem: str | None) -> Verification:
        """With one more finding, about the dataset as a whole; None is no problem."""
        if problem is None:
            return self
        by_kind = self.by_kind | {kind: self.by_kind.get(kind, 0) + 1}
        return replace(self, findings=(*self.findings, Finding(kind, ".", "", problem)), by_kind=by_kind)

    def to_json(self) -> dict[str, Any]:
        """JSON-able."""
        values = asdict(self)
        return {"clean": self.is_clean, "findings_total": self.total, **values, "findings": list(values["findings"])}


def verify_dataset(directory: Path, *, progress: Progress | None = None) -> Verification:
    """Verify a dataset directory.

    What starts, replaces or sets aside shards meanwhile can look like damage: then all is verified again.
    """
    closed = _check_directories(directory)
    if closed.total:
        return _outcome(closed)
    _wait_for_replacement(directory)
    while True:
        moment = _moment(directory)
        verification = _verify(directory, progress)
        if verification.is_clean or _moment(directory) == moment:
            return verification


def _wait_for_replacement(directory: Path) -> None:
    """Let a writer that is replacing shards finish, which takes it an instant. One that is dead is not waited for."""
    deadline = time.monotonic() + _REPLACEMENT_SECONDS
    while is_unfinished(directory) and _live_writers(directory, []) and time.monotonic() < deadline:
        time.sleep(0.05)


def _check_directories(directory: Path) -> Findings:
    """What may not be looked into: nothing can be said of the dataset then."""
    findings = Findings(directory)
    for name, kind in _DIRECTORIES.items():
        path = directory / name
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            findings.add(kind, path, "its permissions do not let it be read: nothing was verified")
            break  # what is inside cannot even be asked about
    return findings


def _outcome(findings: Findings, **values: Any) -> Verification:
    return Verification(findings.kept, dict(findings.by_kind), **values)


def _moment(directory: Path) -> tuple[Manifest | None, frozenset[str]]:
    """What does not change while a run only adds shards: the manifest, and which shards are retired."""
    unheard = Findings(directory)
    return check_manifest(directory, unheard), frozenset(check_journal(directory, unheard).retired)


class _Sight(NamedTuple):
    """A dataset at one moment, with what is wrong with these records."""

    findings: Findings
    committed: frozenset[str]
    """Shards that must be there."""
    paths: list[Path]
    """Shards that are there, those that are retired left out."""
    alive: frozenset[str]
    """Writers of whose shards some may have no line yet."""
    manifest: Manifest | None
    journal: JournalContent
    """It has the lines of all `paths` but for those of `alive`."""


def _look(directory: Path, notes: list[str]) -> _Sight:
    """In an order in which no commit looks wrong: a shard that had its line is listed; one that is listed has its line,
    or its writer was alive; a retry is in the manifest before its first shard. Looks again when shards were retired.
    """
    while True:
        findings = Findings(directory)
        before = check_journal(directory, Findings(directory))
        listed = list_shards(directory)
        alive = _live_writers(directory, notes)
        manifest, journal = check_manifest(directory, findings), check_journal(directory, findings)
        if journal.retired.keys() == before.retired.keys():
            paths = [path for path in listed if path.name not in journal.retired]
            committed = frozenset(before.committed.keys() & journal.committed.keys())
            return _Sight(findings, committed, paths, alive, manifest, journal)


def _live_writers(directory: Path, notes: list[str]) -> frozenset[str]:
    try:
        return live_writers(directory)
    except (OSError, DatasetError) as error:
        notes.append(f"which writers are alive cannot be told: {error}")
        return frozenset()


def _verify(directory: Path, progress: Progress | None) -> Verification:
    notes = list[str]()
    findings, committed, paths, alive, manifest, journal = _look(directory, notes)
    if is_unfinished(directory):
        problem = "shards are being replaced, or that was interrupted: nothing else was verified; finish it with"
        findings.add("replacement", directory / JOURNAL_DIR / RECORD_FILE, f"{problem} `rollgen compact`")
        return _outcome(findings)
    planned = None if manifest is None else check_planned(directory, manifest, findings)
    if untold := check_failures(directory, planned, findings):
        notes.append(f"skipped input rows without a line in failures/, which --resume adds: {untold:,}")
    if manifest is not None:
        check_rewards(directory, manifest, findings)
    for name in sorted(committed - {path.name for path in paths}):
        findings.add(
            "missing", directory / DATA_DIR / name, "not there, though committed; put it back from a copy, or repair"
        )
    runs = StoredRuns(manifest) if manifest is not None and manifest.is_planless else None
    shards = _Shards(journal, manifest, _planned_check(planned, runs), findings, alive)
    found = [(path, content) for path, content in shards.check(paths, progress) if content is not None]
    _check_unique(found, findings)
    notes += [*shards.notes(), *_other_files(directory, journal), *_other_lists(directory, manifest)]
    whole = ShardContent.joined([content for _, content in found])
    if whole.beyond_tokenizer:
        notes.append(f"sampled ids beyond the tokenizer, inside the model's vocabulary: {whole.beyond_tokenizer:,}")
    if runs is not None:
        for problem in runs.problems():
            findings.add("manifest", directory / MANIFEST_FILE, problem)
        if lost := runs.lost():
            notes.append(f"samples that were merged and are not here any more: {lost:,}; merge again to have them back")
    return _outcome(
        findings,
        notes=tuple(notes),
        shards=len(paths),
        bytes=shards.bytes,
        **whole.totals._asdict(),
        samples=None if planned is None else _count_samples(planned, whole.keys),
    )


def _planned_check(planned: Planned | None, runs: StoredRuns | None) -> CheckTable:
    """What is checked of rows beside the invariants; nothing where a plan is missing that should be there."""
    if planned is not None:
        return checking(planned.check)
    return (lambda table: ()) if runs is None else checking(runs.check)


@dataclass(slots=True)
class _Shards:
    """What the verification of one shard after the other needs."""

    journal: JournalContent
    manifest: Manifest | None
    check_planned: CheckTable
    findings: Findings
    alive: frozenset[str]
    """Writers."""
    bytes: int = 0
    unfinished: int = 0
    """Shards whose writers are alive and have yet to write the journal lines."""
    unheard: int = 0
    """Shards without a journal line, unless it is one of those that cannot be read."""

    def notes(self) -> Iterator[str]:
        """What is not wrong."""
        if self.unfinished:
            yield f"shards whose writers are alive and have yet to write their journal lines: {self.unfinished:,}"
        if self.unheard:
            yield f"shards without a journal line, unless it is one that cannot be read: {self.unheard:,}"

    def check(self, paths: Sequence[Path], progress: Progress | None) -> Iterator[tuple[Path, ShardContent | None]]:
        """Each shard with what it holds; None where that cannot be told."""
        sizes = [_size(path) for path in paths]
        whole = sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            self.bytes += size
            try:
                yield path, self._check(path)
            except FileNotFoundError:
                self.findings.add("missing", path, "not there any more: it was listed when verification began")
            except (OSError, DatasetError) as error:
                self.findings.add_error(path, error)
            if progress is not None:
                progress(self.bytes, whole)

    def _check(self, path: Path) -> ShardContent | None:
        line = self.journal.committed.get(path.name)
        if line is None:
            self._note_unjournalled(path)
        committed = line is not None and check_bytes(path, line, self.findings)
        if self.manifest is None:
            return None
        content = check_content(path, self.manifest, self.check_planned, self.findings)
        if committed and line is not None and content is not None and content.is_whole:
            check_counts(path, line, content.totals, self.findings)
        return content

    def _note_unjournalled(self, path: Path) -> None:
        parsed = parse_shard_name(path.name)
        if parsed and parsed[0] in self.alive:
            self.unfinished += 1
        elif parsed and parsed[0] in self.journal.damaged:
            self.unheard += 1
        else:
            problem = (
                "no journal line: a commit that was interrupted; `rollgen repair` or --resume verifies and adds it"
            )
            self.findings.add("unjournalled", path, problem)


def _size(path: Path) -> int:
    """In bytes; 0 for a file that is not there any more, or that nothing can be told of."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _check_unique(found: Sequence[tuple[Path, ShardContent]], findings: Findings) -> None:
    """Report keys that are there twice, by the shard that has the second one."""
    keys = Keys.joined([content.keys for _, content in found])
    sizes = np.array([len(content.keys.prompt_index) for _, content in found], np.int64)
    shard = np.repeat(np.arange(len(found)), sizes)
    order = keys.order()
    again = np.flatnonzero(keys.take(order).steps() == 0)
    first, second = order[again], order[again + 1]
    for number in np.unique(shard[second]).tolist():
        at = np.flatnonzero(shard[second] == number)
        row, other = int(second[at[0]]), found[shard[first[at[0]]]][0]
        path, content = found[number]
        place = content.place(row - int(sizes[:number].sum()))
        findings.add("duplicate", path, f"{keys.name(row)} is in {other.name} too", place, len(at))


def _count_samples(planned: Planned, keys: Keys) -> SampleCounts:
    plan = planned.plan
    stored = keys.take(planned.is_planned(keys))
    distinct = int(np.count_nonzero(stored.take(stored.order()).steps())) + bool(len(stored.prompt_index))
    total, skipped = plan.samples + sum(map(len, planned.retries)), int(plan.n[plan.tombstone].sum())
    return SampleCounts(total, distinct, total - skipped - distinct, skipped)


def _other_lists(directory: Path, manifest: Manifest | None) -> Iterator[str]:
    """Lists of retries that the manifest does not know: one that came to nothing, or the manifest is an old copy."""
    known = {retry_file(retry.generation) for retry in manifest.retries} if manifest else set()
    for path in sorted(directory.glob(RETRY_FILES)) if manifest else ():
        if path.name not in known:
            yield f"{path.name} is not in the manifest: a retry that never began, or the manifest is an older copy"


def _other_files(directory: Path, journal: JournalContent) -> Iterator[str]:
    """What lies beside the shards, in words."""
    names = [path.name for path in (directory / DATA_DIR).glob("*")]
    temporary = {name for name in names if name.startswith(".tmp-")}
    retired = journal.retired.keys() & names
    foreign = [name for name in names if name not in temporary and parse_shard_name(name) is None]
    for count, text in (
        (len(temporary), "temporary files of commits that go on or were interrupted"),
        (len(retired), "files in data/ that were retired and are not part of the dataset"),
        (len(foreign), "other files in data/, which are not part of the dataset"),
        (sum(1 for _ in (directory / QUARANTINE_DIR).glob("*")), "files in quarantine/"),
    ):
        if count:
            yield f"{text}: {count:,}"
