"""How many rows of a Parquet file of prompts may be decoded at a time, said by its page headers before any is.

Such files come from anywhere, with row groups of gigabytes, without checksums, in any encoding; and a few hundred bytes
can refer thousands of times to one text of megabytes, or repeat one number 2^28 times in one row. What a batch of `n`
rows comes to is bounded from above:

    flat column       the pages that `n` rows can touch, and for each row what is not in its page: a text is at most as
                      long as the longest one in the dictionary
    list              the runs that `n` rows can touch. A run is a page in which a row begins, and the pages after it in
                      which none does: each has one row or more

and the whole column chunk is a bound as well. Repetition levels say whether a row begins in a page. Where a list's
texts are in a dictionary and may come to much, the bound would be far from the truth: they are to be read as indices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from rollgen.format.pages import read_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow.parquet as pq

    from rollgen.format.footer import Chunk
    from rollgen.format.pages import Page
    from rollgen.format.parquet import CheckedParquet

MAX_ROWS: Final = 256
MAX_BATCH_BYTES: Final = 512 << 20
_SMALL: Final = 64 << 20
"""Bytes of a list's column chunk for which no level is looked at, and of a dictionary's texts that may be repeated."""
_LEVEL_BYTES: Final = 8
"""Two levels of 16 bits for each value, and an offset or an index."""
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
_BY_DICTIONARY: Final = frozenset({2, 8})
_DELTA_BYTE_ARRAY: Final = 7
"""`enum Encoding`. With the latter, each text may begin as the one before it does."""
_CODECS: Final = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_UNCOMPRESSED: Final = 0
_LENGTH_BYTES: Final = 4
_SEARCHED_TEXTS: Final = 1 << 18
_SEARCHED_RUNS: Final = 1 << 12
_SEARCHED_BYTES: Final = 64
"""What is looked at of a dictionary, of a page's levels and of each run of packed ones: beyond, the worst counts."""


class Batches(NamedTuple):
    """How to read a row group."""

    rows: int
    """At a time."""
    dictionaries: tuple[str, ...]
    """Paths of leaf columns that must be read as dictionaries."""


