"""JSON Lines, compressed with zstandard, for tools of any language: one object a sample, with every column.

    rollouts.jsonl.zst   objects with the columns of the format by their own names, and `group`, `reward`, `advantage`

Lists are lists: `sampling_mask[t]` are the ids that token t was drawn from, null where it is not truncated.
`routed_experts` is flat, row-major [P + T - 1, layers, top_k]; export.json has the sizes. `metadata` and `stop_reason`
stay JSON texts, as they are stored. Each number is the exact decimal of a float64, to which float32 widens: any parser
gives the stored bits back. One zstandard frame with a checksum: a file that was cut fails to decompress.

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
from rollgen.exporters.records import LISTS, SCALARS, Records
from rollgen.exporters.table import table_of
from rollgen.loader.samples import RUN, VERSIONS

FILE: Final = "rollouts.jsonl.zst"
_LEVEL: Final = 3
_ROWS: Final = 64
"""Of a slice: some hundred bytes of text a token."""
_WIDE: Final[dict[Any, Any]] = {
    pl.Float32: pl.Float64,
    pl.List(pl.Float32): pl.List(pl.Float64),
    pl.List(pl.List(pl.Float32)): pl.List(pl.List(pl.Float64)),
}


class JSONLines(ExpertsExporter):
    """Every column, in one file."""

    follows: ClassVar[str] = "JSON Lines"
    needs_reward: ClassVar[bool] = False

    @property
    def places(self) -> Mapping[str, str]:
        names = [*LISTS, *SCALARS, "support_logprobs", VERSIONS, RUN, "reward", "advantage"]
        return {name: name for name in names + ["routed_experts"] * self.routed_experts}

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        with (directory / FILE).open("wb") as file, compressor.stream_writer(file) as text:
            for block in records.blocks():
                table = table_of(block)
                for start in range(0, len(table), _ROWS):
                    text.write(_lines(table.slice(start, _ROWS)))
        return [f"{FILE}: `zstd -dc` prints it; polars, pandas and DuckDB read it as it is"]


def _lines(table: pa.Table) -> bytes:
    """One JSON object a row, each with a newline."""
    frame = pl.DataFrame(table)
    casts = [pl.col(name).cast(_WIDE[kind]) for name, kind in frame.schema.items() if kind in _WIDE]
    return frame.with_columns(casts).write_ndjson().encode()
