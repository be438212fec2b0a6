"""Reading the Thrift compact protocol, in which Parquet writes footers and page headers, without trusting a byte of it.

pyarrow says what is in a footer only by calls that end the process when the footer is hostile, and nothing at all of
page headers. So that both see the same file, what generated readers would read otherwise than it is read here is
refused. They take 65537 for field 1, merge a struct that is there twice, cut an integer to the width of its type, and
read the elements of a list as the format has them, whatever its head says; here fields rise, integers fit, and lists
are where the format has them, of what it has there (`Shape`). No writer does otherwise. What a struct holds is returned
by `field << 4 | type`: a field of another type than the format's is not found, which is what generated readers do.
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md)

Whatever the bytes are, each function ends in time linear in their number, with a result or with `ThriftError`.
Cost: skipping the footer of a shard with one row group 0.1 ms, reading one of its 22 chunks or a page header 10 us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

BOOLEAN: Final = 1
BYTE: Final = 3
I16: Final = 4
I32: Final = 5
I64: Final = 6
BINARY: Final = 8
LIST: Final = 9
STRUCT: Final = 12
"""Types of values, as in the heads of fields. Of booleans there are two: 1 is true, and 2 false."""

_BITS: Final = {I16: 16, I32: 32, I64: 64}
_SIZE_BITS: Final = 31
"""Of the size of a text or list."""
_MAX_FIELD: Final = (1 << 15) - 1
_MAX_DEPTH: Final = 8
"""Of structs in each other; Parquet needs 6."""
_LONG_SIZE: Final = 15
"""In the head of a list: its size does not fit, and follows."""


class ThriftError(ValueError):
    """The bytes are no such struct."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What the format says of a struct where it has lists: all else is told by the bytes themselves."""

    items: Mapping[int, Shape | int]
    """By field: the type of a list's elements, or their shape if they are structs; of a struct, its own shape. A struct
    that is not here holds no list."""
    simple: re.Pattern[bytes]
    """Matches nearly all structs of this shape, and no others: they are passed over in one step."""


class Field(NamedTuple):
    """A field of a struct, for `struct_of`."""

    number: int
    kind: int
    value: bytes
    """A pattern."""
    is_optional: bool = False


def struct_of(fields: Sequence[Field], before: int = 0) -> bytes:
    """A pattern: a struct of these fields, in this order. It doubles with each optional one."""
    alternatives = []
    for number, field in enumerate(fields, 1):
        head = re.escape(bytes([(field.number - before) << 4 | field.kind]))
        alternatives.append(head + field.value + struct_of(fields[number:], field.number))
        if not field.is_optional:
            break
    else:
        alternatives.append(rb"\x00")
    return b"(?:%s)" % b"|".join(alternatives)


def list_of(item: bytes, counts: range, kind: int) -> bytes:
    """A pattern: a list of so many elements."""
    heads = {count: re.escape(bytes([count << 4 | kind])) for count in counts}
    return b"(?:%s)" % b"|".join(b"%s(?:%s){%d}" % (head, item, count) for count, head in heads.items())


