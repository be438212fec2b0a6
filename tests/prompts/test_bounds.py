"""What a batch of rows may come to is known before it is decoded."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.errors import UsageError
from rollgen.format.pages import read_pages
from rollgen.format.parquet import open_parquet
from rollgen.prompts import bounds, tables
from rollgen.prompts.bounds import safe_batches
from rollgen.prompts.tables import read_rows

KIB = 1 << 10
CHATS = pa.list_(pa.struct([("content", pa.string())]))


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """A thousandth of the real ones: 512 KiB a batch, of which 64 KiB are not looked at, and 64 KiB a row."""
    monkeypatch.setattr(bounds, "MAX_BATCH_BYTES", 512 * KIB)
    monkeypatch.setattr(bounds, "_SMALL", 64 * KIB)
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 64 * KIB)


def write(path, column, **options):
    pq.write_table(
        pa.table({"c": column}),
        path,
        **{"compression": "zstd", "data_page_size": 4 * KIB, "write_batch_size": 8} | options,
    )
    return path


def batches(path):
    with open_parquet(path) as file:
        return [safe_batches(file, index) for index in range(len(file.groups))]


def contents(path):
    return [json.loads(row)["c"] for row in read_rows(path, "p")]


def texts(count, size):
    """Texts that differ and compress well."""
    return [f"{number:08}" + "x" * (size - 8) for number in range(count)]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
@pytest.mark.parametrize("use_dictionary", [False, True])
def test_a_large_row_group_of_small_chats(tmp_path, version, codec, use_dictionary):
    """2,000 chats of two texts of 1 KiB: 4 MiB in one row group, and no row may come to more than a page or two."""
    column = pa.array([[{"content": text}, {"content": text[::-1]}] for text in texts(2000, KIB)], CHATS)
    options = {"compression": codec, "data_page_version": version, "use_dictionary": use_dictionary}
    path = write(tmp_path / "p", column, dictionary_pagesize_limit=16 * KIB, **options)
    [(rows, _)] = batches(path)
    assert rows >= 16
    assert contents(path) == column.to_pylist()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_row_of_many_pages(tmp_path, version):
    """Other writers cut rows anywhere. Here the levels of all pages but the first say that a row goes on.

    Each page has a run of some zeros (two bytes: twice their number, and the zero), behind its length in pages v1.
    """
    column = pa.array([[text] for text in texts(1000, KIB)])
    options = {"compression": "none", "data_page_version": version, "use_dictionary": False}
    path = write(tmp_path / "p", column, **options)
    assert batches(path)[0].rows >= 16
    with open_parquet(path) as file:
        pages = list(read_pages(file.descriptor, file.groups[0].chunk(0), file.size))
    content = bytearray(path.read_bytes())
    for position, page in pages[1:]:
        start = position + page.header + (4 if version == "1.0" else 0)
        assert content[start : start + 2] == bytes([2 * page.values, 0])
        content[start + 1] = 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.list\.element: a row may decode to 1 MiB"):
        batches(path)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_same_texts_in_one_row(tmp_path, version, codec):
    """4 MiB in one row."""
    column = pa.array([[{"content": text} for text in texts(4000, KIB)]], CHATS)
    path = write(tmp_path / "p", column, compression=codec, data_page_version=version, use_dictionary=False)
    with pytest.raises(
        UsageError, match=r"p: not readable as Parquet \(c\.list\.element\.content: a row may decode to"
    ):
        contents(path)


def test_one_number_many_times(tmp_path):
    """A list of 2^18 zeros takes a hundred bytes, and 16 for each of them once decoded."""
    path = write(tmp_path / "p", pa.array([[0] * (1 << 18)], pa.list_(pa.int8())))
    assert path.stat().st_size < 2 * KIB
    with pytest.raises(UsageError, match=r"c\.list\.element: a row may decode to 3 MiB"):
        contents(path)


def test_a_long_text(tmp_path):
    """Of 900 KiB."""
    path = write(tmp_path / "p", pa.array(["x" * 900 * KIB]), use_dictionary=False)
    with pytest.raises(UsageError, match="c: a row may decode to 0 MiB; the limit"):
        contents(path)


def test_texts_that_begin_alike(tmp_path):
    """With DELTA_BYTE_ARRAY 400 texts of 8 KiB, each but for its end as the one before it, are stored as one."""
    column = pa.array([["x" * 8 * KIB + f"{number:03}" for number in range(400)]])
    options = {"use_dictionary": False, "column_encoding": {"c.list.element": "DELTA_BYTE_ARRAY"}}
    with pytest.raises(UsageError, match=r"c\.list\.element: a row may decode to"):
        contents(write(tmp_path / "p", column, data_page_size=64 * KIB, **options))


def test_one_text_for_many_rows(tmp_path):
    """512 rows of one text of 16 KiB are read a few at a time: 16 come to 256 KiB, and 32 to all that a batch may."""
    path = write(tmp_path / "p", pa.array(["x" * 16 * KIB] * 512))
    [(rows, dictionaries)] = batches(path)
    assert (rows, dictionaries) == (16, ())
    assert contents(path) == ["x" * 16 * KIB] * 512


def test_one_text_for_many_values_of_lists(tmp_path):
    """Read as indices, and looked up for as many rows at a time as one row may have bytes."""
    column = pa.array([[{"content": "x" * 16 * KIB}] * 2, None, [{"content": None}]] * 50, CHATS)
    path = write(tmp_path / "p", column)
    assert batches(path) == [(256, ("c.list.element.content",))]
    without_nulls = [
        None if row is None else [{k: v for k, v in turn.items() if v} for turn in row] for row in column.to_pylist()
    ]
    assert contents(path) == without_nulls


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([{"content": "x" * 16 * KIB}] * 5, id="text that is stored once"),
        pytest.param([{"content": ""}] * 3000, id="names of members"),
        pytest.param([None] * 9000, id="nulls"),
    ],
)
def test_a_row_that_comes_to_more_than_it_is_stored_in(tmp_path, row):
    """More than 64 KiB as JSON, the second of three rows."""
    path = write(tmp_path / "p", pa.array([[], row, []], CHATS), data_page_size=1 << 20)
    with pytest.raises(UsageError, match=r"p: row 1: 0 MiB; the limit is 0 MiB, which no prompt needs; remove the row"):
        contents(path)


@pytest.mark.parametrize(
    ("levels", "width", "count", "has_zero"),
    [
        pytest.param(b"\x04\x00", 1, 2, True, id="a run of zeros"),
        pytest.param(b"\x04\x01", 1, 2, False, id="a run of ones"),
        pytest.param(b"\x04\x01\x04\x00", 1, 4, True, id="ones, then zeros"),
        pytest.param(b"\x04\x01\x04\x00", 1, 2, False, id="zeros behind the last number"),
        pytest.param(b"\x03\xff", 1, 8, False, id="packed ones"),
        pytest.param(b"\x03\x7f", 1, 8, True, id="packed, the last is zero"),
        pytest.param(b"\x03\x7f", 1, 7, False, id="packed, zero where there is no number"),
        pytest.param(b"\x03\x55\x51", 2, 8, True, id="packed in two bits, the sixth is zero"),
        pytest.param(b"\x03\x55\x55", 2, 8, False, id="packed in two bits"),
        pytest.param(b"\x04", 1, 2, False, id="cut"),
        pytest.param(b"\x00\x00", 1, 2, False, id="a run of none"),
        pytest.param(b"\xff" * 6, 1, 8, False, id="a number that is too long"),
        pytest.param(b"", 1, 8, False, id="nothing"),
    ],
)
def test_levels(levels, width, count, has_zero):
    """What is not sure counts as no."""
    assert bounds._has_zero(levels, width, count) is has_zero
