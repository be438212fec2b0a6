"""How a run stands: `run_status(directory)`, of a live run or of one that ended. Looks, and changes nothing.

It believes the records and does not look at what shards hold: that is what `rollgen verify` is for. Stored samples are
the rows that the journal says were committed, so that a hundred thousand shards cost a listing and a read of their
lines. Opened are only shards without a line (a commit that is being made, or a crash just before the line): they count
when they can be read. A journalled shard that is gone does not count, because `--resume` makes its samples again. Keys
are read only where some are needed: to see which failed samples were stored after all.

How fast it goes, `speed.py` tells. A live writer whose lock is younger than the manifest is still checking prompts or
loading a model: what is here of it, it made in an earlier attempt.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from rollgen.errors import DatasetError
from rollgen.format.commit import PART_NAME, live_writers
from rollgen.format.failures import read_failures
from rollgen.format.journal import committed_shards, parse_shard_name
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import StoredShard, open_shard, read_columns
from rollgen.format.replacement import COMPACTOR, REPAIRER
from rollgen.format.schema import JOURNAL_DIR, MANIFEST_FILE, PLAN_FILE, QUARANTINE_DIR
from rollgen.inspect.find import stored_rows
from rollgen.inspect.provenance import owed_when_merged
from rollgen.inspect.speed import Commit, tokens_per_second
from rollgen.prompts.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from rollgen.format.journal import Journal, JournalLine
    from rollgen.format.manifest import Manifest

State = Literal["starting", "running", "stopped", "complete"]
"""Starting: writers check prompts or load a model, and have not begun. Running: a writer is at work. Complete: all that
was planned is stored (of a merged dataset: all that was merged, of runs that owed nothing), no more and nothing lost,
and nobody writes. Stopped: anything else, and nobody writes."""

_SAMPLE_NOTHING: Final = frozenset({COMPACTOR, REPAIRER})
"""Writers that load no model and add no attempt."""
_SHARD_SETTING: Final = re.compile(r"\d{1,9}/(?P<of>[1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class Committed:
    """What one shard holds."""

    path: Path
    writer: str
    sequence: int
    rows: int
    tokens: int
    bytes: int
    time: float
    """When it was written: seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """One writer of the run."""

    name: str
    alive: bool
    shards: int
    samples: int
    tokens: int
    """Generated ones."""
    bytes: int
    last_commit: str | None
    """UTC, ISO 8601; None before the first."""


@dataclass(frozen=True, slots=True)
class Division:
    """Of a run that several processes make, a part each (`--shard`): all attempts since that number of parts."""

    of: int
    """Parts."""
    started: tuple[int, ...]
    """Those that a process has ever begun to make."""
    attempts: int
    """Starts of processes that came as far as sampling."""
    since: str
    """The first of them."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Everything `rollgen status` shows. Samples, unless something else is said."""

    state: State
    writers: tuple[WriterStatus, ...]
    planned: int | None = None
    """Those of skipped rows included; None without a plan, like the next two."""
    skipped: int | None = None
    """Of bad input rows, which are not made."""
    owed: int | None = None
    """Planned or to be made again, not skipped, and not stored."""
    owed_when_merged: int = 0
    """What the runs of a merged dataset owed then, as far as they had plans: it is not to be made any more."""
    surplus: int = 0
    """Rows beyond those: some key is there twice, or was never planned. `rollgen verify` says which."""
    retries: int = 0
    """To be made again, as a later generation, on top of the planned ones."""
    stored: int = 0
    """Rows: a sample that was made again counts again."""
    failed: int = 0
    """With a failure line and not stored."""
    failed_by_stage: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    bytes: int = 0
    quarantined: tuple[str, ...] = ()
    """Shards that were set aside as damaged."""
    lost: tuple[str, ...] = ()
    """Shards that are missing, or cannot be read: not counted, `--resume` makes their samples again."""
    attempts: int = 0
    started_at: str | None = None
    """The last attempt's start."""
    runs: tuple[str, ...] = ()
    """Of a merged dataset, the names of its runs."""
    division: Division | None = None
    """None when the last attempt was one process that makes everything."""
    tokens_per_second: float | None = None
    """At the last commits; None when there are none to measure by, as before the first of an attempt."""
    seconds_left: float | None = None
    """Of a live run, at that rate and at the mean length of the stored samples."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able, names as here."""
        return asdict(self)


