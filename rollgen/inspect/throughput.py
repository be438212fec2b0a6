"""How fast a dataset was made, from its first commit to its last: tokens a second over the time that it took.

A commit's time is the modification time of its shard; its tokens were made since the commit before it of the same
writer, or since that writer began to sample. Rates of writers that work beside each other add up. Time in which nobody
sampled, between two attempts or while models loaded, is left out.

Times of files change when a dataset is copied, or a shard fetched again, and then nothing is told. They are believed
where

- every log was written when its last line says;
- a commit lies in what a log says of its writer's sampling or, of a writer that keeps none, behind the start of the
  last attempt as `speed.last_start` believes it;
- no commit of a writer lies before one with a lower number;
- a writer's commits do not come all at once, at the end of a long time (`_come_at_once`).

Nor is there anything to tell where shards have been rewritten.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from rollgen.format.commit import WHOLE_NAME
from rollgen.format.journal import parse_shard_name
from rollgen.format.replacement import COMPACTOR, REPAIRER
from rollgen.inspect.speed import Commit, is_task, last_start, sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollgen.format.reader import StoredDataset

Span = tuple[float, float]
"""When somebody sampled: from, until."""

POINTS: Final = 60
"""Stretches of time that are told apart."""
_AT_ONCE: Final = 20.0
"""How many times as fast as its first commit a writer's others may be while they take less than that part of its time:
copies are hundreds of times as fast."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over equal stretches of the time in which somebody sampled."""

    seconds: float
    """Of sampling, pauses left out."""
    tokens: int
    """Generated in them."""
    rates: tuple[float, ...]
    """Tokens a second: entry i is of the i-th of `len(rates)` equal parts of `seconds`."""

    @property
    def mean(self) -> float:
        """Tokens a second over all of it."""
        return self.tokens / self.seconds


def throughput(dataset: StoredDataset) -> Throughput | None:
    """The history of a dataset's speed; None where times of files do not tell it.

    Raises DatasetError for a time in the manifest that is none.
    """
    spans = defaultdict[str, list[Span]](list)
    for session in sessions(dataset.directory):
        if session.is_copied:
            return None
        spans[session.writer].append((session.began, session.ended))
    last = last_start(dataset.directory, dataset.manifest)
    untold = [] if last is None else [(last, np.inf)]
    by_writer = defaultdict[str, list[Commit]](list)
    for name, commits in _commits(dataset).items():
        whose = WHOLE_NAME if is_task(name) else name
        if name in (COMPACTOR, REPAIRER) or not _are_believed(commits, spans.get(whose, untold)):
            return None
        by_writer[whose] += commits
    made = [
        interval
        for name, commits in by_writer.items()
        for interval in _intervals(commits, [began for began, _ in spans.get(name, untold)])
    ]
    return _rates(np.array(made, np.float64)) if made else None


def _commits(dataset: StoredDataset) -> dict[str, list[Commit]]:
    """By writer and in its order, of shards whose journal line is written: a live run's last one comes next time."""
    found = defaultdict[str, dict[int, Commit]](dict)
    for shard in dataset.shards:
        place = parse_shard_name(shard.name)
        if shard.line is not None and place is not None:
            writer, number = place
            found[writer][number] = Commit(writer, shard.path.stat().st_mtime, shard.line.tokens)
    return {writer: [commits[number] for number in sorted(commits)] for writer, commits in found.items()}


def _are_believed(commits: Sequence[Commit], spans: Sequence[Span]) -> bool:
    """Whether commits of a writer, in its order, may have been made at these times, by one who sampled in `spans`."""
    in_order = all(one.time <= other.time for one, other in pairwise(commits))
    there = all(any(began <= it.time <= ended for began, ended in spans) for it in commits)
    return in_order and there and not any(_come_at_once(commits, span) for span in spans)


def _come_at_once(commits: Sequence[Commit], span: Span) -> bool:
    """Whether commits of a writer, in its order, follow the first one of a span within a moment, and yet hold much: as
    in a copy that was made soon after it began."""
    began, ended = span
    those = [it for it in commits if began <= it.time <= ended]
    if not those:
        return False
    before, after = those[0].time - began, those[-1].time - those[0].time
    much = sum(it.tokens for it in those[1:]) * before > _AT_ONCE * those[0].tokens * after
    return much and before > _AT_ONCE * after


def _intervals(commits: Iterable[Commit], begun: Sequence[float]) -> Iterator[tuple[float, float, int]]:
    """Start, end and tokens of each commit of one writer, which began to sample at these times."""
    last = -np.inf
    for commit in sorted(commits, key=lambda commit: commit.time):
        start = max((time for time in (last, *begun) if time < commit.time), default=-np.inf)
        if start > -np.inf:
            yield start, commit.time, commit.tokens
        last = commit.time


def _rates(made: npt.NDArray[np.float64]) -> Throughput:
    """Spread the tokens of [N, 3] intervals (start, end, tokens) evenly over each, and put pauses away."""
    start, end, tokens = made.T
    starts, ends = _busy(start, end)
    worked = np.concatenate([[0.0], np.cumsum(ends - starts)])  # seconds of sampling before each busy stretch

    def clock(time: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds of sampling until then; every `time` lies in a busy stretch."""
        place = np.searchsorted(starts, time, side="right") - 1
        return worked[place] + time - starts[place]

    began, took = clock(start), end - start
    seconds = float(worked[-1])
    edges = np.linspace(0.0, seconds, min(POINTS, max(1, round(seconds))) + 1)
    share = np.clip((edges[:, None] - began) / took, 0.0, 1.0)  # [edges, N]: made of each interval until then
    rates = np.diff(share @ tokens) / np.diff(edges)
    return Throughput(seconds, int(tokens.sum()), tuple(rates.tolist()))


def _busy(
    start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The union of intervals: where its stretches start, ascending, and where they end."""
    order = np.argsort(start)
    first, reach = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate([[True], first[1:] > reach[:-1]])
    return first[opens], reach[np.concatenate([opens[1:], [True]])]
