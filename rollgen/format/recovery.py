"""What a run finds when it comes back: which shards count, and which samples are therefore done.

Done is what committed, readable shards hold; a file that merely exists proves nothing. For every shard in place:

    with a journal line       the file must have the size and the SHA-256 that the line says
    without a journal line    a crash fell between the commit's last two steps: verify it whole, then add the line
    damaged                   retired in the journal and moved to quarantine/; its samples are owed again
    retired, not yet moved    moved: a crash fell in between
    in the journal only       lost; retired, and its samples are owed again

Nothing is deleted. The caller holds the writer's slot, and no other writer of the run is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import DatasetError
from rollgen.format.commit import (
    JournalLine,
    WriterSlot,
    file_sha256,
    footer_sha256,
    list_shards,
    quarantine,
    read_journal,
)
from rollgen.format.reader import (
    ShardReader,
    StoredKeys,
    open_shard,
    read_row_group,
    stored_keys,
    verify_shard,
)
from rollgen.format.schema import DATA_DIR


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome, with every unusual finding in words for the user."""

    done: npt.NDArray[np.bool_]
    """One flag for each planned sample, in plan order: `offsets[prompt_index] + sample_index`."""
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedKeys:
    """What recovery must know of the plan."""

    sample_offsets: npt.NDArray[np.int64]
    """int64 [prompts + 1]: cumulative samples per prompt."""
    prompt_ids: Callable[[npt.NDArray[np.int64]], pa.Array]
    """The ids of the prompts with these indexes."""


def recover(slot: WriterSlot, config_digest: str, planned: PlannedKeys) -> Recovery:
    """Bring journal and shards into agreement and collect what is done.

    Raises DatasetError when a sound shard holds a key that was not planned, or one that another shard holds too: such a
    dataset needs a human.
    """
    findings: list[str] = []
    done = np.zeros(int(planned.sample_offsets[-1]), np.bool_)
    journal = read_journal(slot.directory)
    shards = list_shards(slot.directory)
    for path in shards:
        if path.name in journal.retired:
            quarantine(slot.directory, path)
            continue
        line = journal.committed.get(path.name)
        try:
            keys = _trusted_keys(slot, path, line, config_digest)
        except DatasetError as error:
            slot.retire(line or _unread_line(path))
            moved = quarantine(slot.directory, path)
            findings.append(f"{error}; moved to {moved.parent.name}/, its samples are owed again")
            continue
        if line is None:
            findings.append(f"{path}: committed without its journal line (a crash); verified and added")
        _mark_done(done, keys, planned, path)
    for name in sorted(journal.committed.keys() - {path.name for path in shards}):
        slot.retire(journal.committed[name])
        findings.append(f"{slot.directory / DATA_DIR / name}: missing; its samples are owed again")
    return Recovery(done, tuple(findings))


def _trusted_keys(slot: WriterSlot, path: Path, line: JournalLine | None, config_digest: str) -> StoredKeys:
    if line is None:
        verify_shard(path, config_digest=config_digest)
    elif file_sha256(path) != line.sha256:
        raise DatasetError(f"{path}: its SHA-256 is not the journal's: damaged since it was committed")
    with open_shard(path, line=line, config_digest=config_digest) as shard:
        keys = stored_keys(shard)
        if line is None:
            slot.append(_line_of(path, shard))
    return keys


def _line_of(path: Path, shard: ShardReader) -> JournalLine:
    """The journal line that a crash kept from being written, read back from the shard."""
    tokens = mask_ids = 0
    for index in range(len(shard.row_group_rows)):
        table = read_row_group(shard, index, ["response_length", "sampling_mask"])
        tokens += int(table["response_length"].to_numpy().sum())
        mask_ids += sum(len(chunk.flatten().flatten()) for chunk in table["sampling_mask"].chunks)
    return _line(path, rows=sum(shard.row_group_rows), tokens=tokens, mask_ids=mask_ids, footer=footer_sha256(path))


def _unread_line(path: Path) -> JournalLine:
    """A line for a damaged shard that never had one: only its name and bytes are known."""
    return _line(path, rows=0, tokens=0, mask_ids=0, footer="")


def _line(path: Path, *, rows: int, tokens: int, mask_ids: int, footer: str) -> JournalLine:
    return JournalLine(path.name, path.stat().st_size, file_sha256(path), footer, rows, tokens, mask_ids)


def _mark_done(done: npt.NDArray[np.bool_], keys: StoredKeys, planned: PlannedKeys, path: Path) -> None:
    index, sample, offsets = keys.prompt_index, keys.sample_index, planned.sample_offsets
    known = (index >= 0) & (index < len(offsets) - 1)
    known[known] &= (sample[known] >= 0) & (sample[known] < np.diff(offsets)[index[known]])
    if known.all():
        known = pc.equal(keys.prompt_id, planned.prompt_ids(index)).to_numpy()
    if not known.all():
        row = int(known.argmin())
        raise DatasetError(f"{path}: row {row}: ({keys.prompt_id[row]}, {sample[row]}) is not in the plan")
    positions = offsets[index] + sample
    if done[positions].any() or len(np.unique(positions)) != len(positions):
        raise DatasetError(f"{path}: holds samples that are stored already; remove one of the two copies")
    done[positions] = True
