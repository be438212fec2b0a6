"""What a dataset was asked for, and that its rows are that: what only its plan and its retry lists can tell.

A merged dataset has neither. Rows that contradict them, or records that contradict each other, must not get there, for
nothing would show it any more: they are refused, with what `rollgen verify` says more of. What is wrong with the tokens
of a row is to be seen afterwards as before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import pyarrow as pa

from rollgen.errors import DatasetError
from rollgen.format.journal import file_sha256
from rollgen.format.keys import Keys
from rollgen.format.manifest import Manifest
from rollgen.format.reader import StoredDataset
from rollgen.format.retries import read_retries
from rollgen.format.schema import PLAN_FILE
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import CHECKED, Mismatch, Planned, check_planless, first_problem

if TYPE_CHECKING:
    from rollgen.curate.layout import Index

_OF_PLANLESS: Final = (*Keys._fields, "prompt_id")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a dataset was asked for."""

    dataset: StoredDataset
    planned: Planned | None
    """None without a plan."""

    @classmethod
    def of(cls, dataset: StoredDataset) -> Self:
        """Raises DatasetError for a plan or a list of retries that is damaged, or not the manifest's."""
        manifest, path = dataset.manifest, dataset.directory / PLAN_FILE
        if manifest.is_planless:
            return cls(dataset, None)
        plan = Plan(path)
        if manifest.plan_sha256 is not None and file_sha256(path) != manifest.plan_sha256:
            raise _wrong(dataset, f"{path}: not the file that the manifest vouches for")
        deque(plan.batches(), maxlen=0)  # each can be read
        return cls(dataset, Planned(plan, read_retries(dataset.directory, manifest)))

    @property
    def columns(self) -> tuple[str, ...]:
        """What `check` needs of a row group."""
        if self.planned is not None:
            return CHECKED
        return (*_OF_PLANLESS, "run") if self.dataset.manifest.runs else _OF_PLANLESS

    def check(self, table: pa.Table, place: str) -> None:
        """Raise DatasetError unless all of these rows, which are at this place, were asked for as they are."""
        problem = first_problem(_mismatches(table, self.dataset.manifest, self.planned))
        if problem is not None:
            raise _wrong(self.dataset, f"{place}, {problem}")

    def owed(self, rows: int) -> int | None:
        """Samples that were asked for and are not among these rows, all of them checked; None without a plan."""
        if self.planned is None:
            return None
        plan = self.planned.plan
        return plan.samples - int(plan.n[plan.tombstone].sum()) + sum(map(len, self.planned.retries)) - rows


def check_shards(dataset: StoredDataset, index: Index) -> None:
    """Raise DatasetError for a shard whose rows are not sorted, or not as many tokens as its journal line says."""
    shard = index.shard_of(np.arange(len(index.rows.generation)))
    tokens = np.bincount(shard, index.rows.response_length, len(index.shards)).astype(np.int64).tolist()
    falling = (index.keys.steps() < 0) & (np.diff(shard) == 0)
    if falling.any():
        stored = index.shards[shard[int(falling.argmax())]]
        raise _wrong(dataset, f"{stored.path}: its rows are not sorted by their keys")
    for stored, line, found in zip(index.shards, index.lines, tokens, strict=True):
        if found != line.tokens:
            raise _wrong(dataset, f"{stored.path}: {found} tokens, the journal says {line.tokens}")


def _mismatches(table: pa.Table, manifest: Manifest, planned: Planned | None) -> Iterator[Mismatch]:
    unknown = table["generation"].to_numpy() > len(manifest.retries)
    if unknown.any():
        yield Mismatch("unplanned", unknown, "of a retry that the manifest does not know")
    yield from check_planless(table, manifest.run_names) if planned is None else planned.check(table)


def _wrong(dataset: StoredDataset, what: str) -> DatasetError:
    return DatasetError(f"{what}; see `rollgen verify {dataset.directory}`")
