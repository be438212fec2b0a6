"""What a run finds when it comes back: which shards count, and which samples are therefore done.

Done is what committed, readable shards hold; a file that merely exists proves nothing. For every shard in place:

    with a journal line       the file must have the SHA-256 that the line says. If it has, and the line is wrong
                              elsewhere, it counts; so does a file that has the name of another one, and that has its
    without a journal line    a crash fell between the commit's last two steps: verify it whole, its rows against the
                              plan too, then add the line. Where others have stored some of its samples since, the
                              rest becomes a shard of this writer, and it is retired and moved to quarantine/; a part
                              does that only for a rest of its own: one of other parts is left to them, and one of its
                              own and others is refused
    damaged, or not of this   retired in the journal and moved to quarantine/; its samples are owed again
    dataset
    retired, not yet moved    moved: a crash fell in between
    in the journal only       lost; retired, and its samples are owed again

Of a dataset in object storage only the keys are fetched, of every shard; one that is not there, has another size or is
damaged in what was fetched, is listed and fetched a second time, because a storage may err, and then retired. What
waits in the workspace to be sent is verified as above, gets the next name and its line, and is sent without what has
been stored elsewhere since or is of other parts; what is damaged or not of this dataset, and the whole of what holds
unstored samples of other parts, is set aside on this machine.

Nothing is deleted. What the machine cannot read, for want of memory or because a disk fails, is neither damaged nor
done: recovery stops there. It stops too at a file that is what was committed and yet makes no sense. A shard of another
writer that is alive is not touched: what it holds is done, with or without a line yet. The caller holds a writer's
slot, and the start section where other writers may be alive and there are shards of strangers (`has_strangers`). Those
of strangers are not hashed by one of several writers, which would do so one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rollgen.errors import DatasetError, MissingFile, ResumeRefused, Unreadable
from rollgen.format.adoption import adopt, write_rows
from rollgen.format.commit import Fetched, Part, Remote, WriterSlot, quarantine
from rollgen.format.done import Bools, PlannedKeys, PlannedSamples, StoredSamples
from rollgen.format.journal import (
    Journal,
    JournalLine,
    file_sha256,
    footer_sha256,
    list_shards,
    parse_shard_name,
    read_journal,
    shard_name,
)
from rollgen.format.parquet import translated
from rollgen.format.reader import (
    KEY_COLUMNS,
    StoredKeys,
    open_shard,
    stored_keys,
)
from rollgen.format.schema import DATA_DIR


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome, with every unusual finding in words for the user."""

    done: npt.NDArray[np.bool_]
    """One flag for each planned sample, in plan order: `offsets[prompt_index] + sample_index`."""
    findings: tuple[str, ...]
    retried: tuple[npt.NDArray[np.bool_], ...]
    """For each of `PlannedKeys.retries`, one flag a row."""


def has_strangers(slot: WriterSlot, apart: Collection[str]) -> bool:
    """Whether there are shards that are neither this writer's nor of those who are recovered `apart` from it."""
    names = {path.name for path in list_shards(slot.directory)} | read_journal(slot.directory).committed.keys()
    return not {_writer_of(name) for name in names} <= {slot.writer, *apart}


def recover(
    slot: WriterSlot, config_digest: str, planned: PlannedKeys, *, apart: Collection[str] = frozenset()
) -> Recovery:
    """Bring journal and shards into agreement and collect what is done.

    What writers with a name in `apart` have made is passed over: they look after it themselves, and it is nothing that
    this writer could make. It is looked at only where strangers have left shards without a line.

    Raises DatasetError when a committed shard holds a key that was not planned, or one that another one holds too: such
    a dataset needs a human. Raises Unreadable when the machine fails to read a shard, which stays as it is, and
    ResumeRefused for one whose rest only a writer of all prompts may add.
    """
    samples = PlannedSamples(planned)
    findings = recover_shards(slot, config_digest, samples, apart=apart)
    return Recovery(samples.done[0], findings, tuple(samples.done[1:]))


