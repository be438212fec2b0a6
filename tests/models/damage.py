"""Damage to a dataset, and what `repair` did about it.

The dataset has four prompts of two samples and a fifth row that was skipped, in three shards of one writer: prompts 0
and 1, prompts 2 and 3, and the samples that a retry made again because they were cut at five tokens.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.format.journal import JournalLine, file_sha256, footer_sha256
from rollgen.verify.repair import Repair

JOURNAL, FAILURES = "journal/w0.jsonl", "failures/w0.jsonl"
FIRST, SECOND, RETRIED = (f"data/part-w0-{number:06d}.parquet" for number in range(3))
SHARDS = (FIRST, SECOND, RETRIED)
COPY = "data/part-x-000000.parquet"
RETRY = {"retry": "finish_reason=length", "max_tokens": 16}


def summary(repair: Repair) -> list[tuple[str, str]]:
    return [(change.action, change.file) for change in repair.changes]


def flip(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)


def edit_line(number: int, **changes: Any) -> Callable[[Path], None]:
    """Damage that leaves a line of the journal readable."""

    def damage(out: Path) -> None:
        lines = (out / JOURNAL).read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | changes)
        (out / JOURNAL).write_text("".join(line + "\n" for line in lines))

    return damage


def break_line(name: str, number: int = 0) -> Callable[[Path], None]:
    """A line that is none any more: its first brace."""

    def damage(out: Path) -> None:
        lines = (out / name).read_bytes().splitlines(keepends=True)
        flip(out / name, len(b"".join(lines[:number])))

    return damage


def append(name: str, line: bytes) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        with (out / name).open("ab") as file:
            file.write(line)

    return damage


def line_of(path: Path, **changes: Any) -> JournalLine:
    """The line of a shard, whatever it holds."""
    table = pq.read_table(path)
    masks = sum(len(ids or ()) for row in table["sampling_mask"].to_pylist() for ids in row)
    tokens = sum(table["response_length"].to_pylist())
    line = JournalLine(
        path.name, path.stat().st_size, file_sha256(path), footer_sha256(path), len(table), tokens, masks
    )
    return replace(line, **changes)


def rewrite(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Another content of the first shard, with a line that is right: no storage does that, but somebody might."""

    def damage(out: Path) -> None:
        path = out / FIRST
        pq.write_table(change(pq.read_table(path)), path, write_page_checksum=True)
        line = asdict(line_of(path))
        edit_line(0, **line)(out)

    return damage


def with_column(name: str, values: Callable[[list[Any]], list[Any]]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place, field = table.schema.get_field_index(name), table.schema.field(name)
        return table.set_column(place, field, pa.array(values(table[name].to_pylist()), field.type))

    return change


GONE = [("quarantined", FIRST)]

FAILURES_OF_THE_MACHINE = {
    "disk": OSError(errno.EIO, "Input/output error"),
    "memory": pa.ArrowMemoryError("malloc of size 1 failed"),
    "memory of libzstd": OSError("ZSTD decompression failed: Allocation error : not enough memory"),
    "memory of Python": MemoryError(),
}
"""What a read may raise that is no damage."""


def everything_at_once(out: Path) -> None:
    """Something for each step: a broken shard, a missing one, a copy, wrong and damaged lines, also of failures."""
    shutil.copy(out / RETRIED, out / COPY)
    flip(out / FIRST, 1000)
    (out / SECOND).unlink()
    edit_line(2, tokens=0)(out)
    append(JOURNAL, b"garbage\n")(out)
    (out / "journal" / "repair.jsonl").write_bytes(b"garbage\n{torn")
    break_line(FAILURES)(out)


EVERYTHING = [
    ("quarantined", FIRST),
    ("journalled", RETRIED),
    ("quarantined", COPY),
    ("retired", SECOND),
    ("rewritten", "journal/repair.jsonl"),
    ("rewritten", JOURNAL),
    ("rewritten", FAILURES),
]
