"""Files of a dataset that are something else: each function gives one that spoils a dataset directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

Spoil = Callable[[Path], None]


def as_directory(name: str) -> Spoil:
    def make(directory: Path) -> None:
        path = directory / name
        if path.exists():
            path.unlink()
        path.mkdir(parents=True)

    return make


def as_file(name: str) -> Spoil:
    def make(directory: Path) -> None:
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).write_text("no directory")

    return make


def with_text(name: str, content: bytes) -> Spoil:
    def make(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)

    return make


def not_utf8(name: str, column: str) -> Spoil:
    """A Parquet file whose first text in a column is the byte FF, with its checksums."""

    def make(directory: Path) -> None:
        path = directory / name
        with pq.ParquetFile(path) as file:
            table, schema = file.read().combine_chunks(), file.schema_arrow
        place = schema.get_field_index(column)
        values = pa.array([b"\xff", *[b"p"] * (len(table) - 1)], pa.binary())
        text = pa.StringArray.from_buffers(len(values), values.buffers()[1], values.buffers()[2])
        pq.write_table(table.set_column(place, schema.field(place), text), path, write_page_checksum=True)

    return make
