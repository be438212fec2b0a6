"""The runs of a merged dataset: what is stored of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from rollgen.inspect.scan import collect

if TYPE_CHECKING:
    from rollgen.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class MergedRunStats:
    """One run. Of what it was made, the manifest says."""

    name: str
    merged: int
    """Samples that it brought; more than are stored where shards were lost since."""
    samples: int
    prompts: int
    """With at least one sample."""
    generated_tokens: int


def run_stats(rows: pl.LazyFrame, manifest: Manifest) -> tuple[MergedRunStats, ...]:
    """Of each run, in the order of the manifest; none of a dataset that was not merged."""
    if not manifest.runs:
        return ()
    (table,) = collect(
        rows.group_by("run").agg(
            pl.len().cast(pl.Int64),
            pl.col("prompt_index").n_unique().cast(pl.Int64),
            pl.col("response_length").cast(pl.Int64).sum(),
        )
    )
    found = {name: figures for name, *figures in table.iter_rows()}
    return tuple(MergedRunStats(run.name, run.samples, *found.get(run.name, (0, 0, 0))) for run in manifest.runs)
