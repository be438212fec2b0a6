"""`rollgen score`: a reward for each stored sample, by a function of the user's, as a sidecar of the dataset.

    find     the scorer, the rewards there are of this name, and which samples have none (`unscored.py`)
    score    batch by batch in processes of their own (`workers.py`); what cannot be scored is stored with its error
    commit   parts of COMMIT_ROWS rows, or what there is after COMMIT_SECONDS, and after more the more parts there are:
             that is what a kill costs

A sample has a reward if the last row of its key has one, for the tokens that are stored now. Only others are scored.
So the same command continues after a kill, adds what a run has stored since, and tries again what could not be scored.

A rescoring is a scoring of its own. It is continued by the same command, and readers see nothing of it before every
sample has a reward: its last part says so and makes it the one in force, and only then the old parts go. So at any
time all rewards of a name are of one scorer that is known. Memory is some 40 bytes for each row of the dataset, and a
few batches.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import pyarrow as pa

from rollgen.arguments import check_numbers, check_texts
from rollgen.curate.answers import Score, ScoringFunction, StoredAnswer, failed
from rollgen.curate.scorers import Scorer, find_scorer
from rollgen.curate.unscored import Unscored, check_field
from rollgen.curate.workers import Judged, Workers, check_program
from rollgen.errors import ResumeRefused, UsageError
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import (
    MAX_FURTHER,
    Part,
    ScorerRecord,
    in_force,
    is_column,
    is_name,
    part_schema,
    read_rewards,
)
from rollgen.remote.objects import is_url, local_path
from rollgen.rollouts import REWARD

COMMIT_ROWS: Final = 1 << 14
COMMIT_SECONDS: Final = 20.0
_RAREST_SECONDS: Final = 300.0
_FILES: Final = 16
"""So many parts make commits rarer by COMMIT_SECONDS."""
BATCH_SIZE: Final = 64
TIMEOUT_SECONDS: Final = 600.0
ERRORS: Final = 5
"""So many different ones are told."""

Progress = Callable[[int, int], None]
"""Called with the samples that are scored, and with all that were to be, as far as is known."""


@dataclass(frozen=True, slots=True)
class ScoreError:
    """Samples that could not be scored for the same reason."""

    prompt_id: str
    """Of the first of them."""
    sample_index: int
    error: str
    samples: int = 1


@dataclass(frozen=True, slots=True)
class Scored:
    """What was done. Samples, unless something else is said."""

    name: str
    scorer: str
    samples: int
    """Of the dataset: current rows."""
    scored: int
    """By this run."""
    kept: int
    """That had a reward already; of a rescoring, by an earlier attempt at it."""
    failed: int
    """That could not be scored."""
    mean: float | None
    """Of the rewards of this scoring; None when there are none."""
    in_force: bool
    """False for a rescoring that is not complete: readers still get the rewards before it."""
    errors: tuple[ScoreError, ...]
    """The first few different ones."""


def score(
    directory: str | os.PathLike[str],
    scorer: str | ScoringFunction,
    *,
    name: str | None = None,
    field: str | None = None,
    extract: str | None = None,
    processes: int | None = None,
    batch_size: int = BATCH_SIZE,
    timeout: float = TIMEOUT_SECONDS,
    rescore: bool = False,
    progress: Progress | None = None,
) -> Scored:
    """Give each current sample of a dataset a reward that it has not got, and store it under `name`.

    `scorer` is `"module:function"`, a function at the top of a module, or the name of a built-in one with its `field`
    and `extract` (`scorers.py`). The function takes a sequence of `rollgen.Answer` and returns as many results, each a
    number, a mapping of numbers that has "reward", or an exception that says why there is none. It is called in
    `processes` processes (default: one for each core) with `batch_size` answers at a time, for which it has `timeout`
    seconds. Processes are spawned: a script needs `if __name__ == "__main__"`.

    `rescore` makes all rewards again, also by another scorer. Without it, rewards that another scorer, or another
    version of its source file, made under this name raise ResumeRefused; so does another process that is scoring under
    this name, and a source file that changes meanwhile. Raises UsageError for a scorer that cannot be imported
    and for a `field` that no row has, DatasetError for damage, and RollgenError when its processes come to nothing.
    What was scored before is committed.
    """
    if is_url(directory):
        raise UsageError(f"{directory}: is in object storage; score a copy of it, which is a dataset too")
    check_texts(or_none=True, name=name, field=field, extract=extract)
    check_numbers(1, batch_size=batch_size, processes=1 if processes is None else processes)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise UsageError("timeout must be a finite number of seconds above 0")
    if progress is not None and not callable(progress):
        raise UsageError("progress must be a function of two numbers")
    found = find_scorer(scorer, field=field, extract=extract)
    check_program()
    name = found.name if name is None else name
    if not is_name(name):
        raise UsageError(f"{name}: no name for rewards; use --name with letters, digits and underscores, at most 100")
    place = local_path(directory)
    digest = open_dataset(place).manifest.config_digest
    if found.field is not None:
        check_field(place, found.field)
    with RewardWriter(place, name, digest) as writer:
        if read_manifest(place).config_digest != digest:  # again: from now on no `--clean` can replace it
            raise ResumeRefused(f"{place}: another dataset has just taken its place; start again")
        scoring = _choose(writer, _record_of(found), f"{place}: rewards {name!r}", rescore=rescore)
        unscored = Unscored(place, read_rewards(scoring.parts))
        workers = Workers(found, processes or len(os.sched_getaffinity(0)), timeout)
        with workers, _Store(writer, scoring) as store:
            for judged in workers.score(unscored.batches(batch_size)):
                store.add(judged)
                if progress is not None:
                    progress(store.scored + store.failed, unscored.tally.samples - unscored.tally.kept)
        complete = not store.failed
        if scoring.replaces and complete:
            store.close()
    tally = unscored.tally
    rewarded = tally.kept + store.scored
    return Scored(
        name=name,
        scorer=found.function,
        samples=tally.samples,
        scored=store.scored,
        kept=tally.kept,
        failed=store.failed,
        mean=(tally.total + store.total) / rewarded if rewarded else None,
        in_force=complete or not scoring.replaces,
        errors=tuple(store.errors.values()),
    )


class _Row(NamedTuple):
    """What is stored of an answer beside its score: not its tokens, which would take memory."""

    prompt_id: str
    prompt_index: int
    sample_index: int
    generation: int
    tokens_crc32: int


class _Scoring(NamedTuple):
    """What this run continues or begins."""

    number: int
    parts: list[Part]
    """What there is of it."""
    scorer: ScorerRecord
    replaces: list[Part]
    """Those that are in force until it is complete; none unless it is a rescoring."""


def _record_of(scorer: Scorer) -> ScorerRecord:
    return ScorerRecord(scorer.function, scorer.source_sha256, scorer.field, scorer.extract)


def _choose(writer: RewardWriter, scorer: ScorerRecord, what: str, *, rescore: bool) -> _Scoring:
    """Which scoring to go on with. Raises ResumeRefused when that in force is another scorer's, unless `rescore`."""
    parts = writer.parts()
    current = in_force(parts)
    if not current:
        return _Scoring(1, [], scorer, [])
    number, before = current[0].record.scoring, current[0].record.scorer
    writer.remove(part for part in parts if part.record.scoring < number)  # a kill has left them
    later = [part for part in parts if part.record.scoring > number]
    if not rescore:
        if before != scorer:
            raise ResumeRefused(
                f"{what}: were made by {_difference(before, scorer)}; give these another --name, or replace all of "
                "them with --rescore"
            )
        return _Scoring(number, current, scorer, [])
    if later and later[-1].record.scorer == scorer:
        return _Scoring(later[-1].record.scoring, later, scorer, current)
    writer.remove(later)
    return _Scoring(number + 1, [], scorer, current)


