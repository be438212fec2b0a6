"""Parquet rows to JSON."""

import datetime
import decimal
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.errors import UsageError
from rollgen.prompts.tables import read_rows

TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
TURN = {"role": "user", "content": "Hi", "name": None}
TIME = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def rows_of(path, *columns, **options):
    names = [f"c{index}" for index in range(len(columns))]
    pq.write_table(pa.Table.from_arrays(list(columns), names), path, **options)
    return [json.loads(row) for row in read_rows(path, "p")]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param(pa.array([[TURN]], TURNS), [{"role": "user", "content": "Hi"}], id="turns"),
        pytest.param(pa.array([{"a": {"x": None, "y": [None]}}]), {"a": {"y": [None]}}, id="null members"),
        pytest.param(pa.array([[("k", None)]], pa.map_(pa.string(), pa.int64())), {"k": None}, id="null in a map"),
        pytest.param(pa.array([[[1], []]]), [[1], []], id="nested lists"),
        pytest.param(pa.array([[1, 2]], pa.list_(pa.int32(), 2)), [1, 2], id="fixed-size list"),
        pytest.param(pa.array([["a"]], pa.large_list(pa.large_string())), ["a"], id="large list"),
        pytest.param(pa.array([2**64 - 1], pa.uint64()), 2**64 - 1, id="uint64"),
        pytest.param(pa.array([0.5], pa.float16()), 0.5, id="half float"),
        pytest.param(pa.array([True]), True, id="boolean"),
        pytest.param(pa.nulls(1), None, id="null"),
        pytest.param(pa.array(["a\n\u2028😀"]), "a\n\u2028😀", id="text"),
        pytest.param(pa.array(["a" * 13], pa.string_view()), "a" * 13, id="text view"),
        pytest.param(pa.array(["a"]).dictionary_encode(), "a", id="dictionary"),
        pytest.param(pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), {"k": 1}, id="map"),
        pytest.param(pa.array([TIME]), "2026-01-02 03:04:05.000000Z", id="timestamp"),
        pytest.param(pa.array([[TIME.date()]]), ["2026-01-02"], id="dates"),
        pytest.param(pa.array([{"t": TIME.time()}]), {"t": "03:04:05.000000"}, id="time in a struct"),
        pytest.param(pa.array([decimal.Decimal("1.50")]), "1.50", id="decimal"),
    ],
)
def test_values(tmp_path, column, value):
    """As JSON has them; what it has no form for becomes text."""
    assert rows_of(tmp_path / "p.parquet", column) == [{"c0": value}]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        pytest.param(pa.array([b"x"]), "p: column c0 is of type binary, which JSON cannot hold", id="binary"),
        pytest.param(pa.array([[{"b": b"x"}]]), "p: column c0[].b is of type binary", id="binary inside"),
        pytest.param(pa.array([datetime.timedelta(1)]), "p: column c0 is of type duration", id="duration"),
        pytest.param(pa.array([[(1, "x")]], pa.map_(pa.int32(), pa.string())), "column c0 is of type map", id="map"),
        pytest.param(
            pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
            "p: rows 0 to 0: a map holds a key twice",
            id="map with a key twice",
        ),
    ],
)
def test_columns_without_a_json_form(tmp_path, column, message):
    """Refused by name, before a row is read where the type tells."""
    with pytest.raises(UsageError, match=re.escape(message)):
        rows_of(tmp_path / "p.parquet", column)


def test_a_column_name_must_be_unique(tmp_path):
    """Else one of them would be lost."""
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), path)
    with pytest.raises(UsageError, match="p: column a occurs twice"):
        list(read_rows(path, "p"))


def test_a_column_name_that_is_not_utf8(tmp_path):
    """Found by changing files at random."""
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["x"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"prompt", b"pr\xffmpt"))
    with pytest.raises(UsageError, match="p: not readable as Parquet"):
        list(read_rows(path, "p"))


def test_rows_of_many_groups_come_in_order(tmp_path):
    """1000 rows in groups of 300, read 256 at a time."""
    rows = rows_of(tmp_path / "p.parquet", pa.array(range(1000)), row_group_size=300)
    assert [row["c0"] for row in rows] == list(range(1000))


@pytest.mark.parametrize("keep", [4, 30, -1], ids=["magic", "some", "all but a byte"])
def test_a_damaged_file_is_refused(tmp_path, keep):
    """Cut anywhere."""
    path = tmp_path / "p.parquet"
    rows_of(path, pa.array(range(1000)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"p: not readable as Parquet \(.*\); copy or write the file again"):
        list(read_rows(path, "p"))
