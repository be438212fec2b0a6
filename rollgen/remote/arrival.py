"""What a writer does about those before it, in the start section, so that nothing finished is lost or made twice.

Commits of a writer are numbered without a gap, and each creates `journal/<writer>-<number>.jsonl` exclusively: only who
has seen all commits before it can make the next one, and another process of that name fails. A writer that was taken
for dead by its silence may come back to commit what it had in hand, so its next number is taken away from it: a *fence*
is a journal object that retires the shard of that number, whether it is ever there. Its lock is removed then.

What the dead had finished counts:

    in the store              sent, and killed before the journal object: verified, its rows too, and committed in its
                              writer's place and name, so that all who start see that its samples are there. One that
                              holds samples which are stored elsewhere is retired, and a copy of it waits as below.
                              While the plan cannot be read, all are left to the next start
    in the workspace          not sent before the machine or the storage failed: waits there, for recovery to send what
                              is new in it under the next numbers of this writer; set aside if there is no dataset
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable
from rollgen.format.adoption import Adopted, PlanUnreadable, adopt
from rollgen.format.commit import Fetched, Part
from rollgen.format.done import Problem
from rollgen.format.files import fsync_file
from rollgen.format.journal import (
    Journal,
    JournalLine,
    file_sha256,
    list_shards,
    parse_shard_name,
    read_journal,
    shard_name,
)
from rollgen.format.jsonlines import encode_line, parse_object
from rollgen.format.layout import CARD_FILE, is_own
from rollgen.format.manifest import fsync_directory, read_manifest
from rollgen.format.reader import KEY_COLUMNS, StoredKeys, open_shard, stored_keys
from rollgen.format.recovery import renumber
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, MANIFEST_FILE
from rollgen.remote.lease import SECTION_LOCK, State, Watch, lock_name, taken, writer_of_lock
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
    fetched: Callable[[Sequence[JournalLine], Sequence[str]], Iterator[Fetched]]
    """Shards of the store: `format.commit.Remote.fetched`."""
    set_aside: Callable[[Path], Path]
    """See `format.commit.Remote`."""
    problem_in: Callable[[Path], Problem]
    """That of the dataset whose small files are in a directory."""
    clean: bool = False
    """What is there will be replaced: nothing of it is worth a look."""
    _names: Collection[str] = ()
    """Of all objects."""

    def await_others(self) -> None:
        """Wait until it is known who is alive, before the start section, where everybody would wait too.

        Raises ResumeRefused when a writer is alive that has this name, or makes some of the same prompts.
        """
        self._names = self.store.list(JOURNAL_DIR).keys()
        for name in (SECTION_LOCK, lock_name(self.writer)):
            self.watch.look(name)  # all at once: waiting for one is waiting for all
        self._dead_rivals()
        if self.watch.settle(lock_name(self.writer), self.note)[0] is State.ALIVE:
            raise taken(self.store, lock_name(self.writer))

    def settle(self, *, silent: bool) -> int:
        """Leave shards that wait in the workspace, and return the number of the next commit, and of the first of them.

        `silent`: this writer's lock was that of a process that may come back. Raises ResumeRefused when a writer is
        alive that makes some of the same prompts.
        """
        self._look()
        dead = self._dead_rivals()
        begun = MANIFEST_FILE in self._names
        journal = read_journal(self.directory)
        orphans = self._orphans(journal) if begun and not self.clean else {}
        fenced = {writer for writer, state in dead.items() if state is State.SILENT}
        if silent:
            fenced.add(self.writer)
        lines = self._judged(orphans, journal)
        left = {file for files in orphans.values() for file in files if file not in lines}
        for writer in sorted({*orphans, *fenced}):
            number, retired = self._next_number(writer, journal), []
            for file in orphans.get(writer, []):
                if file in left:
                    continue
                if (line := lines[file]) is None:
                    retired.append(file)
                else:  # where there is another object by now, it has committed meanwhile
                    self.store.create(journal_object(writer, number), encode_line(line))
                    number += 1
            if retired or writer in fenced:
                self._fence(writer, number, retired, left)
        for writer in dead:
            self.store.delete(lock_name(writer))
        if orphans or fenced:
            self._look()
            journal = read_journal(self.directory)
        number = max(self._next_number(self.writer, journal), self._behind(left))
        renumber(self._waiting(journal if begun else None), self.writer, number)
        return number

    def _look(self) -> None:
        self._names = self.store.list().keys()
        self.mirror.pull(self._names)

    def _dead_rivals(self) -> dict[str, State]:
        """Writers that could make the same prompts and have left a lock, after waiting for a sign of theirs.

        DEAD, or SILENT. Raises ResumeRefused for one that is alive.
        """
        locks = {name: writer for name in self._names if (writer := writer_of_lock(name)) not in (None, self.writer)}
        rivals = [name for name in locks if self.part.conflicts(self.watch.look(name)[1].holder.part)]
        dead: dict[str, State] = {}
        for name in rivals:
            writer = locks[name]
            state, sign = self.watch.settle(name, self.note)
            if state is State.ALIVE and self.part.conflicts(sign.holder.part):
                raise ResumeRefused(
                    f"{self.store.url}: writer {writer!r} is alive and makes part {sign.holder.part} of the prompts, "
                    f"which part {self.part} of writer {self.writer!r} does not go with; wait for it, or stop it"
                )
            if writer is not None and state in (State.DEAD, State.SILENT):
                dead[writer] = state
        return dead

    def _orphans(self, journal: Journal) -> dict[str, list[str]]:
        """Shards without a journal line, by their writers; not of those who look after them themselves."""
        orphans = defaultdict(list)
        for name in sorted(self._names):
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
        return state is not State.GONE and not self.part.conflicts(sign.holder.part)

    def _judged(self, orphans: dict[str, list[str]], journal: Journal) -> dict[str, JournalLine | None]:
        """The line of each shard that is to be committed, None for one to be retired; nothing without a plan."""
        if not orphans:
            return {}
        try:
            adoption = _Adoption(self, journal)
            lines = {file: adoption.line(file) for files in orphans.values() for file in files}
        except PlanUnreadable as error:
            count, problem = sum(map(len, orphans.values())), str(error).replace(str(self.directory), self.store.url)
            self.note(f"{problem}; shards that are finished and not committed are left to the next start: {count}")
            return {}
        for note in adoption.notes:
            self.note(note)
        return lines

    def _waiting(self, journal: Journal | None) -> list[Path]:
        """Shards in the workspace that are still to be sent. Those that were are removed."""
        waiting = []
        for path in list_shards(self.directory):
            line = journal and journal.committed.get(path.name)
            if line is not None and file_sha256(path) == line.sha256:
                path.unlink()
            elif journal is None and not self.clean:
                self.note(
                    f"{self.store.url}: holds no run, though a finished shard waits for it on this machine; it is kept "
                    f"in {self.set_aside(path)}"
                )
            else:
                waiting.append(path)
        return waiting

    def _fence(self, writer: str, number: int, others: Sequence[str], left: Collection[str]) -> None:
        """Keep a writer from its next commit, and retire other shards of it, but none that is `left`.

        It is the object's name that keeps it from that.
        """
        while True:
            own = next(name for at in itertools.count(number) if (name := shard_name(writer, at)) not in left)
            names = sorted({*others, own})
            lines = [JournalLine(name, 0, "", "", 0, 0, 0, retired=True) for name in names]
            if self.store.create(journal_object(writer, number), b"".join(map(encode_line, lines))):
                return
            number += 1  # it has committed meanwhile

    def free_name(self, journal: Journal) -> str:
        """A name for one more shard that waits here."""
        behind = self._behind(path.name for path in list_shards(self.directory))
        return shard_name(self.writer, max(behind, self._next_number(self.writer, journal)))

    def _behind(self, names: Iterable[str]) -> int:
        """The first number past those that these shards have of this writer."""
        shards = map(parse_shard_name, names)
        return 1 + max((shard[1] for shard in shards if shard and shard[0] == self.writer), default=-1)

    def _next_number(self, writer: str, journal: Journal) -> int:
        """Past all commits, also those of a dataset that was copied here from a directory."""
        objects = (_JOURNAL_OBJECT.fullmatch(name) for name in self._names)
        numbers = [int(match["number"]) for match in objects if match and match["writer"] == writer]
        shards = (parse_shard_name(name) for name in (*journal.committed, *journal.retired))
        numbers += [shard[1] for shard in shards if shard and shard[0] == writer]
        return 1 + max(numbers, default=-1)


class _Adoption:
    """What becomes of shards in the store that have no line. Raises PlanUnreadable when that cannot be told."""

    def __init__(self, arrival: Arrival, journal: Journal) -> None:
        self.notes: list[str] = []
        """What a user should know, once it is so."""
        self._arrival = arrival
        self._journal = journal
        self._digest = read_manifest(arrival.directory).config_digest
        try:
            self._problem = arrival.problem_in(arrival.directory)
        except Unreadable:
            raise
        except DatasetError as error:
            raise PlanUnreadable(str(error)) from error
        self._stored = _stored_keys(arrival.fetched([*journal.committed.values()], KEY_COLUMNS))

    def line(self, file: str) -> JournalLine | None:
        """That of a shard which is to be committed; None for one to be retired, of which a copy may wait then."""
        arrival, place = self._arrival, f"{self._arrival.store.url}/{DATA_DIR}/{file}"
        path = arrival.directory / DATA_DIR / f".tmp-orphan-{file}"
        try:
            keys, line = self._read(file, path, place)
            if self._overlaps(keys):
                fsync_file(path)  # it is the only copy that counts, once the other one is retired
                path.rename(path.with_name(arrival.free_name(self._journal)))
                fsync_directory(path.parent)
                self.notes.append(f"{place}: finished, but not committed, and some of it has been stored since")
                return None
        except (MissingFile, Unreadable):
            raise
        except DatasetError as error:
            self.notes.append(f"{error}; this shard had not been committed, and is retired")
            return None
        finally:
            path.unlink(missing_ok=True)
        self.notes.append(f"{place}: finished, but not committed by the last attempt; verified and added")
        return replace(line, file=file)

    def _read(self, file: str, path: Path, place: str) -> Adopted:
        """Fetch and verify a shard; a second time before it counts as damaged."""
        self._arrival.store.download(f"{DATA_DIR}/{file}", path)
        try:
            return adopt(path, self._digest, self._problem, place)
        except Unreadable:
            raise
        except DatasetError:
            self._arrival.store.download(f"{DATA_DIR}/{file}", path)
            return adopt(path, self._digest, self._problem, place)

    def _overlaps(self, keys: StoredKeys) -> bool:
        """Whether one of these samples is stored; if none is, all count as stored from now on."""
        wanted = _named(keys)
        if len(set(wanted)) < len(wanted) or not self._stored.isdisjoint(wanted):
            return True
        self._stored.update(wanted)
        return False


def _stored_keys(shards: Iterable[Fetched]) -> set[tuple[int, int, int]]:
    """Keys of all that is sound; recovery will see to the rest."""
    stored: set[tuple[int, int, int]] = set()
    for shard in shards:
        try:
            with open_shard(shard.path(), place=shard.place) as reader:
                stored.update(_named(stored_keys(reader)))
        except Unreadable:
            raise
        except DatasetError:
            continue
    return stored


def _named(keys: StoredKeys) -> list[tuple[int, int, int]]:
    return [*zip(keys.prompt_index.tolist(), keys.sample_index.tolist(), keys.generation.tolist(), strict=True)]


def is_journal_object(name: str) -> bool:
    """Whether this is the name of a commit, or of a fence."""
    return _JOURNAL_OBJECT.fullmatch(name) is not None


def is_retirement(content: bytes) -> bool:
    """Whether a journal object takes shards out and commits none."""
    try:
        return all(parse_object(line).get("retired") is True for line in content.splitlines())
    except ValueError:
        return False


def foreign_objects(names: Collection[str]) -> list[str]:
    """Objects that no dataset has."""
    of_run = any(name.startswith(f"{JOURNAL_DIR}/") for name in names)
    return [
        name
        for name in names
        if not (is_own(name) or (name.startswith(f"{JOURNAL_DIR}/") and name.endswith(".lock")))
        or (name == CARD_FILE and not of_run)
    ]
