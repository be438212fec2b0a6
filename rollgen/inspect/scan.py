"""The rows of a dataset as Polars queries, which its streaming engine reduces to small tables.

    scan        all rows of all shards
    current     of these the latest row of each sample
    collect     runs queries over one scan together, which reads it once
    named       turns what reading raises into one line

Polars does not check page checksums: `stats_of` hashes every shard against its journal line before anything is scanned.
What the invariants of `schema/SPEC.md` say of single rows is taken as true.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

import polars as pl

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.schema import shard_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollgen.format.manifest import Manifest
    from rollgen.format.reader import StoredDataset, StoredShard

SAMPLE: Final = ("prompt_index", "sample_index")
MOST_BINS: Final = 1 << 52
"""Of a table of values: float64 holds each of these numbers."""


def scan(shards: Sequence[StoredShard], manifest: Manifest) -> pl.LazyFrame:
    """All rows of all shards, of all generations; without shards none. Ignores columns of a later MINOR.

    Shards of format 1.0 have no generation, which means 0. While there are no retries the column is not read at all.
    """
    empty = cast("pl.DataFrame", pl.from_arrow(shard_schema(**manifest.optional_columns).empty_table()))
    rows = empty.lazy()
    if shards:
        rows = pl.scan_parquet(
            [shard.path for shard in shards],
            glob=False,
            hive_partitioning=False,
            schema=empty.schema,
            missing_columns="insert",
            extra_columns="ignore",
        )
    generation = pl.col("generation").fill_null(0) if manifest.retries else pl.lit(0, pl.Int32).alias("generation")
    return rows.with_columns(generation)


def current(stored: pl.LazyFrame) -> pl.LazyFrame:
    """The rows of the highest generation of each sample, in order. Memory grows with the rows of retries."""
    retried = stored.filter(pl.col("generation") > 0).group_by(SAMPLE).agg(pl.col("generation").max().alias("latest"))
    (latest,) = collect(retried)
    rows = stored.join(latest.lazy(), on=SAMPLE, how="left", maintain_order="left")
    return rows.filter(pl.col("generation") >= pl.col("latest").fill_null(0)).drop("latest")


def current_rows(dataset: StoredDataset) -> pl.LazyFrame:
    """The rows that figures are of: `current`, or all where no sample was ever made again."""
    stored = scan(dataset.shards, dataset.manifest)
    return current(stored) if dataset.manifest.retries else stored


def collect(*frames: pl.LazyFrame) -> list[pl.DataFrame]:
    """Run queries over the same scan together: it is read once."""
    return pl.collect_all(frames, engine="streaming")


def bins(numbers: pl.Expr) -> pl.Expr:
    """Whole numbers of at least 0 as int64, called `bin`: none beyond MOST_BINS, which a finite logprob can reach. What
    is not finite is damage, and cannot be cast."""
    return pl.when(numbers.is_finite()).then(numbers.clip(0, MOST_BINS)).otherwise(numbers).cast(pl.Int64).alias("bin")


def tally(column: str) -> pl.Expr:
    """Values of a non-null token column as int64; `pl.len()` would wrap at 2^32 tokens."""
    return pl.col(column).is_not_null().cast(pl.Int64).sum()


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Turn what Polars and the machine raise into one line that names the file or directory that was read.

    Shards are found when a dataset is opened: one that is gone afterwards was there then.
    """
    try:
        yield
    except FileNotFoundError:
        gone = "a file was replaced, or set aside, since the dataset was opened; start again"
        raise MissingFile(f"{path}: {gone}") from None
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error.strerror or error}") from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise DatasetError(f"{path}: damaged, or not in the format: {' '.join(str(error).split())}") from None
