"""Which shards are sound: what `rollgen repair` keeps, sets aside, or leaves alone.

A sound shard passes every check of `verify`, its rows against the plan too where plan and retry lists are in order.
Where it differs from its journal line, one of the two is damaged:

    the SHA-256 of the whole file is the line's      the shard is what was committed, and the line gets right counts
    it is that of another shard's line               the names of two were exchanged: likewise
    only that SHA-256 differs                        size, footer and counts are the line's and each page passes its
                                                     checksum: whichever of the two is damaged, every value is what was
                                                     committed, because no other byte decides one. The line is made anew
    else                                             set aside: nothing vouches for the footer, which has no checksum
    there is no line that can be read                the shard is the only witness: verified, it gets one, as after a
                                                     crash

A shard is left alone, as neither sound nor broken, when the machine could not read it, or when the journal vouches for
its bytes and all that is wrong is that manifest, plan or retry lists say otherwise: then it accuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from rollgen.errors import DatasetError
from rollgen.format.journal import JournalLine, Totals, file_sha256, footer_sha256
from rollgen.format.keys import Keys
from rollgen.format.manifest import Manifest
from rollgen.format.schema import has_generation
from rollgen.verify.files import CheckTable, check_content
from rollgen.verify.findings import Findings
from rollgen.verify.lines import JournalLines

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

_RELATIVE: Final = frozenset({"foreign", "unplanned", "mismatch", "seed", "footer"})
"""Kinds of findings that say that a shard and the manifest, the plan or a retry list contradict each other."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A shard that could be read, whatever it holds."""

    path: Path
    line: JournalLine
    """What its line must be; of a broken one, what can be told."""
    keys: Keys
    problem: str = ""
    """Why it has to be set aside; untrusted text."""
    is_misplaced: bool = False
    """Whether it is what was committed under another name."""


@dataclass(frozen=True, slots=True)
class Left:
    """A shard that stays as it is, though something is wrong."""

    path: Path
    reason: str
    """Untrusted text."""


class Judge:
    """Decides about one shard after the other."""

    def __init__(self, directory: Path, manifest: Manifest, check: CheckTable, journal: JournalLines) -> None:
        self._directory = directory
        self._manifest = manifest
        self._check = check
        self._journal = journal
        self.left: list[Left] = []

    def all(self, paths: Sequence[Path], progress: Callable[[int, int], None] | None) -> list[Judged]:
        """Those that are not retired; the others of which nothing can be said are in `left` afterwards."""
        shards, done, whole = [], 0, sum(path.lstat().st_size for path in paths)
        for path in paths:
            if path.name not in self._journal.retired:
                try:
                    shard = self._judge(path)
                except (OSError, DatasetError, MemoryError) as error:
                    reason = str(error).removeprefix(f"{path}: ") or "this machine has not the memory to read it"
                    shard = Left(path, f"nothing is known about it: {reason}")
                if isinstance(shard, Left):
                    self.left.append(shard)
                else:
                    shards.append(shard)
            done += path.lstat().st_size
            if progress is not None:
                progress(done, whole)
        return shards

    def _judge(self, path: Path) -> Judged | Left:
        found = Findings(self._directory)
        sha256 = file_sha256(path)
        content = check_content(path, self._manifest, self._check, found)
        if "unreadable" in found.by_kind:
            [first, *_] = (finding for finding in found.kept if finding.kind == "unreadable")
            return Left(path, f"nothing is known about it: {first.problem}")
        totals, keys = (Totals(0, 0, 0), Keys.joined([])) if content is None else (content.totals, content.keys)
        footer = "" if content is None else footer_sha256(path)
        line = JournalLine(path.name, path.stat().st_size, sha256, footer, *totals)
        committed = self._journal.committed.get(path.name, {})
        is_own = _is_own(line, committed)
        vouched = is_own or sha256 in self._journal.hashes
        if found.total:
            first = found.kept[0]
            problem = f"{first.place}: {first.problem}" if first.place else first.problem
            if self._accuses(found, vouched=vouched):
                why = "it is what was committed" if vouched else "nothing vouches for this manifest"
                return Left(path, f"{problem}; yet {why}: manifest, plan or retry list may be wrong")
        elif (keys.steps() == 0).any():
            problem = "holds a sample twice"
        elif not committed or vouched:
            problem = ""
        else:
            problem = "not the file that was committed: its journal line has another SHA-256, and differs in more"
        return Judged(path, line, keys, problem, is_misplaced=bool(committed) and not is_own)

    def _accuses(self, found: Findings, *, vouched: bool) -> bool:
        """Whether it is not the shard that is wrong, or may be.

        A manifest of 1.0 has no checksum: where it and a shard contradict each other it may be damaged itself, and then
        it is so for all shards.
        """
        if "footer" in found.by_kind and not has_generation(self._manifest.format_version):
            return "damaged" not in found.by_kind
        return vouched and found.by_kind.keys() <= _RELATIVE


def _is_own(line: JournalLine, committed: Collection[JournalLine]) -> bool:
    """Whether a line of its own vouches for a file; `line` is what it should have."""
    return any(other.sha256 == line.sha256 or replace(other, sha256=line.sha256) == line for other in committed)


def without_copies(
    shards: Sequence[Judged], journal: JournalLines, first_to_go: Collection[str] = frozenset()
) -> list[Judged]:
    """A sound shard whose samples are all in others is a copy: of several one of `first_to_go`, else one that has the
    name of another, else one without a line, else the one of the later name.

    Shards that share some of their samples stay as they are: which rows to keep is not for a program to say.
    """

    def order(part: tuple[Judged, Int64Array]) -> tuple[bool, bool, bool, str]:
        shard, name = part[0], part[0].path.name
        return name in first_to_go, shard.is_misplaced, name not in journal.committed, name

    sound = [shard for shard in shards if not shard.problem]
    numbers = _numbers(Keys.joined([shard.keys for shard in sound]))
    holders = np.bincount(numbers)
    parts = np.split(numbers, np.cumsum([shard.line.rows for shard in sound], dtype=np.int64))[:-1]
    copies: set[Path] = set()
    for shard, own in sorted(zip(sound, parts, strict=True), key=order, reverse=True):
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
