"""All rows of a dataset as Python objects, every column of them, by one reader or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from rollgen.format.reader import open_dataset, read_row_group


def read_with_pyarrow(directory: Path) -> list[dict[str, Any]]:
    files = sorted((directory / "data").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, page_checksum_verification=True) for file in files]).to_pylist()


def read_with_pyarrow_dataset(directory: Path) -> list[dict[str, Any]]:
    return pa.dataset.dataset(directory / "data", format="parquet").to_table().to_pylist()


def read_with_polars(directory: Path) -> list[dict[str, Any]]:
    return pl.scan_parquet(directory / "data" / "*.parquet").collect().to_dicts()


def read_with_duckdb(directory: Path) -> list[dict[str, Any]]:
    files = "read_parquet(?, filename = true) order by filename, prompt_index, sample_index"
    query = duckdb.execute(f"select * exclude (filename) from {files}", [f"{directory}/data/*.parquet"])
    names = [column[0] for column in query.description]
    return [dict(zip(names, row, strict=True)) for row in query.fetchall()]


def read_with_rollgen(directory: Path) -> list[dict[str, Any]]:
    rows = []
    for stored in open_dataset(directory).shards:
        with stored.open() as shard:
            for index in range(len(shard.row_group_rows)):
                rows += read_row_group(shard, index).to_pylist()
    return rows
