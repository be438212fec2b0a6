"""What a verification finds: what is wrong, in which file, at which place. Bounded, however much is wrong.

Kinds of findings, by what has to be done about them:

    manifest, plan, retries      a record that nothing else can be read without: put it back from a copy
    journal, failures            a damaged line
    replacement                  shards are being replaced, or that was interrupted: finish it with `rollgen compact`
    missing, unjournalled        a shard that the journal knows and `data/` does not have, and the other way round
    bytes, sha256, footer        a shard is not the file that its journal line describes, or the line is damaged
    unreadable                   the machine could not read it: memory, disk or permissions; nothing is known about it
    damaged                      a shard, or a row group, that cannot be read or fails its checksums
    foreign                      a shard of another dataset
    counts                       a shard does not hold what its journal line says
    order, duplicate, unplanned  rows not sorted, a key that is there twice, a row that nobody asked for
    seed, mismatch               a row whose seed, prompt or sampling is not what the plan says
    lengths, sampling, ids       lists that do not align, parameters out of range, ids outside the vocabulary
    support, logprobs            a support or log-probability that no sampler can have returned
    extras                       weight versions or routed experts that no engine can have returned
    rewards                      a file of rewards that readers refuse
    recompute                    the model does not give the log-probabilities that are stored
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rollgen.errors import DatasetError, Unreadable
from rollgen.inert import BRIEF, shorten

Kind = Literal[
    "manifest",
    "plan",
    "retries",
    "journal",
    "failures",
    "replacement",
    "missing",
    "unjournalled",
    "bytes",
    "sha256",
    "footer",
    "unreadable",
    "damaged",
    "foreign",
    "counts",
    "order",
    "duplicate",
    "unplanned",
    "seed",
    "mismatch",
    "lengths",
    "sampling",
    "ids",
    "support",
    "logprobs",
    "extras",
    "rewards",
    "recompute",
]

KEPT_PER_KIND: Final = 20
"""Findings of one kind that are kept in full; the others are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    file: str
    """Relative to the dataset."""
    place: str
    """Inside the file: `line 4`, `row group 2, row 17, token 9`; empty for the file as a whole."""
    problem: str
    """Untrusted text: it may quote the data."""
    count: int = 1
    """How often, where the place is the first of several."""


class Findings:
    """Collects findings about one dataset."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: list[Finding] = []
        self.by_kind: Counter[str] = Counter()
        """How many there are of each kind, kept or not."""

    @property
    def kept(self) -> tuple[Finding, ...]:
        """At most KEPT_PER_KIND of each kind, in the order in which they were found."""
        return tuple(self._kept)

    @property
    def total(self) -> int:
        """How many there are, kept or not."""
        return self.by_kind.total()

    def add_error(self, path: Path, error: DatasetError | OSError, place: str = "") -> None:
        """What reading a file, or a place in it, came to: it is damaged, or the machine could not read it."""
        damaged = isinstance(error, DatasetError) and not isinstance(error, Unreadable)
        self.add("damaged" if damaged else "unreadable", path, error, place)

    def add(self, kind: Kind, path: Path, problem: object, place: str = "", count: int = 1) -> None:
        """Add one. `problem` is a text, or an error whose text begins with the file and the place."""
        self.by_kind[kind] += 1
        if self.by_kind[kind] <= KEPT_PER_KIND:
            text = str(problem).removeprefix(str(path)).removeprefix(path.name).removeprefix(": ")
            text = text.removeprefix(f"{place}: ")
            self._kept.append(Finding(kind, self._relative(path), place, shorten(text, BRIEF), count))

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._directory))