def recover_shards(
    slot: WriterSlot, config_digest: str, samples: StoredSamples, *, apart: Collection[str] = frozenset()
) -> tuple[str, ...]:
    """Bring journal and shards into agreement, and mark the samples of each sound shard. Returns the findings."""
    if slot.remote is not None:
        return _recover_remote(slot, slot.remote, config_digest, samples, apart)
    findings: list[str] = []
    alive = slot.others()
    journal = read_journal(slot.directory)
    shards = list_shards(slot.directory)
    lost = sorted(journal.committed.keys() - {path.name for path in shards})
    places = [*shards, *(slot.directory / DATA_DIR / name for name in lost)]
    unvouched: list[Path] = []
    for path in places:
        line, writer = journal.committed.get(path.name), _writer_of(path.name)
        if writer in apart:
            continue
        if writer in alive:
            if path.name not in journal.retired:
                fix = "stop its writer, which is alive, and start again"
                samples.mark(_keys_or(fix, path, line, config_digest), path)
        elif path.name in journal.retired:
            quarantine(slot.directory, path)
        elif line is None:
            unvouched.append(path)
        elif path.name in lost:
            slot.retire(line)
            findings.append(f"{path}: missing; its samples are owed again")
        else:
            keys = _seen_keys(path, line, config_digest) if apart and writer != slot.writer else None
            keys = _settle(slot, path, line, journal, config_digest, findings) if keys is None else keys
            if keys is not None:
                samples.mark(keys, path)
    if apart and any(_writer_of(path.name) != slot.writer for path in unvouched):
        siblings = [path for path in places if _writer_of(path.name) in apart]
        _mark_siblings(siblings, journal, alive, config_digest, samples)
    # now it is known what is new
    return (*findings, *(_adopt(slot, path, config_digest, samples, apart) for path in unvouched))


def _mark_siblings(
    shards: Iterable[Path], journal: Journal, alive: Collection[str], config_digest: str, samples: StoredSamples
) -> None:
    """What is committed of other parts is stored. Where a dead one's line is missing, that part will see to it."""
    for path in shards:
        line, is_alive = journal.committed.get(path.name), _writer_of(path.name) in alive
        if path.name not in journal.retired and (line is not None or is_alive):
            fix = "stop its writer, which is alive, and start again" if is_alive else "continue its part first"
            samples.mark(_keys_or(fix, path, line, config_digest), path)


def renumber(shards: Iterable[Path], writer: str, first: int) -> list[Path]:
    """Give shards that wait to be sent the names of a writer from `first` on, in order. Returns where they are then."""
    waiting = sorted(shards, key=lambda path: _number_of(path.name))
    targets = [path.with_name(shard_name(writer, number)) for number, path in enumerate(waiting, first)]
    moves = [*zip(waiting, targets, strict=True)]
    up = [(path, target) for path, target in moves if _number_of(path.name) < _number_of(target.name)]
    for path, target in (*reversed(up), *moves[len(up) :]):  # so that each finds its place free: as numbers only grow
        path.rename(target)  # apart, those that go up are the first ones
    return targets


def _recover_remote(
    slot: WriterSlot,
    remote: Remote,
    config_digest: str,
    samples: StoredSamples,
    apart: Collection[str],
) -> tuple[str, ...]:
    """`recover_shards` of a dataset in object storage. The shards that are here are this writer's, and wait."""
    committed = read_journal(slot.directory).committed
    lines = [line for name, line in sorted(committed.items()) if _writer_of(name) not in apart]
    doubtful = [
        shard.line
        for shard in remote.fetched(lines, KEY_COLUMNS)
        if _mark_fetched(shard, config_digest, samples) is not None
    ]
    findings = _retire_lost(slot, remote.fetched(doubtful, KEY_COLUMNS), config_digest, samples)
    while waiting := list_shards(slot.directory):  # their numbers were taken by what was retired, or are free again
        path = renumber(waiting, slot.writer, remote.next_number)[0]
        findings.append(_send(slot, remote, path, config_digest, samples))
    return tuple(findings)


def _retire_lost(slot: WriterSlot, shards: Iterable[Fetched], config_digest: str, samples: StoredSamples) -> list[str]:
    """Look a second time at shards in object storage, and retire those that are not what was committed."""
    lost, alive = [], slot.others()
    for shard in shards:
        damage = _mark_fetched(shard, config_digest, samples)
        if damage is None:
            continue
        if isinstance(damage, MissingFile) and shard.is_listed:
            raise Unreadable(f"{damage}; yet it is listed: the storage contradicts itself, try again")
        if _writer_of(shard.line.file) in alive:
            raise DatasetError(f"{damage}; stop its writer, which is alive, and start again") from damage
        lost.append((shard.line, damage))
    for line, _ in lost:  # all have been looked at: a storage that errs has changed nothing
        slot.retire(line)
    return [f"{damage}; its samples are owed again" for _, damage in lost]