def run_status(directory: Path) -> RunStatus:
    """Look at the run in `directory`.

    Raises DatasetError when it holds none, its own records are damaged, or its shards are being replaced.
    """
    alive = frozenset(live_writers(directory))
    if alive and not (directory / MANIFEST_FILE).exists():
        return RunStatus("starting", _writers((), alive, ()))
    journal, paths = committed_shards(directory)
    manifest = read_manifest(directory)
    committed, lost = _committed(paths, journal, manifest)
    plan = None if manifest.is_planless else Plan(directory / PLAN_FILE)
    stored, tokens = sum(shard.rows for shard in committed), sum(shard.tokens for shard in committed)
    retries = sum(retry.samples for retry in manifest.retries)
    balance = None if plan is None else _wanted(plan, retries) - stored
    unmade = owed_when_merged(*manifest.runs)
    missing = sum(run.samples for run in manifest.runs) + unmade - stored if manifest.runs else balance
    owed = None if balance is None else max(0, balance)
    surplus = 0 if balance is None else max(0, -balance)
    loading = _loading(directory, alive)
    rate = _speed(directory, manifest, committed, alive, loading)
    division = _division(directory, manifest)
    failed = _failed(directory, committed, manifest) if owed != 0 else Counter()
    left = owed * tokens / stored / rate if alive and owed is not None and stored and rate else None
    return RunStatus(
        state=_state(alive, loading, is_complete=missing == 0 and not lost),
        writers=_writers(committed, alive, _without_commits(directory, division)),
        planned=None if plan is None else plan.samples,
        skipped=None if plan is None else _skipped(plan),
        owed=owed,
        owed_when_merged=unmade,
        surplus=surplus,
        retries=retries,
        stored=stored,
        failed=failed.total(),
        failed_by_stage=dict(failed.most_common()),
        tokens=tokens,
        bytes=sum(shard.bytes for shard in committed),
        quarantined=tuple(sorted(path.name for path in (directory / QUARANTINE_DIR).glob("part-*.parquet"))),
        lost=lost,
        attempts=len(manifest.attempts),
        started_at=manifest.attempts[-1].started_at if manifest.attempts else None,
        runs=manifest.run_names,
        division=division,
        tokens_per_second=rate,
        seconds_left=left,
    )


def _wanted(plan: Plan, retries: int) -> int:
    return plan.samples - _skipped(plan) + retries


def _skipped(plan: Plan) -> int:
    return int(plan.n[plan.tombstone].sum())


def _loading(directory: Path, alive: frozenset[str]) -> frozenset[str]:
    """Live writers that have yet to begin: each takes its lock, loads a model, and adds its attempt to the manifest."""
    begun = (directory / MANIFEST_FILE).stat().st_mtime
    locks = {name: directory / JOURNAL_DIR / f"{name}.lock" for name in alive - _SAMPLE_NOTHING}
    return frozenset(name for name, lock in locks.items() if lock.stat().st_mtime > begun)


def _state(alive: frozenset[str], loading: frozenset[str], *, is_complete: bool) -> State:
    if alive:
        return "starting" if loading == alive else "running"
    return "complete" if is_complete else "stopped"


def _committed(paths: Sequence[Path], journal: Journal, manifest: Manifest) -> tuple[list[Committed], tuple[str, ...]]:
    """Shards that count, and the names of those that should and cannot."""
    in_place = {path.name: path for path in paths if path.name not in journal.retired}
    lost = [name for name in journal.committed if name not in in_place]
    committed = []
    for name, path in in_place.items():
        line = journal.committed.get(name)
        shard = _from_footer(path, manifest.config_digest) if line is None else _from_line(path, line)
        if shard is None:
            lost.append(name)
        else:
            committed.append(shard)
    return committed, tuple(sorted(lost))


