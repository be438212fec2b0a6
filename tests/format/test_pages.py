"""Page headers: the little Thrift that is decoded, and the damage that pyarrow lets pass."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.format.pages import check_pages, read_struct

TABLE = pa.table({"x": pa.array(range(1000), pa.int32()), "y": pa.array(["a", "b"] * 500)})


def check(path: Path, columns: list[str]) -> None:
    """Run `check_pages` over the first row group."""
    with path.open("rb") as file:
        check_pages(file, pq.read_metadata(path), 0, columns)


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


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        # Field 1, zigzag 0 -> 0; field 3 (delta 2), zigzag 3 -> -2; field 4 true; stop.
        pytest.param("15001503 11 00", {1: 0, 2: -2, 3: True}, id="integers and a boolean"),
        pytest.param("25ac02 00", {2: 150}, id="two byte varint: 0x2c + 2 * 128 = 300, zigzag 150"),
        pytest.param("05 1402 00", {10: 1}, id="long form: field number as an integer, 0x14 -> 10"),
        pytest.param("1c 1502 00 18 026869 00", {1: {1: 1}, 2: b"hi"}, id="nested struct and a binary"),
    ],
)
def test_compact_protocol(encoded: str, expected: dict[int, object]) -> None:
    """Bytes by hand: `<delta to the field number><type>` and then the value, ended by a zero byte."""
    data = bytes.fromhex(encoded)
    assert read_struct(data + b"rest") == (expected, len(data))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(b"", IndexError, id="nothing"),
        pytest.param(b"\x15", IndexError, id="cut in a value"),
        pytest.param(b"\x15\xff\xff", IndexError, id="endless varint"),
        pytest.param(b"\x19\x00", KeyError, id="a list"),
        pytest.param(b"\x1c" * 9999, KeyError, id="bottomless nesting"),
    ],
)
def test_hostile_headers_end_in_an_error(data: bytes, error: type[Exception]) -> None:
    """Neither recursion nor memory grows with what the bytes claim."""
    with pytest.raises(error):
        read_struct(data)


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
        pytest.param("15d00f1500", "15d00f1502", "damaged page header", id="no such encoding"),
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
