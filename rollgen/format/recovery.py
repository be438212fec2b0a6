"""What a run finds when it comes back: which shards count, and which samples are therefore done.

Done is what committed, readable shards hold; a file that merely exists proves nothing. For every shard in place:

    with a journal line       the file must have the SHA-256 that the line says. If it has, and the line is wrong
                              elsewhere, it counts; so does a file that has the name of another one, and that has its
    without a journal line    a crash fell between the commit's last two steps: verify it whole, then add the line
    damaged                   retired in the journal and moved to quarantine/; its samples are owed again
    retired, not yet moved    moved: a crash fell in between
    in the journal only       lost; retired, and its samples are owed again

Of a dataset in object storage only the keys are fetched, of every shard; one that is not there, has another size or is
damaged in what was fetched, is retired. What waits in the workspace to be sent gets the next name and its line, and is
sent, unless its samples have been made elsewhere since.

Nothing is deleted. What the machine cannot read, for want of memory or because a disk fails, is neither damaged nor
done: recovery stops there. It stops too at a file that is what was committed and yet makes no sense. A shard of another
writer that is alive is not touched: what it holds is done, with or without a line yet. The caller holds a writer's
slot, and the start section where other writers may be alive and there are shards of strangers (`has_strangers`). Those
of strangers are not hashed by one of several writers, which would do so one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.commit import Fetched, Remote, WriterSlot, quarantine
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
    ShardReader,
    StoredKeys,
    count_mask_ids,
    open_shard,
    read_row_group,
    stored_keys,
    verify_shard,
)
from rollgen.format.retries import RetryList
from rollgen.format.schema import DATA_DIR


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome, with every unusual finding in words for the user."""

    done: npt.NDArray[np.bool_]
    """One flag for each planned sample, in plan order: `offsets[prompt_index] + sample_index`."""
    findings: tuple[str, ...]
    retried: tuple[npt.NDArray[np.bool_], ...]
    """For each of `PlannedKeys.retries`, one flag a row."""


@dataclass(frozen=True, slots=True)
class PlannedKeys:
    """What recovery must know of the plan."""

    sample_offsets: npt.NDArray[np.int64]
    """int64 [prompts + 1]: cumulative samples per prompt."""
    prompt_ids: Callable[[npt.NDArray[np.int64]], pa.Array]
    """The ids of the prompts with these indexes."""
    retries: Sequence[RetryList] = ()
    """Generations 1, 2, ..."""


def has_strangers(slot: WriterSlot, apart: Collection[str]) -> bool:
    """Whether there are shards that are neither this writer's nor of those who are recovered `apart` from it."""
    names = {path.name for path in list_shards(slot.directory)} | read_journal(slot.directory).committed.keys()
    return not {_writer_of(name) for name in names} <= {slot.writer, *apart}


def recover(
    slot: WriterSlot, config_digest: str, planned: PlannedKeys, *, apart: Collection[str] = frozenset()
) -> Recovery:
    """Bring journal and shards into agreement and collect what is done.

    What writers with a name in `apart` have made is passed over: they look after it themselves, and it is nothing that
    this writer could make.

    Raises DatasetError when a sound shard holds a key that was not planned, or one that another shard holds too: such a
    dataset needs a human. Raises Unreadable when the machine fails to read a shard, which stays as it is.
    """
    numbers = [retries.numbers(planned.sample_offsets) for retries in planned.retries]
    done = [np.zeros(size, np.bool_) for size in (int(planned.sample_offsets[-1]), *map(len, planned.retries))]
    findings = recover_shards(
        slot, config_digest, lambda keys, place: _mark_done(done, keys, planned, numbers, place), apart=apart
    )
    return Recovery(done[0], findings, tuple(done[1:]))