class _Cost(NamedTuple):
    """Bytes that a leaf column decodes to, at most."""

    path: str
    run: int
    """The largest: a page of a flat column."""
    run_rows: int
    """The fewest in a run that is not the last."""
    row: int
    """Beyond its run."""
    spills: bool
    """Whether a row may end in the run after that it begins in."""
    total: int
    by_dictionary: bool

    def of(self, rows: int) -> int:
        """What so many rows decode to: they can lie in a part of a first run and of a last one, and in a short one."""
        runs = min(rows + self.spills, (rows - 1) // self.run_rows + 3)
        return min(self.total, runs * self.run + rows * self.row)


def safe_batches(file: CheckedParquet, index: int) -> Batches:
    """The most rows, up to 256, that come to 512 MiB at most. Raises ValueError where one row may come to more."""
    group, schema = file.groups[index], file.file.metadata.schema
    costs = [_Column(file, group.chunk(leaf), schema.column(leaf)).cost(group.rows) for leaf in range(group.columns)]
    rows = MAX_ROWS
    while sum(cost.of(rows) for cost in costs) > MAX_BATCH_BYTES:
        rows //= 2
        if not rows:
            worst = max(costs, key=lambda cost: cost.of(1))
            raise ValueError(
                f"{worst.path}: a row may decode to {worst.of(1) >> 20} MiB; "
                f"the limit, for all columns together, is {MAX_BATCH_BYTES >> 20} MiB; "
                "write smaller row groups, and lists of text without DELTA_BYTE_ARRAY"
            )
    return Batches(rows, tuple(cost.path for cost in costs if cost.by_dictionary))


@dataclass(frozen=True)
class _Column:
    """A leaf column of one row group."""

    file: CheckedParquet
    chunk: Chunk
    schema: pq.ColumnSchema

    def cost(self, rows: int) -> _Cost:
        """Raises ValueError for pages that cannot be, and for a number of values that does not fit the rows."""
        pages = [page for _, page in self.pages]
        counts = [page.values for page in pages if page.values]
        values = sum(counts)
        if values < rows or (values > rows and not self.is_list):
            raise ValueError(f"{self.schema.path}: {values} values for {rows} rows")
        sizes = [page.uncompressed + page.values * (self.width + self._text_bytes(page)) for page in pages]
        total = sum(sizes)
        if self.is_list:
            run = total if total <= _SMALL else max(self._runs(sizes))
            return _Cost(self.schema.path, run, 1, 0, True, total, self.by_dictionary)
        run, text = (max(map(of, pages), default=0) for of in (attrgetter("uncompressed"), self._text_bytes))
        return _Cost(self.schema.path, run, min(counts[:-1], default=rows), self.width + text, False, total, False)

    @cached_property
    def pages(self) -> list[tuple[int, Page]]:
        """All of them, with their places."""
        return list(read_pages(self.file.descriptor, self.chunk, self.file.size))

    @property
    def is_list(self) -> bool:
        return bool(self.schema.max_repetition_level > 0)

    @property
    def width(self) -> int:
        """Bytes of a value and its levels, without its text."""
        return _LEVEL_BYTES + (_WIDTHS.get(self.schema.physical_type) or int(self.schema.length))

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest text in the dictionary, or more."""
        if self.schema.physical_type != "BYTE_ARRAY":
            return 0
        return max((self._longest_text(*item) for item in self.pages if item[1].is_dictionary), default=0)

    @cached_property
    def by_dictionary(self) -> bool:
        """Whether texts of a list may come to much, because many values may refer to one."""
        repeated = sum(page.values for _, page in self.pages if page.encoding in _BY_DICTIONARY)
        return self.is_list and repeated * self.longest > _SMALL

    def _text_bytes(self, page: Page) -> int:
        """Bytes that each value of a page may have beyond what is stored of it."""
        if page.encoding == _DELTA_BYTE_ARRAY:
            return page.uncompressed
        return self.longest if page.encoding in _BY_DICTIONARY and not self.by_dictionary else 0

    def _longest_text(self, position: int, page: Page) -> int:
        if page.uncompressed > MAX_BATCH_BYTES or (data := self._content(position, page)) is None:
            return page.uncompressed
        longest = at = 0
        for _ in range(_SEARCHED_TEXTS):
            if at >= len(data):
                return longest
            length = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            longest, at = max(longest, length), at + _LENGTH_BYTES + length
        return page.uncompressed

    def _runs(self, sizes: Iterable[int]) -> Iterator[int]:
        """Bytes of each page in which a row begins and of those after it in which none does."""
        run = 0
        for (position, page), size in zip(self.pages, sizes, strict=True):
            if page.values and self._begins_row(position, page):
                yield run
                run = 0
            run += size
        yield run

    def _begins_row(self, position: int, page: Page) -> bool:
        """Whether that is certain."""
        width = self.schema.max_repetition_level.bit_length()
        if not page.has_hybrid_levels:
            return False
        if page.level_bytes is not None:
            start = position + page.header
            return _has_zero(os.pread(self.file.descriptor, page.level_bytes, start), width, page.values)
        if page.uncompressed > MAX_BATCH_BYTES or (data := self._content(position, page)) is None:
            return False
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        return _has_zero(data[_LENGTH_BYTES : _LENGTH_BYTES + length], width, page.values)

    def _content(self, position: int, page: Page) -> bytes | None:
        """What is in a page, decompressed; None for a codec that pyarrow has no such function for."""
        data = os.pread(self.file.descriptor, page.bytes - page.header, position + page.header)
        if self.chunk.codec == _UNCOMPRESSED:
            return data
        if self.chunk.codec not in _CODECS:
            return None
        size = page.uncompressed - page.header
        return bytes(pa.decompress(data, decompressed_size=size, codec=_CODECS[self.chunk.codec], asbytes=True))


def _has_zero(levels: bytes, width: int, count: int) -> bool:
    """Whether one of the first `count` numbers of `width` bits is known to be zero.

    They are in the hybrid of runs and packed bits: https://parquet.apache.org/docs/file-format/data-pages/encodings/.
    """
    at = 0
    for _ in range(_SEARCHED_RUNS):
        head, at = _varint(levels, at)
        if count <= 0 or not head:
            return False
        if head & 1:  # packed, eight numbers a unit
            size, numbers = (head >> 1) * width, (head >> 1) * 8
            found = _has_packed_zero(levels[at : at + min(size, _SEARCHED_BYTES)], width, count)
        else:
            size, numbers = (width + 7) // 8, head >> 1
            found = at + size <= len(levels) and not any(levels[at : at + size])
        if found:
            return True
        at, count = at + size, count - numbers
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of at most 32 bits, 0 where there is none, and the place after it."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return 0, at


def _has_packed_zero(data: bytes, width: int, count: int) -> bool:
    bits, mask = int.from_bytes(data, "little"), (1 << width) - 1
    return any(not bits >> (place * width) & mask for place in range(min(count, len(data) * 8 // width)))
