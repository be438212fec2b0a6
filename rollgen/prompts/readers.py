r"""Lines to JSON objects. Nothing is inferred, and what is not used is kept as it was.

A line must be one JSON object (RFC 8259) in UTF-8. Refused, because readers disagree on what they mean: NaN and
Infinity, and a key that occurs twice in an object, at any depth. Numbers of any size are fine: metadata is kept as the
source text of its values, so that 70-digit integers, `1e400`, `0.10` and `\ud800` (half of a surrogate pair) survive
to the letter. Integers beyond 640 digits count as infinite where a number is needed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from json.decoder import JSONDecodeError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTEGER_DIGITS = 640
"""Python converts this many digits under any `sys.set_int_max_str_digits`."""
_SPACE = re.compile(r"[ \t\r\n]*")


def parse_object(data: bytes) -> tuple[dict[str, Any], str]:
    """A line's JSON object and the line as text. Raises ValueError saying what is wrong and what to do.

    Raises RecursionError for JSON nested some hundred levels deep.
    """
    try:
        text = data.decode("utf-8")
        fields = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    except _NotJsonError as error:
        raise ValueError(f"{error} is not JSON{_place_of_constant(text)}; use null or a string") from None
    except JSONDecodeError as error:
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}; {_fix(text)}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {_JSON_TYPES[type(fields)]}, not an object; {_fix(text)}")
    return fields, text


def object_line(fields: Mapping[str, Any]) -> bytes:
    """A row from Python as the text of a JSON object, in one line; halves of surrogate pairs are written as escapes.

    Raises ValueError naming the field whose value is not a dict, list, tuple, text, number, boolean or None.
    """
    try:
        _check_json_value("", fields := dict(fields))
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace")
    except RecursionError:
        raise ValueError("nested too deeply, or in itself; flatten it or keep it as a string") from None


def _check_json_value(place: str, value: object) -> None:
    """Raise ValueError naming the `place` inside a row of something that JSON has no form for."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place or 'the row'}: key {key!r} is not text; make it a str")
            _check_json_value(f"{place}.{key}" if place else key, item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json_value(f"{place}[{index}]", item)
    elif not (value is None or isinstance(value, str | int | float)):
        kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise ValueError(f"{place}: a {kind} is not a JSON value; convert it to text, a number or a list")


def member_texts(text: str) -> dict[str, tuple[str, str]]:
    """Source texts of the key (quotes included) and the value of each member of an object that `parse_object` took."""
    members: dict[str, tuple[str, str]] = {}
    position = _skip_space(text, text.index("{") + 1)
    while text[position] != "}":
        key_start = position
        key, position = _DECODER.raw_decode(text, key_start)
        key_text = text[key_start:position]
        value_start = _skip_space(text, _skip_space(text, position) + 1)  # + 1: the colon
        _, position = _DECODER.raw_decode(text, value_start)
        members[key] = (key_text, text[value_start:position])
        position = _skip_space(text, position)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return members


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {json.dumps(repeated)} occurs twice in one object; keep one")
    return fields


def _refuse_constant(name: str) -> None:
    raise _NotJsonError(name)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _INTEGER_DIGITS else float(digits)


class _NotJsonError(ValueError):
    """NaN or an infinity; the message is its spelling."""


def _place_of_constant(text: str) -> str:
    """Where in a JSON text the first NaN or infinity stands, as ` (in scores[2])`; empty if the rest is broken too."""
    try:
        fields = json.loads(text, parse_constant=_NotJsonError, parse_int=str)
    except JSONDecodeError:
        return ""
    place = _find_constant(fields, "")
    return f" (in {place})" if place else ""


def _find_constant(value: object, place: str) -> str | None:
    if isinstance(value, dict):
        inside = ((f"{place}.{key}" if place else key, item) for key, item in value.items())
    elif isinstance(value, list):
        inside = ((f"{place}[{index}]", item) for index, item in enumerate(value))
    else:
        return place if isinstance(value, _NotJsonError) else None
    return next((found for name, item in inside if (found := _find_constant(item, name)) is not None), None)


def _fix(text: str) -> str:
    if text.startswith("["):
        return "write one JSON object a line (jq -c '.[]' makes that of an array)"
    return "write one JSON object a line"


_JSON_TYPES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=_integer)
