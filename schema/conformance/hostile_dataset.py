"""A small sound dataset, and ways to spoil it so that everything around the spoilt place is as it should be.

A hostile author writes a journal and a manifest that fit: sizes and hashes are set right after each change, so that
only the content can give it away.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from make_golden import WRITER, completions, expected_plan_row, golden_manifest, prompts
from parquet_bytes import footer_start

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256, read_journal
from rollgen.format.manifest import create_manifest
from rollgen.format.schema import PLAN_SCHEMA, parquet_options
from rollgen.format.writer import ShardWriter

ROWS = 5
SHARD = f"data/part-{WRITER}-000000.parquet"
JOURNAL = f"journal/{WRITER}.jsonl"
MANIFEST = "rollgen.json"
PLAN = "plan.parquet"
SMALL = {"store_schema": False, "write_page_index": False, "write_statistics": False}
"""Of 130 cases. Nothing of it is needed."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hostile:
    """A dataset of one shard that is being spoilt."""

    directory: Path

    def path(self, name: str) -> Path:
        """A file of the dataset."""
        return self.directory / name

    def shard_bytes(self, change: Callable[[bytes], bytes], name: str = SHARD) -> None:
        """Change the shard as bytes; its journal line fits afterwards."""
        path = self.path(name)
        path.write_bytes(change(path.read_bytes()))
        self.seal(name)

    def table(self) -> pa.Table:
        """The rows of the shard, with its key/value metadata."""
        return pq.read_table(self.path(SHARD))

    def write_table(self, table: pa.Table, name: str = SHARD, **options: Any) -> None:
        """Write a shard with the layout of any other, but for `options`; its journal line fits afterwards."""
        layout = {key: value for key, value in parquet_options(table.schema).items() if key != "column_encoding"}
        layout |= SMALL | options
        layout["use_dictionary"] = [key for key in layout["use_dictionary"] if key in table.schema.names]
        with pq.ParquetWriter(self.path(name), table.schema, **layout) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(table.schema.metadata or {})
        self.seal(name, table=table)

    def rows(self, change: Callable[[list[Row]], None], *, nullable: bool = False) -> None:
        """Change the rows of the shard as plain values; where they may be null is not said with `nullable`."""
        table = self.table()
        rows = table.to_pylist()
        change(rows)
        schema = loose(table.schema) if nullable else table.schema
        self.write_table(pa.Table.from_pylist(rows, schema=schema))

    def row(self, number: int, **values: Any) -> None:
        """Set values of one row."""
        self.rows(lambda rows: rows[number].update(values))

    def seal(self, name: str = SHARD, *, table: pa.Table | None = None) -> None:
        """Make the journal line fit the shard's bytes, and the counts of `table`."""
        content = self.path(name).read_bytes()
        start = footer_start(content) if len(content) >= 12 else 0
        line = {
            "file": Path(name).name,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "footer_sha256": hashlib.sha256(content[max(0, start) :]).hexdigest(),
        }
        if table is not None:
            masks = [mask for row in table["sampling_mask"].to_pylist() for mask in row or [] if isinstance(mask, list)]
            tokens = sum(len(row or []) for row in table["token_ids"].to_pylist())
            line |= {"rows": len(table), "tokens": tokens, "mask_ids": sum(map(len, masks))}
        lines = [json.loads(text) for text in self.path(JOURNAL).read_text().splitlines()]
        known = next((old for old in lines if old["file"] == line["file"]), None)
        others = [old for old in lines if old is not known]
        self.lines([*others, (known or {}) | line])

    def lines(self, lines: list[Any]) -> None:
        """Write the journal: objects, or text as it is."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.path(JOURNAL).write_text("".join(text + "\n" for text in texts))

    def line(self, **values: Any) -> None:
        """Set keys of the only journal line."""
        self.lines([json.loads(self.path(JOURNAL).read_text()) | values])

    def manifest(self, *, sealed: bool = True, **values: Any) -> None:
        """Set keys of the manifest, and its own hash right with `sealed`."""
        content = json.loads(self.path(MANIFEST).read_text()) | values
        checksum = content.pop("sha256")
        content["sha256"] = digest(content) if sealed else checksum
        self.path(MANIFEST).write_text(json.dumps(content, indent=1))

    def manifest_text(self, change: Callable[[str], str]) -> None:
        """Change the manifest as text, which then has no hash of its own, as that of an older writer."""
        content = json.loads(self.path(MANIFEST).read_text())
        del content["sha256"]
        self.path(MANIFEST).write_text(change(json.dumps(content, indent=1)))

    def plan(self, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
        """Change the plan; the manifest has its hash."""
        path = self.path(PLAN)
        pq.write_table(
            change(pq.read_table(path)), path, **{"compression": "zstd", "write_page_checksum": True} | SMALL | options
        )
        self.manifest(plan_sha256=file_sha256(path))

    def plan_bytes(self, change: Callable[[bytes], bytes]) -> None:
        """Change the plan as bytes; the manifest has its hash."""
        path = self.path(PLAN)
        path.write_bytes(change(path.read_bytes()))
        self.manifest(plan_sha256=file_sha256(path))


def write_base(directory: Path) -> Hostile:
    """The five golden samples of three prompts in one shard, with a plan that also has a tombstone and one owed."""
    directory.mkdir(parents=True)
    plan = pa.Table.from_pylist([expected_plan_row(prompt) for prompt in prompts()], schema=PLAN_SCHEMA)
    pq.write_table(plan, directory / PLAN, compression="zstd", write_page_checksum=True, **SMALL)
    manifest = golden_manifest(format_version="1.1", support_logprobs=False)
    create_manifest(directory, manifest.model_copy(update={"plan_sha256": file_sha256(directory / PLAN)}))
    with WriterSlot(directory, WRITER) as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for completion in completions():
            writer.add(replace(completion, replayable=True))  # a loader refuses others without looking further
    [line] = read_journal(directory).committed.values()
    for lock in (directory / "journal").glob("*.lock"):
        lock.unlink()
    assert line.file == Path(SHARD).name
    base = Hostile(directory)
    base.write_table(base.table())
    return base


def loose(schema: pa.Schema) -> pa.Schema:
    """The same columns, with nulls allowed everywhere."""
    fields = [pa.field(field.name, _loose(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def _loose(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", _loose(kind.value_type))) if pa.types.is_list(kind) else kind
