"""TRL: a Parquet file that `datasets` loads, a row for each sample, for a `rollout_func` of ten lines.

    train.parquet   prompt_ids, completion_ids and logprobs, as `rollout_func` returns them; sampling_mask, reward,
                    advantage and all other columns of the dataset but lengths, by their own names

Follows TRL 1.16: `trl/trainer/grpo_trainer.py` (`RolloutFunc`, `_generate`). `prompt` is text, or the JSON text of
messages, and null where a prompt was given as ids. A mask that is null is a token that is not truncated.

Nothing in TRL reads masks: what it trains with these files is the full vocabulary, at the one temperature of its
configuration, and it takes the samples for its own. `rollgen.integrations.trl` trains TRL's trainer on the dataset
itself, on the supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.exporters.exporter import ExpertsExporter
from rollgen.exporters.records import ALL_COLUMNS, Records
from rollgen.exporters.table import table_of

FILE: Final = "train.parquet"
_RENAMED: Final = {"prompt_token_ids": "prompt_ids", "token_ids": "completion_ids"}
_LEVEL: Final = 6


class TRL(ExpertsExporter):
    """Every column, in one file."""

    follows: ClassVar[str] = "trl 1.16.0"
    needs_reward: ClassVar[bool] = False

    @property
    def places(self) -> Mapping[str, str]:
        return {name: _RENAMED.get(name, name) for name in [*ALL_COLUMNS, *["routed_experts"] * self.routed_experts]}

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        tables = (_renamed(table_of(block)) for block in records.blocks())
        first = next(tables)  # there is one sample at least
        settings = {"compression": "zstd", "compression_level": _LEVEL, "write_page_checksum": True}
        with pq.ParquetWriter(directory / FILE, first.schema, **settings) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
        return [
            f"datasets.load_dataset('parquet', data_files='{FILE}', split='train'), and docs/trl.md for a rollout_func",
            "TRL reads no masks: to train on them, rollgen.integrations.trl takes the dataset itself",
        ]


def _renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns([_RENAMED.get(name, name) for name in table.column_names])
