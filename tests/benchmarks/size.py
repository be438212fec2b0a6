"""Bytes of the sampling_mask column, as rollgen writes it and in the encodings one might try first.

python -m tests.benchmarks.size [--masks FILE]
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.format.schema import MASK_LIST, ROW_GROUP_TOKENS, parquet_options
from tests.benchmarks.masks import REAL, synthetic_completions

LEAF = "sampling_mask.list.element.list.element"
SCHEMA = pa.schema([pa.field("sampling_mask", MASK_LIST, nullable=False)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", type=Path, help="a Parquet file to use as the second data set")
    arguments = parser.parse_args()
    second = read_masks(arguments.masks) if arguments.masks else synthetic_masks()
    for name, masks in (("real masks", read_masks(REAL)), ("synthetic masks", second)):
        ids, tokens = len(masks.flatten().flatten()), len(masks.flatten())
        print(f"\n{name}: {tokens:,} tokens, {ids / tokens:.2f} ids each")
        print(f"{'':34}{'bytes/id':>10}{'bytes/token':>13}")
        for case, options in encodings().items():
            size = column_bytes(masks, options)
            print(f"{case:34}{size / ids:>10.3f}{size / tokens:>13.2f}")


def encodings() -> dict[str, dict[str, Any]]:
    """Writer options by name; the first is what rollgen does."""
    rollgen = parquet_options(SCHEMA) | {"use_dictionary": False, "write_statistics": False}
    plain = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    return {
        "rollgen": rollgen,
        "PLAIN + zstd 3": plain | {"compression_level": 3},
        "dictionary + zstd 3": {"compression": "zstd", "compression_level": 3},
        "DELTA_BINARY_PACKED + zstd 3": plain | {"column_encoding": {LEAF: "DELTA_BINARY_PACKED"}},
        "pyarrow defaults": {},
    }


def column_bytes(masks: pa.ListArray, options: dict[str, Any]) -> int:
    """Compressed size of the column in row groups of the format's size."""
    sink = io.BytesIO()
    ends = np.flatnonzero(np.diff(masks.offsets.to_numpy()[1:] // ROW_GROUP_TOKENS, append=-1)) + 1
    with pq.ParquetWriter(sink, SCHEMA, **options) as writer:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            writer.write_table(pa.table([masks[start:end]], schema=SCHEMA))
    metadata = pq.ParquetFile(io.BytesIO(sink.getvalue())).metadata
    return sum(metadata.row_group(i).column(0).total_compressed_size for i in range(metadata.num_row_groups))


def read_masks(path: Path) -> pa.ListArray:
    """The sampling_mask column of a Parquet file."""
    return pq.read_table(path, columns=["sampling_mask"])["sampling_mask"].combine_chunks().cast(MASK_LIST)


def synthetic_masks() -> pa.ListArray:
    """250k made-up tokens."""
    return pa.array([row.masks for row in synthetic_completions(1_667)], MASK_LIST)


if __name__ == "__main__":
    main()
