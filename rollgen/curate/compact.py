"""`rollgen compact`: many small shards to few, the samples of a prompt together; every row stays as it is.

    look      journal and keys of all rows: which shards are replaced, which rows go where (`layout.py`)
    copy      each new shard under a temporary name, compared with the old ones (`copying.py`)
    switch    one durable record makes the new shards the dataset's (`format/replacement.py`)

Until the record is written nothing has changed, and whatever goes wrong leaves nothing behind; what a kill left, the
next writer removes. After that the replacement is completed, if need be by the next command that writes: readers refuse
the dataset until then. All that takes room was written before, so that a full disk hardly stops it. Nothing is
repaired: a damaged shard is an error. No writer may be alive meanwhile, and none can start. Readers that are at work
then may find their shards gone.

Memory is that of copying, beside the keys (`layout.py`). Disk: the new shards, until the old are gone.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollgen.curate.copying import copy_rows
from rollgen.curate.layout import Index, Layout, plan_layout, read_index
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine, Totals, is_unfinished, totals
from rollgen.format.manifest import Manifest, read_manifest
from rollgen.format.reader import StoredDataset, open_dataset
from rollgen.format.replacement import COMPACTOR, Replacement, complete, decide, prepare_retired
from rollgen.format.schema import RETIRED_DIR

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

SHARD_TOKENS = 8_000_000
"""Generated tokens after which a new shard is closed, by default: some 100 MB."""
MAX_SHARD_TOKENS = 1 << 27
"""Some 2,340 row groups, of the 4,096 that a reader takes (`format/footer.py`)."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """What was done, or would be."""

    shards_before: int
    shards_after: int
    bytes_before: int
    bytes_after: int | None
    """None when nothing was written."""
    replaced: int
    """Old shards; 0 when there is nothing to do."""
    written: int
    """New shards that hold their rows."""
    split_prompts: int
    """Whose rows were in several shards before; they are in one now."""
    rows: int
    """Of the dataset."""
    tokens: int
    """Generated ones."""
    completed_earlier: bool
    """Whether an interrupted compaction was completed first."""


def compact(
    directory: Path, *, shard_tokens: int = SHARD_TOKENS, keep: bool = False, dry_run: bool = False
) -> Compaction:
    """Rewrite small shards, and those that share prompts, as shards of about `shard_tokens` generated tokens.

    With `keep` the old files go to `retired/` instead of being deleted; a `dry_run` changes nothing. Raises
    ResumeRefused while a writer is alive, UsageError when `shard_tokens` is above MAX_SHARD_TOKENS or no lock can be
    had because the directory cannot be written, and DatasetError for damage, when the disk is full, or when `retired/`
    cannot take the files: nothing has changed then, but that a compaction which was interrupted earlier may have been
    completed. Only where the error says that the next command completes it, the new shards are the dataset's by then.
    """
    if shard_tokens > MAX_SHARD_TOKENS:
        raise UsageError(f"shard_tokens: {shard_tokens} is too large for a shard; the limit is {MAX_SHARD_TOKENS}")
    read_manifest(directory)  # a check, before the slot makes directories: another may take its place until then
    if dry_run:
        dataset = open_dataset(directory)
        return _report(*_plan(dataset, shard_tokens), lines=None, completed_earlier=False)
    unfinished = is_unfinished(directory)
    with WriterSlot(directory, COMPACTOR) as slot:
        dataset = open_dataset(directory)
        index, layout = _plan(dataset, shard_tokens)
        lines = _replace(slot, dataset.manifest, index, layout, keep=keep) if layout.replaced else ()
    return _report(index, layout, lines, completed_earlier=unfinished)


def _plan(dataset: StoredDataset, shard_tokens: int) -> tuple[Index, Layout]:
    index = read_index(dataset.shards, dataset.manifest.optional_columns)
    return index, plan_layout(index, shard_tokens=shard_tokens, planned=not dataset.manifest.is_planless)


def _report(
    index: Index, layout: Layout, lines: tuple[JournalLine, ...] | None, *, completed_earlier: bool
) -> Compaction:
    old = index.lines
    before = sum(line.bytes for line in old)
    written = None if lines is None else sum(line.bytes for line in lines)
    return Compaction(
        shards_before=len(old),
        shards_after=len(old) - len(layout.replaced) + len(layout.shards),
        bytes_before=before,
        bytes_after=None if written is None else before - sum(old[each].bytes for each in layout.replaced) + written,
        replaced=len(layout.replaced),
        written=len(layout.shards),
        split_prompts=layout.split_prompts,
        rows=sum(line.rows for line in old),
        tokens=sum(line.tokens for line in old),
        completed_earlier=completed_earlier,
    )


def _replace(
    slot: WriterSlot, manifest: Manifest, index: Index, layout: Layout, *, keep: bool
) -> tuple[JournalLine, ...]:
    """Write and compare the new shards, then switch. Returns their lines."""
    old = [index.lines[number] for number in layout.replaced]
    with ExitStack() as on_error:
        if keep:
            on_error.callback(_discard_empty, slot.directory / RETIRED_DIR)
            prepare_retired(slot.directory, (line.file for line in old))
        lines = []
        for rows in layout.shards:
            temporary = slot.temporary()
            on_error.callback(_discard, slot.directory, temporary)
            lines.append(_rewrite(slot, temporary, index, rows, manifest))
        _check_totals(slot.directory, old, lines)
        replacement = Replacement(slot.writer, tuple(lines), tuple(line.file for line in old), keep)
        try:
            decide(slot.directory, replacement)
        except OSError as error:
            raise _unwritable(Path(error.filename or slot.directory), error) from error
        on_error.pop_all()
    complete(slot.directory)
    return replacement.added


def _discard(directory: Path, temporary: Path) -> None:
    """Remove a new shard, unless it was decided, in whatever instant, that it is the dataset's."""
    if not is_unfinished(directory):
        temporary.unlink(missing_ok=True)


def _discard_empty(retired: Path) -> None:
    if retired.is_dir() and not any(retired.iterdir()):
        retired.rmdir()


def _rewrite(slot: WriterSlot, path: Path, index: Index, rows: Int64Array, manifest: Manifest) -> JournalLine:
    """One new shard."""
    try:
        return copy_rows(slot, path, index, rows, manifest)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> DatasetError:
    return DatasetError(f"{path}: cannot be written: {error.strerror or error}; nothing has changed")


def _check_totals(directory: Path, old: list[JournalLine], new: list[JournalLine]) -> None:
    """What the new shards were counted to hold is what the journal says of the old."""
    for name, before, after in zip(Totals._fields, totals(old), totals(new), strict=True):
        if before != after:
            raise DatasetError(
                f"{directory}: the shards to be compacted hold {after} {name}, the journal says {before}; "
                "`rollgen generate --resume` sets damaged ones aside"
            )
