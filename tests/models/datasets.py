"""What a dataset holds, read through its journal with every page verified, and what it should hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollgen.format.reader import open_dataset, read_row_group

Key = tuple[str, int, int]
"""prompt_id, sample_index, generation"""


def write_prompts(path: Path, count: int) -> Path:
    """Rows p0, p1, ... with some metadata."""
    rows = ({"id": f"p{index}", "prompt": f"Number {index} is", "answer": index} for index in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(directory: Path) -> dict[Key, dict[str, Any]]:
    """Every stored row by its key. Raises DatasetError for damage, AssertionError for a key that is there twice."""
    rows: dict[Key, dict[str, Any]] = {}
    for stored in open_dataset(directory).shards:
        with stored.open() as shard:
            tables = [read_row_group(shard, group) for group in range(len(shard.row_group_rows))]
        for row in pa.concat_tables(tables).to_pylist():
            key = (row["prompt_id"], row["sample_index"], row["generation"])
            assert key not in rows, f"{key} is stored twice"
            rows[key] = row
    return rows


def planned_keys(prompts: int, n: int) -> set[Key]:
    """Every key that a complete dataset without retries has."""
    return {(f"p{index}", sample, 0) for index in range(prompts) for sample in range(n)}
