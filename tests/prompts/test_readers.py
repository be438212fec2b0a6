"""Lines and JSON objects out of bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgen.errors import UsageError
from rollgen.prompts.readers import PromptFiles, member_texts, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def lines_of(tmp_path, content, limit=None):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    return [(line.number, line.data) for line in PromptFiles([path], limit)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"a\nb\n", [(1, b"a"), (2, b"b")], id="plain"),
        pytest.param(b"a\nb", [(1, b"a"), (2, b"b")], id="no last newline"),
        pytest.param(b"\xef\xbb\xbfa\n", [(1, b"a")], id="byte order mark"),
        pytest.param(b"a\n\xef\xbb\xbfb\n", [(1, b"a"), (2, b"b")], id="byte order mark of an appended file"),
        pytest.param(b"a\r\nb\r\n", [(1, b"a"), (2, b"b")], id="CRLF"),
        pytest.param(b"\n \t\na\n\n\nb\n\n", [(3, b"a"), (6, b"b")], id="blank lines are counted, not read"),
        pytest.param("a\u2028b\u2029c\u0085d\n".encode(), [(1, "a\u2028b\u2029c\u0085d".encode())], id="U+2028"),
        pytest.param(b"a\x0cb\x0bc\x1cd\n", [(1, b"a\x0cb\x0bc\x1cd")], id="other line breaks of str.splitlines"),
        pytest.param(b"a\rb\n", [(1, b"a\rb")], id="a lone CR is data"),
    ],
)
def test_lines_end_at_newline_only(tmp_path, content, expected):
    """Nothing but `\\n` ends a line, and line numbers are those of an editor."""
    assert lines_of(tmp_path, content) == expected


def test_limit_stops_reading(tmp_path):
    """Rows beyond the limit are not read; the source covers what was read."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"a\nbb\nccc\n")
    files = PromptFiles([path], limit=2)
    assert [line.data for line in files] == [b"a", b"bb"]
    assert files.sources[0].bytes == 5  # "a\n" and "bb\n"


def test_files_after_the_limit_may_be_empty(tmp_path):
    """A file that is not reached is not judged."""
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(b"a\n")
    second.write_bytes(b"")
    assert len(list(PromptFiles([first, second], limit=1))) == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"], ids=["empty", "blank lines", "only a mark"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    """An empty file is a mistake that the user wants to hear about."""
    with pytest.raises(UsageError, match=r"prompts\.jsonl: no prompts"):
        lines_of(tmp_path, content)


def test_missing_file_and_directory_are_refused_at_once(tmp_path):
    """Before anything is read."""
    with pytest.raises(UsageError, match="cannot read it: No such file"):
        PromptFiles([tmp_path / "absent.jsonl"])
    with pytest.raises(UsageError, match="not a regular file"):
        PromptFiles([tmp_path])


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
        pytest.param(b'{"a": NaN}', "NaN is not JSON", id="NaN"),
        pytest.param(b'{"a": [-Infinity]}', "-Infinity is not JSON", id="Infinity"),
        pytest.param(b'{"a": 1, "a": 2}', 'key "a" occurs twice', id="duplicate key"),
        pytest.param(b'{"m": [{"b": {"a": 1, "a": 1}}]}', 'key "a" occurs twice', id="duplicate key inside"),
    ],
)
def test_bad_json_is_explained(data, message):
    """One short reason each."""
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        parse_object(data)


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
