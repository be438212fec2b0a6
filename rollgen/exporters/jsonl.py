"""JSON Lines, compressed with zstandard, for tools of any language: one object a sample, with every column.

    rollouts.jsonl.zst   objects with the columns of the format by their own names, and `group`, `reward`, `advantage`

Lists are lists: `sampling_mask[t]` are the ids that token t was drawn from, null where it is not truncated.
`routed_experts` is flat, row-major [P + T - 1, layers, top_k]; export.json has the sizes. `metadata` and `stop_reason`
stay JSON texts, as they are stored. `prompt_length` and `response_length` are left to the lists. One zstandard frame
with a checksum: a file that was cut fails to decompress.

Each float is the exact decimal of a float64, to which float32 widens: any parser gives the stored bits back. `seed`,
and `prompt_index` of a dataset without a plan, are integers up to 2^63: parsers that make a float64 of every number
(JavaScript's, jq 1.6) round them.

Polars makes the text, a slice of rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import polars as pl
import pyarrow as pa
import zstandard

from rollgen.exporters.exporter import ExpertsExporter
from rollgen.exporters.records import ALL_COLUMNS, Records, pieces, row_bytes
from rollgen.exporters.table import table_of

FILE: Final = "rollouts.jsonl.zst"
_LEVEL: Final = 3
_SLICE_BYTES: Final = 1 << 21
"""Of rows, see `row_bytes`; as text they are several times as much."""
_WIDE: Final[dict[Any, Any]] = {
    pl.Float32: pl.Float64,
    pl.List(pl.Float32): pl.List(pl.Float64),
    pl.List(pl.List(pl.Float32)): pl.List(pl.List(pl.Float64)),
}


class JSONLines(ExpertsExporter):
    """Every column but lengths, in one file."""

    follows: ClassVar[str] = "JSON Lines"
    needs_reward: ClassVar[bool] = False

    @property
    def places(self) -> Mapping[str, str]:
        return {name: name for name in [*ALL_COLUMNS, *["routed_experts"] * self.routed_experts]}

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        with (directory / FILE).open("wb") as file, compressor.stream_writer(file) as text:
            for block in records.blocks():
                table = table_of(block)
                for start, stop in pieces(row_bytes(block.samples), _SLICE_BYTES):
                    text.write(_lines(table.slice(start, stop - start)))
        return [f"{FILE}: `zstd -dc` prints it; polars, pandas and DuckDB read it as it is"]


def _lines(table: pa.Table) -> bytes:
    """One JSON object a row, each with a newline."""
    frame = pl.DataFrame(table)
    casts = [pl.col(name).cast(_WIDE[kind]) for name, kind in frame.schema.items() if kind in _WIDE]
    return frame.with_columns(casts).write_ndjson().encode()
