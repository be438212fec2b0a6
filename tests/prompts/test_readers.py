"""JSON objects out of lines."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.prompts.readers import member_texts, object_line, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b'{"a": 1', "broken JSON: Expecting ',' delimiter at column 8", id="cut off"),
        pytest.param(b"{'a': 1}", "broken JSON", id="single quotes"),
        pytest.param(b'{"a": "\x00"}', "broken JSON: Invalid control character", id="raw NUL"),
        pytest.param(b'{"a": 1} {"b": 2}', "broken JSON: Extra data", id="two objects"),
        pytest.param(b'[{"prompt": "x"}]', "a JSON array, not an object", id="array"),
        pytest.param(b'"text"', "a JSON string, not an object", id="string"),
        pytest.param(b"12", "a JSON number, not an object", id="number"),
        pytest.param(b"true", "a JSON boolean, not an object", id="boolean"),
        pytest.param(b"null", "a JSON null, not an object", id="null"),
        pytest.param(b'{"a": "\xff"}', "not UTF-8 at byte 8", id="Latin-1"),
        pytest.param(b'{"a": "\xed\xa0\x80"}', "not UTF-8 at byte 8", id="surrogate in UTF-8"),
        pytest.param(b'[{"prompt": "x"}]', "jq -c '.[]' makes that of an array", id="array, and what to do"),
        pytest.param(b'{"a": NaN}', "NaN is not JSON (in a)", id="NaN"),
        pytest.param(b'{"a": 1, "b": {"c": [0, -Infinity]}}', "-Infinity is not JSON (in b.c[1])", id="Infinity"),
        pytest.param(b'{"a": NaN, "b": }', "NaN is not JSON; use null", id="NaN and broken JSON"),
        pytest.param(b'{"a": 1, "a": 2}', 'key "a" occurs twice', id="duplicate key"),
        pytest.param(b'{"m": [{"b": {"a": 1, "a": 1}}]}', 'key "a" occurs twice', id="duplicate key inside"),
    ],
)
def test_bad_json_is_explained(data, message):
    """One short reason each."""
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_object(data)


def test_a_duplicate_among_many_keys_is_found_at_once():
    """Comparing each of 100,000 with each other would take minutes."""
    members = ", ".join(f'"k{number}": 1' for number in range(100_000))
    with pytest.raises(ValueError, match='key "k99999" occurs twice'):
        parse_object(f'{{{members}, "k99999": 1}}'.encode())


@pytest.mark.parametrize(
    "value",
    ["1e400", "0.10", "-0", "1E5", "1" * 70, "9" * 5000, r'"\ud800"', r'"\u0000"', '{"b" : [1,  2]}', '"\u2028"'],
    ids=["1e400", "0.10", "-0", "1E5", "70 digits", "5000 digits", "surrogate", "NUL", "spacing", "U+2028"],
)
def test_values_survive_as_their_source_text(value):
    """Python would change most of these on a round trip."""
    _, text = parse_object(f'\t{{ "a" :  {value} , "z":1}} '.encode())
    assert member_texts(text) == {"a": ('"a"', value), "z": ('"z"', "1")}


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_member_texts_cover_any_object(fields, indent, ascii_only):
    """Every member is found again, whatever the spacing and escaping."""
    source = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    parsed, text = parse_object(source)
    assert parsed == fields
    assert {key: json.loads(value) for key, (_, value) in member_texts(text).items()} == fields
    assert [json.loads(key) for key, _ in member_texts(text).values()] == list(fields)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        pytest.param({"a": "é\n\u2028"}, '{"a": "é\\n\u2028"}'.encode(), id="text stays readable"),
        pytest.param({"a": "\ud800\\"}, rb'{"a": "\ud800\\"}', id="half of a surrogate pair"),
        pytest.param({"a": (1, 2.5, None, True)}, b'{"a": [1, 2.5, null, true]}', id="tuple"),
        pytest.param({"a": float("nan")}, b'{"a": NaN}', id="NaN is left to the reader"),
        pytest.param({"a": 10**69}, b'{"a": 1' + b"0" * 69 + b"}", id="70 digits"),
    ],
)
def test_rows_from_python_become_lines(row, line):
    """On one line each, and the reader gets back what went in."""
    assert object_line(row) == line
    assert b"\n" not in line


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"a": {"b": [0, b"x"]}}, "a.b[1]: a bytes is not a JSON value", id="bytes"),
        pytest.param({"a": np.int64(1)}, "a: a numpy.int64 is not a JSON value", id="numpy"),
        pytest.param({"a": {1: 2}}, "a: key 1 is not text", id="number as key"),
        pytest.param({1: 2}, "the row: key 1 is not text", id="number as field"),
        pytest.param({"a": {1}}, "a: a set is not a JSON value", id="set"),
    ],
)
def test_what_json_cannot_hold_is_named(row, message):
    """The field, and its type."""
    with pytest.raises(ValueError, match=re.escape(message)):
        object_line(row)


def test_a_row_inside_itself_is_refused():
    """There is no end to it."""
    row = {}
    row["a"] = [row]
    with pytest.raises(ValueError, match="nested too deeply, or in itself"):
        object_line(row)
