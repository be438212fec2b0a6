"""What a writer does about those before it, in the start section, so that nothing finished is lost or made twice.

Commits of a writer are numbered without a gap, and each creates `journal/<writer>-<number>.jsonl` exclusively: only who
has seen all commits before it can make the next one, and another process of that name fails. A writer that was taken
for dead by its silence may come back to commit what it had in hand, so its next number is taken away from it: a *fence*
is a journal object that retires the shard of that number, whether it is ever there.

What the dead had finished goes on as shards that wait in the workspace, under the next numbers of this writer:

    in the workspace          not sent before the machine or the storage failed; dropped when another process has since
                              committed under its number, or (by recovery) made its samples again
    in the store              sent, and killed before the journal object; fetched, unless it is in the workspace too
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollgen.errors import ResumeRefused
from rollgen.format.commit import Holder, Part
from rollgen.format.journal import (
    Journal,
    JournalLine,
    file_sha256,
    list_shards,
    parse_shard_name,
    read_journal,
    shard_name,
)
from rollgen.format.jsonlines import encode_line
from rollgen.format.layout import CARD_FILE, is_own
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, MANIFEST_FILE
from rollgen.remote.lease import State, Watch, lock_name, writer_of_lock
from rollgen.remote.mirror import Mirror
from rollgen.remote.objects import ObjectStore

_JOURNAL_OBJECT: Final = re.compile(rf"{JOURNAL_DIR}/(?P<writer>[A-Za-z0-9_]+)-(?P<number>[0-9]{{6,18}})\.jsonl")


def journal_object(writer: str, number: int) -> str:
    """Name of the object of a writer's commit."""
    return f"{JOURNAL_DIR}/{writer}-{number:06d}.jsonl"


