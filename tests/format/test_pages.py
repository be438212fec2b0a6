"""Page headers: what pyarrow lets pass, and what a file claims that is not so."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.format.parquet import open_parquet

TABLE = pa.table({"x": pa.array(range(1000), pa.int32()), "y": pa.array(["a", "b"] * 500)})


def check(path: Path, columns: list[str]) -> None:
    """Check these columns of the first row group."""
    with open_parquet(path) as file:
        file.check(0, columns)


def write(path: Path, *, checksum: bool = True, version: str = "1.0", page_size: int = 1 << 20) -> Path:
    """TABLE with x in plain encoding and y in a dictionary."""
    pq.write_table(
        TABLE,
        path,
        use_dictionary=["y"],
        compression="zstd",
        write_page_checksum=checksum,
        data_page_version=version,
        data_page_size=page_size,
        max_rows_per_page=100 if page_size == 1 else 20_000,
    )
    return path


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page_size", [1, 1 << 20], ids=["many pages", "one page"])
def test_sound_pages_pass(tmp_path: Path, version: str, page_size: int) -> None:
    """Dictionary and data pages of both versions, one or many to a chunk."""
    check(write(tmp_path / "x", version=version, page_size=page_size), ["x", "y"])


@pytest.mark.parametrize("column", ["x", "y"])
def test_a_page_without_checksum_is_refused(tmp_path: Path, column: str) -> None:
    """pyarrow verifies a checksum where there is one; that there is one is checked here."""
    path = write(tmp_path / "x", checksum=False)
    pq.ParquetFile(path, page_checksum_verification=True).read()
    with pytest.raises(ValueError, match=rf"{column}: the page at byte \d+ carries no checksum"):
        check(path, [column])


def test_only_the_columns_asked_for_are_walked(tmp_path: Path) -> None:
    """A column that is not read need not be sound, and costs nothing."""
    check(write(tmp_path / "x", checksum=False), [])


@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        # In the data page header of x: num_values 1000 is zigzag 2000 = d0 0f, encoding PLAIN 00, levels RLE 06.
        pytest.param("15d00f1500", "15ce0f1500", "do not add up", id="num_values 999"),
        pytest.param("15d00f1500", "15d00f1504", "contradicts the footer", id="PLAIN_DICTIONARY"),
        pytest.param("15d00f1500", "15d00f1502", "contradicts the footer", id="no such encoding"),
        pytest.param("15d00f1500", "19d00f1500", "damaged page header", id="no such type"),
    ],
)
def test_a_header_that_contradicts_the_footer(tmp_path: Path, find: str, replace: str, message: str) -> None:
    """No checksum covers a page header: what it claims is compared with the footer."""
    path = write(tmp_path / "x")
    content = path.read_bytes()
    assert bytes.fromhex(find) in content
    path.write_bytes(content.replace(bytes.fromhex(find), bytes.fromhex(replace), 1))
    with pytest.raises(ValueError, match=message):
        check(path, ["x"])


@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        # The first header of x: page type 0 (15 00), then uncompressed size 4,007 (zigzag 8,014 = ce 3e).
        pytest.param("1500 15ce3e", "1500 15ce3f", "do not add up", id="uncompressed size"),
        pytest.param("1500 15ce3e", "1500 15cf3e", "damaged page header", id="negative size"),
    ],
)
def test_sizes_that_lie(tmp_path: Path, find: str, replace: str, message: str) -> None:
    """Memory is allocated by what a header claims, so it has to agree with the footer before it is believed."""
    path = write(tmp_path / "x")
    content = path.read_bytes()
    assert bytes.fromhex(find) in content
    path.write_bytes(content.replace(bytes.fromhex(find), bytes.fromhex(replace), 1))
    with pytest.raises(ValueError, match=message):
        check(path, ["x"])