def _mark_fetched(shard: Fetched, config_digest: str, samples: StoredSamples) -> DatasetError | None:
    """Mark the samples of a shard in object storage, or return why it is not the committed one."""
    try:
        path = shard.path()
        if footer_sha256(path) != shard.line.footer_sha256:
            raise DatasetError(f"{shard.place}: the footer is not the one that was committed")
        with open_shard(path, place=shard.place) as reader:
            keys = stored_keys(reader)
    except Unreadable:
        raise
    except DatasetError as error:
        return error
    open_shard(path, config_digest=config_digest, place=shard.place).close()  # of this dataset, or raises
    samples.mark(keys, shard.place)
    return None


def _send(slot: WriterSlot, remote: Remote, path: Path, config_digest: str, samples: StoredSamples) -> str:
    """Commit a shard that was left in the workspace, or what is new in it. Returns the finding."""
    try:
        keys, line = adopt(path, config_digest, samples.problem)
        located = samples.locate(keys, path)
    except (MissingFile, Unreadable):
        raise
    except DatasetError as error:
        return f"{error}; this shard had not been committed, and is kept in {remote.set_aside(path)}"
    found = f"{path.name}: finished, but not committed by the last attempt"
    unstored, ours = located.new, _of_part(keys, slot.part)
    new, others = unstored & ours, unstored & ~ours
    if not new.any():
        if others.any():
            return f"{found}; not sent{_left_out(unstored, others)}; kept in {remote.set_aside(path)}"
        path.unlink()
        return f"{found}; all of it has been stored since"
    kept = ""
    if not new.all():
        temporary = slot.temporary()
        line = replace(write_rows(path, new, temporary), file=path.name)
        if others.any():  # they may be nowhere else
            kept = f"; all of it is kept in {remote.set_aside(path)}"
        os.replace(temporary, path)
    located.mark(new)
    slot.append(line)
    return f"{found}; verified, sent and added{_left_out(unstored, others)}{kept}"


def _left_out(unstored: Bools, others: Bools) -> str:
    """What is not sent of a shard: what is stored, and what is of other parts."""
    counts = {"stored already": np.count_nonzero(~unstored), "of other parts": np.count_nonzero(others)}
    total = sum(counts.values())
    texts = [f"{count} {text}" for text, count in counts.items() if count]
    return f", without {total} of {len(unstored)} samples: {', '.join(texts)}" if total else ""


def _of_part(keys: StoredKeys, part: Part) -> Bools:
    """bool [N]: which rows are of these prompts."""
    ours: Bools = keys.prompt_index % part.of == part.number
    return ours


def _writer_of(name: str) -> str | None:
    parsed = parse_shard_name(name)
    return parsed and parsed[0]


def _number_of(name: str) -> int:
    parsed = parse_shard_name(name)
    assert parsed is not None
    return parsed[1]


def _seen_keys(path: Path, line: JournalLine | None, config_digest: str) -> StoredKeys | None:
    """Those of a stranger's shard, if it has a line, and size, footer and key columns are as committed; else None.

    It is not hashed: each of a run's parts would hash what strangers have made, one after the other.
    """
    if line is None:
        return None
    try:
        with open_shard(path, line=line, config_digest=config_digest) as shard:
            return stored_keys(shard)
    except (MissingFile, Unreadable):
        raise
    except DatasetError:
        return None


def _keys_or(fix: str, path: Path, line: JournalLine | None, config_digest: str) -> StoredKeys:
    """Those of another writer's shard, which is not ours to mend. Raises DatasetError, with this fix."""
    try:
        with open_shard(path, line=line, config_digest=config_digest) as shard:
            return stored_keys(shard)
    except DatasetError as error:
        raise DatasetError(f"{error}; {fix}") from error


def _settle(
    slot: WriterSlot, path: Path, line: JournalLine, journal: Journal, config_digest: str, findings: list[str]
) -> StoredKeys | None:
    """The keys of a sound shard that was committed; None for a damaged one, which is moved away."""
    try:
        sha256 = _vouched_sha256(path, line, journal)
    except (MissingFile, Unreadable):
        raise
    except DatasetError as error:
        slot.retire(line)
        moved = quarantine(slot.directory, path)
        findings.append(f"{error}; moved to {moved.parent.name}/, its samples are owed again")
        return None
    return _committed_keys(path, sha256, line, config_digest, findings)


