"""What the machine cannot read is not damage: memory that is really short, and reads that the system refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format import footer, pages, parquet
from rollgen.format.parquet import CheckedParquet, open_parquet, translated

READ_WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from rollgen.errors import DatasetError
from rollgen.format.parquet import open_parquet, translated

with open_parquet(Path(sys.argv[1])) as file:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (32 << 20),) * 2)
    try:
        with translated("file", "damaged", "fix"):
            file.read(0, ["a"])
    except DatasetError as error:
        print(type(error).__name__, error)
"""


def write(path: Path, values: int) -> Path:
    table = pa.table({"a": np.zeros(values, np.int32)})
    pq.write_table(
        table, path, use_dictionary=False, compression="zstd", write_page_checksum=True, row_group_size=values
    )
    return path


def test_too_little_memory(tmp_path: Path) -> None:
    """128 MiB of values, and 32 to have them in: a few KiB on disk, and nothing wrong with them."""
    path = write(tmp_path / "zeros.parquet", 1 << 25)
    command = [sys.executable, "-c", READ_WITH_LITTLE_MEMORY, str(path)]
    plain = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others take a gigabyte of addresses at once
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    assert result.stdout.startswith("Unreadable file: this machine could not read it: "), result
    with open_parquet(path) as file:
        assert len(file.read(0, ["a"])) == 1 << 25


def refuse(descriptor: int, size: int, offset: int) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def read(file: CheckedParquet) -> object:
    return file.read(0, ["a"])


@pytest.mark.parametrize(
    ("module", "use"),
    [(footer, lambda file: open_parquet(file.path)), (pages, read)],
    ids=["footer", "page header"],
)
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, use: Callable[[CheckedParquet], object]
) -> None:
    """Wherever it is: the error of the system stays one, and says so."""
    with open_parquet(write(tmp_path / "file.parquet", 10)) as file:
        monkeypatch.setattr(module, "os", type("os", (), {"pread": staticmethod(refuse)}))
        told = r"^shard: this machine could not read it: .*Input/output error; mend"
        with pytest.raises(Unreadable, match=told), translated("shard", "damaged", "fix"):
            use(file)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("Corrupt snappy compressed data."), DatasetError),
        (OSError("ZSTD decompression failed: Data corruption detected"), DatasetError),
        (OSError("ZSTD decompression failed: Allocation error : not enough memory"), Unreadable),
        (pa.ArrowInvalid("Parquet magic bytes not found"), DatasetError),
        (pa.ArrowMemoryError("malloc of size 7 failed"), Unreadable),
        (MemoryError(), Unreadable),
        (PermissionError(errno.EACCES, "Permission denied"), Unreadable),
        (FileNotFoundError(errno.ENOENT, "No such file"), MissingFile),
    ],
    ids=repr,
)
def test_whose_failure_it_is(error: Exception, kind: type[DatasetError]) -> None:
    """The system numbers its errors; pyarrow raises OSError without a number for content."""
    with pytest.raises(DatasetError) as raised, translated("place", "problem", "fix"):
        raise error
    assert type(raised.value) is kind
    assert str(raised.value).startswith("place: ")


def test_texts_that_repeat_each_other_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DELTA_BYTE_ARRAY stores what a value adds to the one before: few bytes, and all of them again in each value."""
    path = tmp_path / "texts.parquet"
    monkeypatch.setattr("rollgen.format.parquet.MAX_DECODED_BYTES", 1 << 20)
    table = pa.table({"text": ["x" * 20_000] * 200})
    options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    pq.write_table(table, path, compression="zstd", write_page_checksum=True, **options)
    assert path.stat().st_size < 10_000
    with open_parquet(path) as file, pytest.raises(ValueError, match="bytes once decoded; the limit is"):
        file.check(0, ["text"])


def texts_of(path: Path, text: str, *, lists: bool) -> Path:
    """2^12 rows that refer to one text in a dictionary: plain, or a list of it alone."""
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1 << 12, np.int32)), pa.array([text])).cast(pa.string())
    kind = pa.list_(pa.field("element", pa.string(), nullable=False))
    column = pa.ListArray.from_arrays(np.arange((1 << 12) + 1, dtype=np.int32), values, kind) if lists else values
    pq.write_table(pa.table({"a": column}), path, compression="zstd", write_page_checksum=True)
    return path


@pytest.mark.parametrize("lists", [False, True], ids=["texts", "lists of texts"])
def test_texts_count_as_often_as_they_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: bool
) -> None:
    """4,096 times 100 bytes, though the file has them once: above a limit of 100 kB, below one of a megabyte."""
    path = texts_of(tmp_path / "texts.parquet", "x" * 100, lists=lists)
    with open_parquet(path) as file:
        monkeypatch.setattr(parquet, "MAX_DECODED_BYTES", 1 << 20)
        assert len(file.read(0, ["a"])) == 1 << 12
        monkeypatch.setattr(parquet, "MAX_DECODED_BYTES", 100_000)
        with pytest.raises(ValueError, match="bytes once decoded; the limit is 100000"):
            file.read(0, ["a"])


@st.composite
def tables(draw: st.DrawFn) -> dict[str, tuple[list[str | None], bool]]:
    """Up to four columns of texts, each with whether it has a dictionary: few values, and many references to them."""
    rows = draw(st.integers(1, 60))
    texts = st.none() | st.builds(lambda letter, size: letter * size, st.sampled_from("aé\0"), st.integers(0, 50))
    columns = draw(st.lists(st.tuples(st.lists(texts, min_size=rows, max_size=rows), st.booleans()), max_size=3))
    repeated = draw(st.lists(texts, min_size=1, max_size=3))
    columns.append(((repeated * rows)[:rows], True))
    return {f"c{number}": column for number, column in enumerate(columns)}


@given(tables(), st.sampled_from([-1000, -1, 0, 1, 1000]))
def test_what_texts_come_to_is_the_truth(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, tuple[list[str | None], bool]], room: int
) -> None:
    """Refused is what is above the limit, by one byte or more, and nothing else, whatever a bound over it would say.

    The pages, at least 4 bytes a value, and the texts that are in a dictionary as often as they occur.
    """
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    table = pa.table({name: pa.array(texts, pa.string()) for name, (texts, _) in columns.items()})
    with_dictionary = [name for name, (_, has) in columns.items() if has]
    pq.write_table(table, path, use_dictionary=with_dictionary, compression="zstd", write_page_checksum=True)
    chunks = pq.read_metadata(path).row_group(0)
    pages = [max(chunks.column(leaf).total_uncompressed_size, 4 * len(table)) for leaf in range(len(columns))]
    decoded = sum(pages) + sum(len(text.encode()) for name in with_dictionary for text in columns[name][0] if text)
    with pytest.MonkeyPatch.context() as patch, open_parquet(path) as file:
        patch.setattr(parquet, "MAX_DECODED_BYTES", decoded + room)
        if room >= 0:
            file.check(0, columns)
            return
        with pytest.raises(ValueError, match=r"\d+ bytes once decoded; the limit is"):
            file.check(0, columns)


def test_no_dictionary_is_looked_up_without_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the bounds are harmless, nor where the pages alone are too much: then nothing is decoded."""
    path = texts_of(tmp_path / "texts.parquet", "x" * 100, lists=False)
    monkeypatch.delattr(CheckedParquet, "_looked_up_bytes")
    with open_parquet(path) as file:
        file.check(0, ["a"])
        monkeypatch.setattr(parquet, "MAX_DECODED_BYTES", 4 * (1 << 12) - 1)
        with pytest.raises(ValueError, match="bytes once decoded; the limit is"):
            file.check(0, ["a"])