def recover_shards(
    slot: WriterSlot,
    config_digest: str,
    mark: Callable[[StoredKeys, Path | str], None],
    *,
    apart: Collection[str] = frozenset(),
) -> tuple[str, ...]:
    """Bring journal and shards into agreement, giving the keys of each sound shard to `mark`. Returns the findings."""
    if slot.remote is not None:
        return _recover_remote(slot, slot.remote, config_digest, mark, apart)
    findings: list[str] = []
    alive = slot.others()
    journal = read_journal(slot.directory)
    shards = list_shards(slot.directory)
    lost = sorted(journal.committed.keys() - {path.name for path in shards})
    for path in [*shards, *(slot.directory / DATA_DIR / name for name in lost)]:
        line, writer = journal.committed.get(path.name), _writer_of(path.name)
        if writer in apart:
            continue
        if writer in alive:
            if path.name not in journal.retired:
                mark(_live_keys(path, line, config_digest), path)
        elif path.name in journal.retired:
            quarantine(slot.directory, path)
        elif path.name in lost:
            slot.retire(journal.committed[path.name])
            findings.append(f"{path}: missing; its samples are owed again")
        else:
            keys = _seen_keys(path, line, config_digest) if apart and writer != slot.writer else None
            keys = _settle(slot, path, journal, config_digest, findings) if keys is None else keys
            if keys is not None:
                mark(keys, path)
    return tuple(findings)


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
    mark: Callable[[StoredKeys, Path | str], None],
    apart: Collection[str],
) -> tuple[str, ...]:
    """`recover_shards` of a dataset in object storage. The shards that are here are this writer's, and wait."""
    committed = read_journal(slot.directory).committed
    lines = [line for name, line in sorted(committed.items()) if _writer_of(name) not in apart]
    findings = _check_remote(slot, remote.fetched(lines, KEY_COLUMNS), slot.others(), config_digest, mark)
    while waiting := list_shards(slot.directory):  # their numbers were taken by what was retired, or are free again
        path = renumber(waiting, slot.writer, remote.next_number)[0]
        findings.append(_send(slot, path, config_digest, mark))
    return tuple(findings)


def _check_remote(
    slot: WriterSlot,
    shards: Iterable[Fetched],
    alive: Collection[str],
    config_digest: str,
    mark: Callable[[StoredKeys, Path | str], None],
) -> list[str]:
    """Give the keys of shards in object storage to `mark`, and retire those that are not what was committed."""
    findings = []
    for shard in shards:
        try:
            keys = _fetched_keys(shard)
        except Unreadable:
            raise
        except DatasetError as error:
            if _writer_of(shard.line.file) in alive:
                raise DatasetError(f"{error}; stop its writer, which is alive, and start again") from error
            slot.retire(shard.line)
            findings.append(f"{error}; its samples are owed again")
            continue
        open_shard(shard.path(), config_digest=config_digest, place=shard.place).close()  # of this dataset, or raises
        mark(keys, shard.place)
    return findings


def _fetched_keys(shard: Fetched) -> StoredKeys:
    path = shard.path()
    if footer_sha256(path) != shard.line.footer_sha256:
        raise DatasetError(f"{shard.place}: the footer is not the one that was committed")
    with open_shard(path, place=shard.place) as reader:
        return stored_keys(reader)


def _send(slot: WriterSlot, path: Path, config_digest: str, mark: Callable[[StoredKeys, Path | str], None]) -> str:
    """Commit a shard that was left in the workspace. Returns the finding."""
    try:
        verify_shard(path, config_digest=config_digest)
        with open_shard(path, config_digest=config_digest) as shard:
            mark(stored_keys(shard), path)
            line = line_of(path, shard)
    except (MissingFile, Unreadable):
        raise
    except DatasetError as error:
        quarantine(slot.directory, path)
        return f"{error}; this shard had not been committed, and is dropped"
    slot.append(line)
    return f"{path.name}: finished, but not committed by the last attempt; verified, sent and added"


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


def _live_keys(path: Path, line: JournalLine | None, config_digest: str) -> StoredKeys:
    try:
        with open_shard(path, line=line, config_digest=config_digest) as shard:
            return stored_keys(shard)
    except DatasetError as error:
        raise DatasetError(f"{error}; stop its writer, which is alive, and start again") from error