def _integer(bits: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last have the highest bit set."""
    full, rest = divmod(bits, 7)
    return rb"(?:[\x80-\xff]{0,%d}[\x00-\x7f]|[\x80-\xff]{%d}[\x00-\x%02x])" % (full - 1, full, (1 << rest) - 1)


INT32: Final = _integer(32)
INT64: Final = _integer(64)
NAME: Final = b"(?:%s)" % b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(24))
"""A short text."""


def _heads(*kinds: int) -> bytes:
    """Those of fields of these types, where the field's number is that before it plus 1-15."""
    return b"[" + re.escape(bytes(step << 4 | kind for step in range(1, 16) for kind in kinds)) + b"]"


def _fields(*deeper: bytes) -> bytes:
    """Numbers, short texts and what matches one of `deeper`: too few fields to come near `_MAX_FIELD`."""
    scalars = (_heads(I32) + INT32, _heads(I64) + INT64, _heads(1, 2), _heads(BINARY) + NAME, _heads(BYTE) + b".")
    return b"(?:%s){0,64}+" % b"|".join((*scalars, *deeper))


FLAT: Final = _fields() + rb"\x00"
"""A struct of numbers and short texts."""
PLAIN: Final = Shape(
    {}, re.compile(_fields(_heads(STRUCT) + _fields(_heads(STRUCT) + FLAT) + rb"\x00") + rb"\x00", re.DOTALL)
)
"""A struct without lists, at any depth."""


def read_struct(
    data: bytes, at: int = 0, shape: Shape = PLAIN, *, wanted: frozenset[int] | None = None, depth: int = 0
) -> tuple[dict[int, Any], int]:
    """The struct at `at`: values by `field << 4 | type`, and the place after it.

    Values are int, bool (type BOOLEAN), bytes, list or such a dict; with `wanted`, at every depth, all integers and of
    the others only these. Raises ThriftError.
    """
    fields: dict[int, Any] = {}
    field = 0
    try:
        while head := data[at]:  # a zero byte ends the struct
            at += 1
            kind = head & 0x0F
            if head > 0x0F:
                field += head >> 4
            else:
                field, at = _read_number(data, at, field)
            key = field << 4 | kind
            if kind in _BITS:
                byte = data[at]
                fields[key], at = ((byte >> 1) ^ -(byte & 1), at + 1) if byte < 0x80 else read_integer(data, at, kind)
            elif wanted is None or key in wanted:
                value, at = _read_value(data, at, kind, shape.items.get(field), wanted, depth)
                fields[field << 4 | BOOLEAN if kind == 2 else key] = value
            else:
                at = skip_value(data, at, kind, shape.items.get(field), depth)
    except IndexError:
        raise ThriftError("ends too early") from None
    if field > _MAX_FIELD:  # in the end is early enough: until then they have risen
        raise ThriftError(f"a field {field}")
    return fields, at + 1


def _read_value(
    data: bytes, at: int, kind: int, item: Shape | int | None, wanted: frozenset[int] | None, depth: int
) -> tuple[Any, int]:
    if kind == BINARY:
        return _read_binary(data, at)
    if kind == STRUCT:
        return _read_nested(data, at, item if isinstance(item, Shape) else PLAIN, wanted, depth)
    if kind == LIST and item is not None:
        return _read_list(data, at, item, wanted, depth)
    if kind in (1, 2):
        return kind == 1, at
    if kind == BYTE:
        return data[at], at + 1
    raise ThriftError(f"a value of type {kind}, which the format does not have there")


def _read_nested(
    data: bytes, at: int, shape: Shape, wanted: frozenset[int] | None, depth: int
) -> tuple[dict[int, Any], int]:
    if depth == _MAX_DEPTH:
        raise ThriftError("nested too deep")
    return read_struct(data, at, shape, wanted=wanted, depth=depth + 1)


def _read_binary(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = _read_varint(data, at, _SIZE_BITS)
    if at + length > len(data):
        raise ThriftError("ends too early")
    return data[at : at + length], at + length


def _read_list(
    data: bytes, at: int, item: Shape | int, wanted: frozenset[int] | None, depth: int
) -> tuple[list[Any], int]:
    """Every element takes a byte at least, so a size that lies ends with the data."""
    size, at = read_list_head(data, at, item)
    items = []
    for _ in range(size):
        value: Any
        if isinstance(item, Shape):
            value, at = _read_nested(data, at, item, wanted, depth)
        elif item in _BITS:
            value, at = read_integer(data, at, item)
        else:
            value, at = _read_value(data, at, item, None, wanted, depth)
        items.append(value)
    return items, at


def read_list_head(data: bytes, at: int, item: Shape | int) -> tuple[int, int]:
    """Size of the list at `at`, whose elements must be as the format has them, and the place of the first one.

    Raises ThriftError, or IndexError at the end of data.
    """
    head = data[at]
    if head & 0x0F != (item if isinstance(item, int) else STRUCT):
        raise ThriftError(f"a list of type {head & 0x0F}, which the format does not have there")
    if head >> 4 == _LONG_SIZE:
        return _read_varint(data, at + 1, _SIZE_BITS)
    return head >> 4, at + 1


def read_field_head(data: bytes, at: int, before: int) -> tuple[int, int, int]:
    """Number and type of the field at `at`, whose predecessor has the number `before`, and the place of its value.

    Raises ThriftError, or IndexError at the end of data.
    """
    head = data[at]
    if head > 0x0F:
        field, at = before + (head >> 4), at + 1
        if field > _MAX_FIELD:
            raise ThriftError(f"a field {field}")
    else:
        field, at = _read_number(data, at + 1, before)
    return field, head & 0x0F, at


def _read_number(data: bytes, at: int, before: int) -> tuple[int, int]:
    """The number of a field that follows its head."""
    field, at = read_integer(data, at, I16)
    if field <= before:
        raise ThriftError(f"a field {field} after {before}")
    return field, at


def skip_struct(data: bytes, at: int, shape: Shape = PLAIN, depth: int = 0) -> int:
    """The place after the struct at `at`. Raises ThriftError, or IndexError at the end of data."""
    if run := shape.simple.match(data, at):
        return run.end()
    if depth > _MAX_DEPTH:
        raise ThriftError("nested too deep")
    field = 0
    while data[at]:
        field, kind, at = read_field_head(data, at, field)
        at = skip_value(data, at, kind, shape.items.get(field), depth)
    return at + 1


def skip_value(data: bytes, at: int, kind: int, item: Shape | int | None = None, depth: int = 0) -> int:
    """The place after a field's value of this type; `item` is that of the field in `Shape.items`.

    Raises ThriftError, or IndexError at the end of data.
    """
    if kind in _BITS:
        return _read_varint(data, at, _BITS[kind])[1]
    if kind == BINARY:
        length, at = _read_varint(data, at, _SIZE_BITS)
        return at + length
    if kind == STRUCT:
        return skip_struct(data, at, item if isinstance(item, Shape) else PLAIN, depth + 1)
    if kind == LIST and item is not None:
        return _skip_list(data, at, item, depth)
    if kind in (1, 2):
        return at
    if kind == BYTE:
        return at + 1
    raise ThriftError(f"a value of type {kind}, which the format does not have there")


def _skip_list(data: bytes, at: int, item: Shape | int, depth: int) -> int:
    size, at = read_list_head(data, at, item)
    for _ in range(size):
        at = skip_struct(data, at, item, depth + 1) if isinstance(item, Shape) else skip_value(data, at, item)
    return at


def read_integer(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """A zigzag integer of this type: 0, -1, 1, -2, ... are stored as 0, 1, 2, 3, ...

    Raises ThriftError, or IndexError at the end of data.
    """
    value, at = _read_varint(data, at, _BITS[kind])
    return (value >> 1) ^ -(value & 1), at


def _read_varint(data: bytes, at: int, bits: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, bits, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> bits:
                break
            return value, at
    raise ThriftError(f"an integer of more than {bits} bits")