def _from_line(path: Path, line: JournalLine) -> Committed | None:
    """A shard that its journal knows; None when it has not the size that it was committed with, or is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_size != line.bytes:
        return None
    return Committed(path, *_place(path), line.rows, line.tokens, line.bytes, found.st_mtime)


def _from_footer(path: Path, config_digest: str) -> Committed | None:
    """A shard whose line is not written (yet); None when it cannot be read."""
    try:
        with open_shard(path, config_digest=config_digest) as shard:
            lengths = read_columns(shard, ["response_length"])["response_length"].to_numpy()
    except DatasetError:
        return None
    found = path.stat()
    return Committed(path, *_place(path), len(lengths), int(lengths.sum()), found.st_size, found.st_mtime)


def _place(path: Path) -> tuple[str, int]:
    place = parse_shard_name(path.name)
    assert place is not None  # `list_shards` lists no other names
    return place


def _writers(committed: Iterable[Committed], alive: frozenset[str], others: Iterable[str]) -> tuple[WriterStatus, ...]:
    shards = defaultdict(list)
    for shard in committed:
        shards[shard.writer].append(shard)
    names = sorted(shards.keys() | alive | set(others))
    return tuple(_writer(name, shards[name], alive=name in alive) for name in names)


def _division(directory: Path, manifest: Manifest) -> Division | None:
    divisions = [_parts_of(attempt.operational.get("shard")) for attempt in manifest.attempts]
    if not divisions or divisions[-1] is None:
        return None
    of = divisions[-1]
    first = next((i for i in range(len(divisions), 0, -1) if divisions[i - 1] != of), 0)
    locks = (PART_NAME.fullmatch(path.stem) for path in (directory / JOURNAL_DIR).glob(f"s*of{of}.lock"))
    started = sorted(int(found["number"]) for found in locks if found)
    return Division(of, tuple(started), len(divisions) - first, manifest.attempts[first].started_at)


def _parts_of(shard: object) -> int | None:
    """N of a recorded `--shard i/N`."""
    found = _SHARD_SETTING.fullmatch(shard) if isinstance(shard, str) else None
    return None if found is None or found["of"] == "1" else int(found["of"])


def _without_commits(directory: Path, division: Division | None) -> Iterator[str]:
    """Writers of parts that have begun, and have never committed anything."""
    if division is None:
        return
    for number in division.started:
        name = f"s{number}of{division.of}"
        if not (directory / JOURNAL_DIR / f"{name}.jsonl").exists():
            yield name


def _writer(name: str, shards: Sequence[Committed], *, alive: bool) -> WriterStatus:
    last = max(shards, key=lambda shard: shard.sequence, default=None)
    return WriterStatus(
        name=name,
        alive=alive,
        shards=len(shards),
        samples=sum(shard.rows for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        last_commit=None if last is None else _iso_time(last.time),
    )


def _speed(
    directory: Path,
    manifest: Manifest,
    committed: Iterable[Committed],
    alive: frozenset[str],
    loading: frozenset[str],
) -> float | None:
    commits = [Commit(it.writer, it.time, it.tokens) for it in committed if it.writer not in _SAMPLE_NOTHING]
    return tokens_per_second(directory, manifest, commits, alive - loading if alive else None)


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _failed(directory: Path, committed: Iterable[Committed], manifest: Manifest) -> Counter[str]:
    """Failed samples that are not stored, by stage. Tombstones are counted by the plan."""
    stage, index = {}, {}
    for failure in read_failures(directory):
        if failure.stage != "input":
            stage[failure.prompt_id, failure.sample_index, failure.generation] = failure.stage
            index[failure.prompt_id] = failure.prompt_index
    for shard in committed if stage else ():
        for key in _stored_of(StoredShard(shard.path, None, manifest.config_digest), index):
            stage.pop(key, None)
    return Counter(stage.values())


def _stored_of(shard: StoredShard, index: dict[str, int]) -> list[tuple[str, int, int]]:
    """Keys that a shard holds of these prompts; none of a damaged one, because its samples are owed again."""
    try:
        return [
            (row.prompt_id, row.sample_index, row.generation)
            for row in stored_rows([shard], index.keys(), index.values())
        ]
    except DatasetError:
        return []