def _settle(
    slot: WriterSlot, path: Path, journal: Journal, config_digest: str, findings: list[str]
) -> StoredKeys | None:
    """The keys of a sound shard, which has a line from now on; None for a damaged one, which is moved away."""
    line = journal.committed.get(path.name)
    try:
        if line is None:
            keys = _verified_keys(slot, path, config_digest)
            findings.append(f"{path}: committed without its journal line (a crash); verified and added")
            return keys
        sha256 = _vouched_sha256(path, line, journal)
    except (MissingFile, Unreadable):
        raise
    except DatasetError as error:
        slot.retire(line or _unread_line(path))
        moved = quarantine(slot.directory, path)
        findings.append(f"{error}; moved to {moved.parent.name}/, its samples are owed again")
        return None
    return _committed_keys(path, sha256, line, config_digest, findings)


def _verified_keys(slot: WriterSlot, path: Path, config_digest: str) -> StoredKeys:
    """Those of a shard for which nothing vouches but itself. It gets its line."""
    verify_shard(path, config_digest=config_digest)
    with open_shard(path, config_digest=config_digest) as shard:
        keys = stored_keys(shard)
        slot.append(line_of(path, shard))
    return keys


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


def line_of(path: Path, shard: ShardReader) -> JournalLine:
    """The journal line that a crash kept from being written, read back from the shard."""
    tokens = mask_ids = 0
    for index in range(len(shard.row_group_rows)):
        table = read_row_group(shard, index, ["response_length", "sampling_mask"])
        tokens += int(table["response_length"].to_numpy().sum())
        mask_ids += count_mask_ids(table)
    return _line(path, rows=sum(shard.row_group_rows), tokens=tokens, mask_ids=mask_ids, footer=footer_sha256(path))


def _unread_line(path: Path) -> JournalLine:
    """A line for a damaged shard that never had one: only its name and bytes are known."""
    return _line(path, rows=0, tokens=0, mask_ids=0, footer="")


def _line(path: Path, *, rows: int, tokens: int, mask_ids: int, footer: str) -> JournalLine:
    return JournalLine(path.name, path.stat().st_size, file_sha256(path), footer, rows, tokens, mask_ids)


def _mark_done(
    done: Sequence[npt.NDArray[np.bool_]],
    keys: StoredKeys,
    planned: PlannedKeys,
    numbers: Sequence[npt.NDArray[np.int64]],
    place: Path | str,
) -> None:
    """Set the flags of a shard's rows; `done` and `numbers` are by generation, `numbers` without generation 0.

    Sets none of them when it raises.
    """
    index, sample, offsets = keys.prompt_index, keys.sample_index, planned.sample_offsets
    known = (index >= 0) & (index < len(offsets) - 1)
    known[known] &= (sample[known] >= 0) & (sample[known] < np.diff(offsets)[index[known]])
    if known.all():
        known = pc.equal(keys.prompt_id, planned.prompt_ids(index)).to_numpy()
    _refuse_unknown(known, keys, place)
    found: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]] = []
    for generation in np.unique(keys.generation):
        rows = np.flatnonzero(keys.generation == generation)
        places = offsets[index[rows]] + sample[rows]
        if generation != 0:
            known[rows], places = _places(numbers, int(generation), places)
            _refuse_unknown(known, keys, place)
        flags = done[generation]
        if flags[places].any() or len(np.unique(places)) != len(places):
            raise DatasetError(f"{place}: holds samples that are stored already; remove one of the two copies")
        found.append((flags, places))
    for flags, places in found:
        flags[places] = True


def _places(
    numbers: Sequence[npt.NDArray[np.int64]], generation: int, wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Whether samples are in the list of this generation, and where."""
    listed = numbers[generation - 1] if 0 < generation <= len(numbers) else np.empty(0, np.int64)
    places = np.searchsorted(listed, wanted)
    found = places < len(listed)
    found[found] = listed[places[found]] == wanted[found]
    return found, places


def _refuse_unknown(known: npt.NDArray[np.bool_], keys: StoredKeys, place: Path | str) -> None:
    if not known.all():
        row = int(known.argmin())
        again = f" again in generation {keys.generation[row]}" if keys.generation[row] else ""
        key = f"({keys.prompt_id[row]}, {keys.sample_index[row]})"
        raise DatasetError(f"{place}: row {row}: {key} is not in the plan{again}")
