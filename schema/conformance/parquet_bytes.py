"""Parquet files by hand: footers and page headers taken apart, changed and put together again, true or not.

A Thrift struct is a dict of field number to `(type, value)`, a list `(type of its elements, elements)`: what was read
is written again as the same bytes. Field numbers:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
Fields = dict[int, tuple[int, Any]]
Change = Callable[[Fields], None]

ROW_GROUPS, ROWS_OF_FILE, KEY_VALUES = 4, 3, 5
CHUNKS, ROWS_OF_GROUP = 1, 3
META_DATA = 3
CODEC, VALUES, UNCOMPRESSED, COMPRESSED, DATA_PAGE, DICTIONARY_PAGE = 4, 5, 6, 7, 9, 11
PAGE_UNCOMPRESSED, PAGE_COMPRESSED, PAGE_CRC, DATA_HEADER = 2, 3, 4, 5


def put(fields: Fields, field: int, value: Any) -> None:
    """Change the value of a field that is there."""
    fields[field] = (fields[field][0], value)


def decode(data: bytes, at: int = 0) -> tuple[Fields, int]:
    """The struct at `at`, and the place after it."""
    fields: Fields = {}
    field = 0
    while head := data[at]:
        at += 1
        if head > 0x0F:
            field += head >> 4
        else:
            field, at = _integer(data, at)
        value, at = _value(data, at, head & 0x0F)
        fields[field] = (head & 0x0F, value)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind in (4, I32, I64):
        return _integer(data, at)
    if kind == BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind == STRUCT:
        return decode(data, at)
    assert kind == LIST, kind
    size, element, at = data[at] >> 4, data[at] & 0x0F, at + 1
    if size == 15:
        size, at = _varint(data, at)
    items = []
    for _ in range(size):
        item, at = _value(data, at, element)
        items.append(item)
    return (element, items), at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1


def encode(fields: Fields) -> bytes:
    """A struct, fields in rising order."""
    encoded, before = b"", 0
    for field, (kind, value) in sorted(fields.items()):
        kind = {True: 1, False: 2}[value] if kind in (1, 2) else kind
        step, before = field - before, field
        encoded += bytes([step << 4 | kind]) if step < 16 else bytes([kind]) + zigzag(field)
        encoded += _encode_value(kind, value)
    return encoded + b"\0"


def _encode_value(kind: int, value: Any) -> bytes:
    if kind in (1, 2):
        return b""
    if kind in (4, I32, I64):
        return zigzag(value)
    if kind == BINARY:
        return varint(len(value)) + value
    if kind == STRUCT:
        return encode(value)
    element, items = value
    head = bytes([len(items) << 4 | element]) if len(items) < 15 else bytes([0xF0 | element]) + varint(len(items))
    return head + b"".join(_encode_value(element, item) for item in items)


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def zigzag(value: int) -> bytes:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def footer_start(content: bytes) -> int:
    """Where the footer begins: its length stands before the last magic bytes."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def with_raw_footer(content: bytes, footer: bytes) -> bytes:
    """A file with these bytes as footer."""
    return content[: footer_start(content)] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def with_footer(content: bytes, change: Change) -> bytes:
    """A file whose footer was changed."""
    fields, _ = decode(content, footer_start(content))
    change(fields)
    return with_raw_footer(content, encode(fields))


def first_group(footer: Fields) -> Fields:
    """The first row group of a footer."""
    group: Fields = footer[ROW_GROUPS][1][1][0]
    return group


def meta_of(footer: Fields, leaf: int) -> Fields:
    """The metadata of a column chunk of the first row group."""
    meta: Fields = first_group(footer)[CHUNKS][1][1][leaf][META_DATA][1]
    return meta


def with_page_header(content: bytes, leaf: int, change: Change, change_meta: Change | None = None) -> bytes:
    """A file in which the first page of a chunk has a changed header, moved behind all others to have room for it."""
    fields, _ = decode(content, footer_start(content))
    meta = meta_of(fields, leaf)
    start = meta[DATA_PAGE][1]
    header, end = decode(content, start)
    old = end - start
    change(header)
    pages = encode(header) + content[end : start + meta[COMPRESSED][1]]
    return _with_chunk(content, fields, meta, pages, len(encode(header)) - old, change_meta)


def with_pages(
    content: bytes, leaf: int, pages: bytes, *, values: int, uncompressed: int, encodings: list[int]
) -> bytes:
    """A file in which a chunk of the first row group consists of these pages, the footer saying so."""
    fields, _ = decode(content, footer_start(content))
    meta = meta_of(fields, leaf)

    def change_meta(meta: Fields) -> None:
        put(meta, VALUES, values)
        put(meta, UNCOMPRESSED, uncompressed)
        put(meta, 2, (I32, encodings))
        for field in (DICTIONARY_PAGE, 12, 13, 16):  # statistics of what was there
            meta.pop(field, None)

    return _with_chunk(content, fields, meta, pages, 0, change_meta)


def _with_chunk(
    content: bytes, fields: Fields, meta: Fields, pages: bytes, grown: int, change_meta: Change | None
) -> bytes:
    start = footer_start(content)
    put(meta, DATA_PAGE, start)
    put(meta, COMPRESSED, len(pages))
    put(meta, UNCOMPRESSED, meta[UNCOMPRESSED][1] + grown)
    if change_meta is not None:
        change_meta(meta)
    return with_raw_footer(content[:start] + pages + content[start:], encode(fields))


def data_page(data: bytes, *, uncompressed: int, values: int, encoding: int) -> bytes:
    """A data page of version 1 with RLE levels and the CRC of its data, header in front."""
    header: Fields = {
        1: (I32, 0),
        PAGE_UNCOMPRESSED: (I32, uncompressed),
        PAGE_COMPRESSED: (I32, len(data)),
        PAGE_CRC: (I32, signed_crc(data)),
        DATA_HEADER: (STRUCT, {1: (I32, values), 2: (I32, encoding), 3: (I32, 3), 4: (I32, 3)}),
    }
    return encode(header) + data


def dictionary_page(data: bytes, *, uncompressed: int, values: int) -> bytes:
    """A dictionary page in plain encoding."""
    header: Fields = {
        1: (I32, 2),
        PAGE_UNCOMPRESSED: (I32, uncompressed),
        PAGE_COMPRESSED: (I32, len(data)),
        PAGE_CRC: (I32, signed_crc(data)),
        7: (STRUCT, {1: (I32, values), 2: (I32, 0)}),
    }
    return encode(header) + data


def signed_crc(data: bytes) -> int:
    """CRC-32 as Thrift has it, in an int32."""
    return int.from_bytes(zlib.crc32(data).to_bytes(4, "big"), "big", signed=True)


def levels(runs: list[tuple[int, int]]) -> bytes:
    """Levels 0 or 1 to 3 as RLE runs of (count, level), with their length in front."""
    encoded = b"".join(varint(count << 1) + bytes([level]) for count, level in runs)
    return len(encoded).to_bytes(4, "little") + encoded
