"""What pyarrow does not check about Parquet pages: that each carries a checksum, and that its header is sane.

`page_checksum_verification=True` verifies the CRC-32 of a page's *data*, and only where there is one: a page without is
passed silently, and so is a page whose *header* was damaged in a way that still decodes (measured: one flipped bit of
`num_values` drops the last values of a list column without an error). Nor is there a limit: pages of 562 bytes decode
to 2^27 ids, of 32 KB to a text of 1 GB. `check_chunk` walks the headers before anything is decoded, some 6 us each,
and says how much will come of it.

Headers are Thrift structs, `struct PageHeader` in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from rollgen.format.footer import Chunk
from rollgen.format.thrift import I32, STRUCT, ThriftError, read_struct

_HEADER_BYTES: Final = 32 << 10
"""Upper bound of a header: four statistics of at most 4 KiB each, and a few integers."""
_WINDOW_BYTES: Final = 64 << 10
"""Read at a time: most column chunks are smaller, and each read gives the GIL away."""

_PAGE_TYPE: Final = 1 << 4 | I32
_UNCOMPRESSED_SIZE: Final = 2 << 4 | I32
_COMPRESSED_SIZE: Final = 3 << 4 | I32
_CRC: Final = 4 << 4 | I32
_NUM_VALUES: Final = 1 << 4 | I32
_LEVEL_BYTES: Final = 6 << 4 | I32
_LEVEL_ENCODING: Final = 4 << 4 | I32
_RLE: Final = 3
_DICTIONARY_PAGE: Final = 2
_DATA_PAGE_V2: Final = 3
_NESTED: Final = {
    0: (5 << 4 | STRUCT, 2 << 4 | I32),
    _DICTIONARY_PAGE: (7 << 4 | STRUCT, 2 << 4 | I32),
    _DATA_PAGE_V2: (8 << 4 | STRUCT, 4 << 4 | I32),
}
"""Page type (data, dictionary, data v2) to the field of its own header, and to that of the encoding in there."""
_DO_NOT_ADD_UP: Final = "the page headers do not add up to what the footer says"


class Content(NamedTuple):
    """What a column chunk decompresses to."""

    bytes: int
    dictionary: int
    """Bytes of its dictionary page, which any number of values may refer to; 0 where it has none."""


def check_chunk(file: int, chunk: Chunk, size: int) -> Content:
    """Walk the pages of a chunk of the file with this descriptor and `size`, reading their headers only.

    Raises ValueError for a chunk outside the file, for a page without checksum, and for headers that do not add up to
    what the footer says.
    """
    values = uncompressed = dictionary = 0
    for position, page in read_pages(file, chunk, size):
        if not page.has_checksum:
            raise ValueError(f"the page at byte {position} carries no checksum")
        if page.encoding not in chunk.encodings:
            raise ValueError(f"the page header at byte {position} contradicts the footer")
        if page.is_dictionary:
            dictionary += page.uncompressed
        values += page.values
        uncompressed += page.uncompressed
    if (values, uncompressed) != (chunk.values, chunk.uncompressed):
        raise ValueError(_DO_NOT_ADD_UP)
    return Content(uncompressed, dictionary)


def read_pages(file: int, chunk: Chunk, size: int) -> Iterator[tuple[int, Page]]:
    """Place and header of each page of a chunk, the dictionary's included; checksums are not asked for.

    Raises ValueError for a chunk outside the file, for what is no header, and for pages that overrun the chunk.
    """
    position, end = chunk.start, chunk.start + chunk.bytes
    if not 0 <= position <= end <= size:
        raise ValueError(f"pages at byte {position} to {end} of {size}, which cannot be")
    start, window = 0, b""
    while position < end:
        if position + _HEADER_BYTES > start + len(window) < end:
            start, window = position, os.pread(file, min(_WINDOW_BYTES, end - position), position)
        page = _read_page_header(window, position - start)
        if page is None:
            raise ValueError(f"damaged page header at byte {position}")
        yield position, page
        position += page.bytes
    if position != end:
        raise ValueError(_DO_NOT_ADD_UP)


class Page(NamedTuple):
    """What the header of a page says."""

    header: int
    """Bytes of the header itself."""
    bytes: int
    """Header and data."""
    uncompressed: int
    """The same, decompressed."""
    values: int
    """0 for a dictionary page."""
    encoding: int
    is_dictionary: bool
    has_checksum: bool
    level_bytes: int | None
    """Of the repetition levels, which lie uncompressed behind the header of a data page v2; None for other pages."""
    has_hybrid_levels: bool
    """Whether repetition levels are in the hybrid of runs and packed bits: always, but for the oldest writers."""


def _read_page_header(window: bytes, at: int) -> Page | None:
    """The page whose header is at this place, or None when there is none."""
    try:
        header, end = read_struct(window, at)
        kind = header[_PAGE_TYPE]
        nested_field, encoding_field = _NESTED[kind]
        nested: dict[int, Any] = header[nested_field]
        sizes, values = (header[_COMPRESSED_SIZE], header[_UNCOMPRESSED_SIZE]), nested[_NUM_VALUES]
        if min(*sizes, values) < 0:
            return None
        is_dictionary = kind == _DICTIONARY_PAGE
        return Page(
            header=end - at,
            bytes=end - at + sizes[0],
            uncompressed=end - at + sizes[1],
            values=0 if is_dictionary else values,
            encoding=nested[encoding_field],
            is_dictionary=is_dictionary,
            has_checksum=_CRC in header,
            level_bytes=nested[_LEVEL_BYTES] if kind == _DATA_PAGE_V2 else None,
            has_hybrid_levels=kind == _DATA_PAGE_V2 or nested.get(_LEVEL_ENCODING) == _RLE,
        )
    except (KeyError, ThriftError):
        return None
