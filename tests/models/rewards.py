"""Rewards of a dataset, written without a scorer."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from models.datasets import read_rows

from rollgen.format.manifest import read_manifest
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import ScorerRecord, part_schema

SCORER = ScorerRecord("scorers:score", "0" * 64)


def crc_of(ids: list[int]) -> int:
    """CRC-32 of ids as little-endian int32, by struct and not by numpy."""
    return zlib.crc32(struct.pack(f"<{len(ids)}i", *ids))


def write_rewards(
    directory: Path,
    name: str,
    reward: Callable[[dict[str, Any]], dict[str, float] | float | None],
    *,
    scorer: ScorerRecord = SCORER,
    scoring: int = 1,
    closes: bool = False,
    only: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> None:
    """One more part: of each stored row that `only` takes, its `reward`, a mapping with further ones, or None."""
    rows, columns = [], set[str]()
    for row in filter(only, read_rows(directory).values()):
        given = reward(row)
        values = given if isinstance(given, dict) else {"reward": given}
        columns |= values.keys() - {"reward"}
        keys = {key: row[key] for key in ("prompt_id", "prompt_index", "sample_index", "generation")}
        error = "failed" if values["reward"] is None else None
        rows.append({**keys, "tokens_crc32": crc_of(row["token_ids"]), "error": error, **values})
    table = pa.Table.from_pylist(rows, schema=part_schema(sorted(columns)))
    with RewardWriter(directory, name, read_manifest(directory).config_digest) as writer:
        writer.write(table, sorted(columns), scorer, scoring=scoring, closes=closes)