def _adopt(slot: WriterSlot, path: Path, config_digest: str, samples: StoredSamples, apart: Collection[str]) -> str:
    """Add the line of a shard that has none, or what is new in it as another shard. Returns the finding.

    That has this writer's name, which those in `apart` pass over: none of it may be theirs.
    """
    try:
        keys, line = adopt(path, config_digest, samples.problem)
        located = samples.locate(keys, path)
    except (MissingFile, Unreadable):
        raise
    except DatasetError as error:
        slot.retire(_unread_line(path))
        moved = quarantine(slot.directory, path)
        return f"{error}; moved to {moved.parent.name}/, its samples are owed again"
    new, found = located.new, f"{path}: committed without its journal line (a crash)"
    if new.all():
        slot.append(line)
        located.mark(new)
        return f"{found}; verified and added"
    rest = f"{np.count_nonzero(new)} of {len(new)} samples"
    if apart and not (ours := _of_part(keys, slot.part))[new].all():
        if not (new & ours).any():
            return f"{found}; {rest} are stored nowhere else, and left to the parts that make them"
        raise ResumeRefused(
            f"{path}: holds finished samples of several parts that no journal line vouches for, of which {rest} are "
            "stored nowhere else; continue once without --shard, which adds them"
        )
    added = f"{rest} were stored nowhere else, and are added as {_commit_rows(slot, path, new)}" if new.any() else ""
    slot.retire(line)
    moved = quarantine(slot.directory, path)
    located.mark(new)
    return f"{found}; {added or 'all of it has been stored since'}; moved to {moved.parent.name}/"


def _commit_rows(slot: WriterSlot, path: Path, rows: Bools) -> str:
    """Make a shard of this writer's of some rows of one that will be retired. Returns its name."""
    temporary = slot.temporary()
    made = write_rows(path, rows, temporary)
    line = slot.publish(temporary, rows=made.rows, tokens=made.tokens, mask_ids=made.mask_ids)
    temporary.unlink()
    slot.append(line)
    return line.file


def _vouched_sha256(path: Path, line: JournalLine, journal: Journal) -> str:
    """Of a file for whose bytes a journal line vouches: its own, or that of another, which is not there any more."""
    sha256 = _sha256(path)
    if sha256 != line.sha256 and not _has_place_of_another(path, sha256, journal):
        raise DatasetError(f"{path}: its SHA-256 is not the journal's: damaged since it was committed")
    return sha256


def _committed_keys(path: Path, sha256: str, line: JournalLine, config_digest: str, findings: list[str]) -> StoredKeys:
    """Those of a file that is what was committed. Raises DatasetError when it cannot be that, and no SHA-256 is chance:

    what else is wrong, perhaps the manifest, is not for a resume to say.
    """
    try:
        with open_shard(path, config_digest=config_digest) as shard:
            keys = stored_keys(shard)
    except (MissingFile, Unreadable):
        raise
    except DatasetError as error:
        raise DatasetError(
            f"{error}; yet it is the very file that was committed: see what `rollgen repair` says"
        ) from None
    known = (line.bytes, line.sha256, line.footer_sha256, line.rows)
    if known != (path.stat().st_size, sha256, footer_sha256(path), len(keys.prompt_index)):
        findings.append(f"{path}: it is what was committed, but its journal line is wrong; `rollgen repair` mends that")
    return keys


def _has_place_of_another(path: Path, sha256: str, journal: Journal) -> bool:
    """Whether a file is one that was committed under another name, which no file has that has these bytes."""
    names = [line.file for line in journal.committed.values() if line.sha256 == sha256]
    others = [place for name in names if (place := path.with_name(name)).exists()]
    return bool(names) and all(_sha256(other) != sha256 for other in others)


def _sha256(path: Path) -> str:
    with translated(str(path), "not readable", "try again"):
        return file_sha256(path)


def _unread_line(path: Path) -> JournalLine:
    """A line for a shard that never had one: only its name and bytes are known."""
    return JournalLine(path.name, path.stat().st_size, file_sha256(path), "", 0, 0, 0)
