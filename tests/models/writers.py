"""What a test of `RolloutWriter` opens writers with, and what these have stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from models.fake_engine import Key

from rollgen.engines.base import SampleRequest
from rollgen.format.manifest import EngineRecord
from rollgen.rollout_writer import RolloutWriter

ENGINE = EngineRecord(name="fake", version="1", device="cpu", versions={}, processors="top_k, top_p")
Open = Callable[..., RolloutWriter]


def table(directory: Path) -> pa.Table:
    """All rows, sorted by key."""
    return pq.read_table(directory / "data").sort_by([("prompt_id", "ascending"), ("sample_index", "ascending")])


def ids(directory: Path) -> list[tuple[str, int]]:
    """(prompt_id, sample_index) of all rows, sorted."""
    rows = table(directory)
    return list(zip(rows["prompt_id"].to_pylist(), rows["sample_index"].to_pylist(), strict=True))


def key(request: SampleRequest) -> Key:
    return request.prompt.prompt_index, request.sample_index