@dataclass(slots=True)
class Arrival:
    """One start of a writer."""

    store: ObjectStore
    directory: Path
    writer: str
    part: Part
    mirror: Mirror
    watch: Watch
    note: Callable[[str], None]
    others: dict[str, Holder] = field(default_factory=dict)
    """Writers that are alive, or may be and make other prompts."""
    fences: frozenset[str] = frozenset()
    """Names of the objects that were made to keep others from coming back."""
    _names: Collection[str] = ()
    """Of all objects."""

    def settle(self, *, silent: bool) -> int:
        """Leave shards that wait in the workspace, and return the number of the first of them: the next commit's.

        `silent`: this writer's lock was that of a process that may come back. Raises ResumeRefused when a writer is
        alive that makes some of the same prompts.
        """
        self._look()
        silent_others = self._dead_by_silence()
        journal = self._journal()
        begun = MANIFEST_FILE in self._names
        orphans = self._orphans(journal) if begun else {}
        waiting = self._waiting(journal) if begun else self._dropped()
        fenced = {*silent_others, *(orphans.keys() - {self.writer})}
        if silent or self._contradicts(orphans.get(self.writer, []), waiting, journal):
            fenced.add(self.writer)
        self.fences = frozenset(
            self._fence(writer, self._next_number(writer, journal), orphans.get(writer, [])) for writer in fenced
        )
        if fenced:
            self._look()
            journal = self._journal()
        number = self._next_number(self.writer, journal)
        self._place(number, waiting, orphans)
        return number

    def _look(self) -> None:
        self._names = self.store.list().keys()
        self.mirror.pull(self._names)

    def _journal(self) -> Journal:
        return read_journal(self.directory)

    def _dead_by_silence(self) -> list[str]:
        """Writers that could make the same prompts and have not been heard of, after waiting for them."""
        silent = []
        names = {writer: name for name in self._names if (writer := writer_of_lock(name)) not in (None, self.writer)}
        for name in names.values():
            self.watch.look(name)  # all at once: waiting for one is waiting for all
        for writer, name in names.items():
            assert writer is not None
            state, sign = self.watch.look(name)
            if self.part.conflicts(sign.holder.part):
                state, sign = self.watch.settle(name, self.note)
                if state is State.ALIVE:
                    raise ResumeRefused(
                        f"{self.store.url}: writer {writer!r} is alive and makes part {sign.holder.part} of the "
                        f"prompts, which part {self.part} of writer {self.writer!r} does not go with; wait for it, or "
                        "stop it"
                    )
                if state is State.SILENT:
                    silent.append(writer)
            elif state in (State.ALIVE, State.UNKNOWN):
                self.others[writer] = sign.holder
        return silent

    def _orphans(self, journal: Journal) -> dict[str, list[str]]:
        """Shards without a journal line, by their writers; not of those who look after them themselves."""
        orphans = defaultdict(list)
        for name in self._names:
            folder, _, file = name.partition("/")
            shard = parse_shard_name(file) if folder == DATA_DIR else None
            if shard is None or file in journal.committed or file in journal.retired:
                continue
            if shard[0] == self.writer or not self._looks_after_itself(shard[0]):
                orphans[shard[0]].append(file)
        return dict(orphans)

    def _looks_after_itself(self, writer: str) -> bool:
        """Whether another writer is alive, or has left a lock that says that its prompts are none of ours."""
        state, sign = self.watch.look(lock_name(writer))
        return writer in self.others or (state is not State.GONE and not self.part.conflicts(sign.holder.part))

    def _waiting(self, journal: Journal) -> list[Path]:
        """Shards in the workspace that are still to be sent, in order. The others are removed."""
        number = self._next_number(self.writer, journal)
        waiting, useless = [], 0
        for path in list_shards(self.directory):
            line = journal.committed.get(path.name)
            if line is not None and file_sha256(path) == line.sha256:
                path.unlink()  # it has been sent
            elif parse_shard_name(path.name) == (self.writer, number):
                waiting.append(path)
                number += 1
            else:
                path.unlink()
                useless += 1
        if useless:
            self.note(
                f"{self.store.url}: shards that this machine had not sent are dropped: {useless}; the run has gone on "
                "without them, and has made their samples again or owes them"
            )
        return waiting

    def _dropped(self) -> list[Path]:
        """What waits for a dataset that is not there any more."""
        for path in list_shards(self.directory):
            path.unlink()
        return []

    def _contradicts(self, orphans: Sequence[str], waiting: Sequence[Path], journal: Journal) -> bool:
        """Whether the store has, under a name that is ours, something else than what is to be sent next under it."""
        expected = shard_name(self.writer, self._next_number(self.writer, journal))
        if not orphans or list(orphans) != [expected]:
            return bool(orphans)
        return bool(waiting) and not self.store.is_same(waiting[0], f"{DATA_DIR}/{expected}")

    def _fence(self, writer: str, number: int, orphans: Iterable[str]) -> str:
        """Keep a writer from its next commit. Returns the name of the object that does."""
        while True:
            names = sorted({*orphans, shard_name(writer, number)})
            lines = [JournalLine(name, 0, "", "", 0, 0, 0, retired=True) for name in names]
            fence = journal_object(writer, number)
            if self.store.create(fence, b"".join(map(encode_line, lines))):
                return fence
            number += 1  # it has committed meanwhile

    def _next_number(self, writer: str, journal: Journal) -> int:
        """Past all commits, also those of a dataset that was copied here from a directory."""
        objects = (_JOURNAL_OBJECT.fullmatch(name) for name in self._names)
        numbers = [int(match["number"]) for match in objects if match and match["writer"] == writer]
        shards = (parse_shard_name(name) for name in (*journal.committed, *journal.retired))
        numbers += [shard[1] for shard in shards if shard and shard[0] == writer]
        return 1 + max(numbers, default=-1)

    def _place(self, number: int, waiting: Sequence[Path], orphans: dict[str, list[str]]) -> None:
        """Give what waits its numbers, and fetch what has to."""
        here = {path.name for path in waiting}
        fetched = [name for _, names in sorted(orphans.items()) for name in names if name not in here]
        data = self.directory / DATA_DIR
        for place, path in reversed([*enumerate(waiting, number)]):  # the last first: numbers only rise
            path.rename(data / shard_name(self.writer, place))
        for place, name in enumerate(fetched, number + len(waiting)):
            self.store.download(f"{DATA_DIR}/{name}", data / shard_name(self.writer, place))


def foreign_objects(names: Collection[str]) -> list[str]:
    """Objects that no dataset has."""
    of_run = any(name.startswith(f"{JOURNAL_DIR}/") for name in names)
    return [
        name
        for name in names
        if not (is_own(name) or (name.startswith(f"{JOURNAL_DIR}/") and name.endswith(".lock")))
        or (name == CARD_FILE and not of_run)
    ]
