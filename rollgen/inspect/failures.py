"""What could not be made, and why: the failure lines of a dataset, less the samples that were stored after all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import polars as pl

from rollgen.format.failures import read_failures
from rollgen.inspect.scan import collect

if TYPE_CHECKING:
    from pathlib import Path

_KEY: Final = {"prompt_id": pl.String, "sample_index": pl.Int32, "generation": pl.Int32}
_SCHEMA: Final = _KEY | {"stage": pl.String, "error": pl.String}
_ERRORS: Final = 5


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Samples that failed for the same reason."""

    stage: str
    error: str
    samples: int


@dataclass(frozen=True, slots=True)
class FailureStats:
    """Samples that failed, and of which the row that was to be made is not stored."""

    samples: int
    retries: int
    """Of these, those that were to be made again, and whose earlier row is stored."""
    by_stage: dict[str, int]
    """Most frequent first; stages: input, engine, capture, invariant."""
    errors: tuple[ErrorCount, ...]
    """The most frequent few."""


def failure_stats(directory: Path, stored: pl.LazyFrame) -> FailureStats:
    """Count the failures of a dataset. `stored` holds the keys of its rows: prompt_id, sample_index, generation.

    A stored sample wins over its failure lines, and the latest line of a key over its earlier ones. Raises
    DatasetError, naming file and line, for a damaged line.
    """
    lines = [tuple(getattr(line, name) for name in _SCHEMA) for line in read_failures(directory)]
    latest = pl.LazyFrame(lines, schema=_SCHEMA, orient="row").unique(list(_KEY), keep="last", maintain_order=True)
    rows = stored.select(list(_KEY))
    failed = latest.join(rows, on=list(_KEY), how="anti")
    again = failed.filter(pl.col("generation") > 0).join(rows, on=list(_KEY)[:2], how="semi")
    kinds = failed.group_by("stage", "error").len().sort(["len", "stage", "error"], descending=[True, False, False])
    table, retries = collect(kinds, again.select(pl.len()))
    stages = table.group_by("stage").agg(pl.col("len").sum()).sort(["len", "stage"], descending=[True, False])
    return FailureStats(
        samples=int(table["len"].sum()),
        retries=int(retries.item()),
        by_stage=dict(stages.iter_rows()),
        errors=tuple(ErrorCount(*row) for row in table.head(_ERRORS).iter_rows()),
    )