def _difference(before: ScorerRecord, now: ScorerRecord) -> str:
    if before.function != now.function:
        return f"{before.function}, not {now.function}"
    if before.source_sha256 != now.source_sha256:
        return f"{before.function} as its source file was before it changed"
    return f"{before.function} with field {before.field!r} and extract {before.extract!r}"


class _Store:
    """Takes scores, counts them, and commits them now and then. Leaving it commits what there is, whatever happened."""

    def __init__(self, writer: RewardWriter, scoring: _Scoring) -> None:
        self._writer = writer
        self._scoring = scoring
        self._columns = {name for part in scoring.parts for name in part.record.columns}
        self._waiting: list[tuple[_Row, Score]] = []
        self._last_commit = time.monotonic()
        self.scored = 0
        self.failed = 0
        self.total = 0.0
        """Sum of the rewards."""
        self.errors: dict[str, ScoreError] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._commit()

    def add(self, judged: Sequence[Judged]) -> None:
        """Take some scores, or none, and commit if it is time for that."""
        for answer, score in judged:
            checked = self._checked(score)
            self._waiting.append((_Row(*(getattr(answer, name) for name in _Row._fields)), checked))
            self._count(answer, checked)
        interval = _commit_seconds(len(self._scoring.parts) + self._writer.written)
        is_due = time.monotonic() - self._last_commit >= interval
        if len(self._waiting) >= COMMIT_ROWS or (self._waiting and is_due):
            self._commit()

    def close(self) -> None:
        """Say that every sample has a reward, which puts this scoring in force, and take away those it replaces."""
        scoring = self._scoring
        self._writer.write(part_schema(()).empty_table(), (), scoring.scorer, scoring=scoring.number, closes=True)
        self._writer.remove(scoring.replaces)

    def _commit(self) -> None:
        if self._waiting:
            columns = sorted({name for _, score in self._waiting for name in score.values or ()} - {REWARD})
            rows = _table(self._waiting, columns)
            before = self._writer.written
            try:
                self._writer.write(rows, columns, self._scoring.scorer, scoring=self._scoring.number, closes=False)
            finally:
                if self._writer.written > before:  # also when Ctrl-C came right after it had its name
                    self._waiting = []
        self._last_commit = time.monotonic()

    def _checked(self, score: Score) -> Score:
        """A score whose values can all be columns, or what is wrong with it."""
        if score.values is None:
            # Without secrets of this process, too: the function may have hidden its own.
            return failed(score.error or "")
        further = set(score.values) - {REWARD}
        for name in further - self._columns:
            if not is_column(name):
                return failed(f"the function returned {name!r} beside the reward, which cannot be the name of a column")
        if len(self._columns | further) > MAX_FURTHER:
            return failed(f"the function returned more than {MAX_FURTHER} names beside the reward over all answers")
        self._columns |= further
        return score

    def _count(self, answer: StoredAnswer, score: Score) -> None:
        if score.values is not None:
            self.scored += 1
            self.total += score.values[REWARD]
            return
        self.failed += 1
        error = score.error or ""
        if error in self.errors:
            self.errors[error] = replace(self.errors[error], samples=self.errors[error].samples + 1)
        elif len(self.errors) < ERRORS:
            self.errors[error] = ScoreError(answer.prompt_id, answer.sample_index, error)


def _commit_seconds(parts: int) -> float:
    """Between the commits of a scoring that has so many parts: who reads rewards opens all of them."""
    return min(COMMIT_SECONDS * (1 + parts / _FILES), _RAREST_SECONDS)


def _table(scored: Sequence[tuple[_Row, Score]], columns: Sequence[str]) -> pa.Table:
    """Rows of `part_schema(columns)`, sorted by key."""
    ordered = sorted(scored, key=lambda each: each[0][1:4])
    fixed = {name: [getattr(row, name) for row, _ in ordered] for name in _Row._fields}
    values = {name: [(score.values or {}).get(name) for _, score in ordered] for name in (REWARD, *columns)}
    errors = [score.error for _, score in ordered]
    return pa.table(fixed | values | {"error": errors}, schema=part_schema(columns))
