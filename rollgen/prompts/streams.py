"""Bytes of a prompt file to lines: what a file is, its first bytes say, whatever its name.

Plain text, gzip (any number of members) and zstd (any number of frames, skippable ones too, windows up to 2 GiB) are
read as a stream in flat memory. A compressed stream that ends early or fails its own checksum is refused: half of a
file of prompts looks like a whole one. Lines end at `\\n` and nowhere else. A few kilobytes can decompress to lines or
to blanks without end: neither may be longer than any row is.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from functools import partial
from typing import TYPE_CHECKING, Protocol

import zstandard

from rollgen.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PARQUET = b"PAR1"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_ZSTD = tuple(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16))
"""Frames without content, which parallel compressors put first (RFC 8878, 3.1.2)."""
_UNREADABLE = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"ARROW1": "an Arrow file",
}
_MAGIC_BYTES = 6
_BLOCK = 16 << 10
"""Bytes decompressed at a time: a hostile zstd block grows 32,768-fold, so at most 512 MiB come of it."""
_BUFFER = 128 << 10
MAX_ROW_BYTES = 64 << 20
"""Of a line, its end included. A longer one is not a prompt but a file without line ends, which would fill the memory.

Rows of tables have the same limit.
"""
_MAX_BLANK_BYTES = 16 << 20
"""Of lines with nothing on them, between two rows."""
_FEW_BLANK_BYTES = 1 << 10
"""More of them are skipped in blocks."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_MAX_WINDOW = 1 << 31


class Tally:
    """Size and hash of what was read of a file."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Count the next bytes."""
        self.bytes += len(data)
        self._sha256.update(data)

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of all bytes so far."""
        return self._sha256.hexdigest()


def is_parquet(file: io.BufferedReader) -> bool:
    """Whether a file at its start is Parquet."""
    return file.peek(_MAGIC_BYTES).startswith(_PARQUET)


def read_lines(file: io.BufferedReader, label: str, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """The lines of a text file at its start, decompressed, each with its number from 1 and without space around it.

    Blank lines count but do not come. `tally` gets the bytes as they lie there: plain text line by line, compressed
    text in blocks of 16 KiB, as far as they were needed. Raises UsageError, naming `label`, for a damaged or unreadable
    file and for a line that cannot be one.
    """
    start = file.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]
    for magic, what in _UNREADABLE.items():
        if start.startswith(magic):
            raise UsageError(f"{label}: {what}; give JSON Lines (also as .gz or .zst) or Parquet")
    if start.startswith(_GZIP):
        yield from _split(_inflate(file, tally, _new_gunzip, f"{label}: the gzip data", "gzip -t"), label)
    elif start.startswith((_ZSTD, *_SKIPPABLE_ZSTD)):
        yield from _split(_inflate(file, tally, _new_unzstd, f"{label}: the zstd data", "zstd -t"), label)
    else:
        yield from _split(file, label, tally)


def _split(file: io.BufferedReader, label: str, tally: Tally | None = None) -> Iterator[tuple[int, bytes]]:
    number = blank = 0
    while piece := _blank_lines(file) if blank > _FEW_BLANK_BYTES else file.readline(MAX_ROW_BYTES):
        if tally is not None:
            tally.add(piece)
        number += piece.count(b"\n") or 1  # the last line may lack its end
        if len(piece) == MAX_ROW_BYTES:
            raise UsageError(f"{label}:{number}: a line of {_mib(MAX_ROW_BYTES)} or more; write one JSON object a line")
        if row := piece.removeprefix(_BYTE_ORDER_MARK).strip(_SPACE):
            yield number, row
            blank = 0
            continue
        blank += len(piece)
        if blank > _MAX_BLANK_BYTES:
            raise UsageError(f"{label}:{number}: more than {_mib(_MAX_BLANK_BYTES)} of blank lines; remove them")


def _blank_lines(file: io.BufferedReader) -> bytes:
    """All the blank lines that begin the buffer, or the next line where there are none; empty at the end of the file.

    Looking at the buffer copies it, which is not worth it for every line.
    """
    buffered = file.peek()
    end = buffered.rfind(b"\n", 0, len(buffered) - len(buffered.lstrip(_SPACE))) + 1
    return file.read(end) if end else file.readline(MAX_ROW_BYTES)


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


class _Decompressor(Protocol):
    """One gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _new_gunzip() -> _Decompressor:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def _new_unzstd() -> _Decompressor:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()


def _inflate(
    file: io.BufferedReader, tally: Tally, new: Callable[[], _Decompressor], what: str, test: str
) -> io.BufferedReader:
    """The decompressed stream. Reading it raises UsageError, which begins with `what`, where the data are damaged."""
    blocks = iter(partial(file.read, _BLOCK), b"")
    fix = f"copy the file again, or check it with `{test}`"

    def chunks() -> Iterator[bytes]:
        part: _Decompressor | None = None
        for block in blocks:
            tally.add(block)
            rest = block
            while rest := rest if part else rest.lstrip(b"\0"):  # zeros pad the space between members
                part = part or new()
                yield part.decompress(rest)
                rest = part.unused_data
                part = None if part.eof else part
        if part:
            raise UsageError(f"{what} end before they are complete; {fix}")

    def checked() -> Iterator[bytes]:
        try:
            yield from chunks()
        except (zlib.error, zstandard.ZstdError) as error:
            raise UsageError(f"{what} are damaged ({error}); {fix}") from None

    return io.BufferedReader(_Chunks(checked()), _BUFFER)


class _Chunks(io.RawIOBase):
    """Pieces of bytes, of any size, as a file to read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Fill `buffer` from one piece; 0 at the end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
