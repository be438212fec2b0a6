"""Plain and compressed bytes to lines."""

import gzip
import hashlib
import io
import re

import pytest
import zstandard

from rollgen.errors import UsageError
from rollgen.prompts import streams
from rollgen.prompts.streams import Tally, read_lines

TEXT = b"".join(b'{"id": %d}\n' % number for number in range(50_000))
SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"


def zstd(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


def lines_of(data, tally=None):
    return [line for _, line in read_lines(io.BufferedReader(io.BytesIO(data)), "p", tally or Tally())]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(TEXT, TEXT, id="plain"),
        pytest.param(b"", b"", id="empty"),
        pytest.param(gzip.compress(TEXT), TEXT, id="gzip"),
        pytest.param(gzip.compress(b"a\nb") + gzip.compress(b"c\n"), b"a\nbc\n", id="gzip, two members"),
        pytest.param(gzip.compress(b"a\n") + bytes(512), b"a\n", id="gzip, padded"),
        pytest.param(gzip.compress(b""), b"", id="gzip of nothing"),
        pytest.param(zstd(TEXT), TEXT, id="zstd"),
        pytest.param(zstd(TEXT, write_checksum=True, write_content_size=False), TEXT, id="zstd with checksum"),
        pytest.param(zstd(b"a\nb") + zstd(b"c\n"), b"a\nbc\n", id="zstd, two frames"),
        pytest.param(SKIPPABLE_FRAME + zstd(b"a\n") + SKIPPABLE_FRAME, b"a\n", id="zstd, skippable frames"),
    ],
)
def test_lines_and_bytes_of_a_stream(data, text):
    """All lines come, and every byte that lies there is tallied."""
    tally = Tally()
    assert lines_of(data, tally) == text.splitlines()
    assert tally.bytes == len(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(gzip.compress(TEXT)[:-9], "the gzip data end before they are complete; copy", id="gzip, cut"),
        pytest.param(gzip.compress(TEXT)[:-1], "the gzip data end before", id="gzip, last byte missing"),
        pytest.param(gzip.compress(b"abc")[:-8] + bytes(8), "the gzip data are damaged", id="gzip, wrong CRC"),
        pytest.param(gzip.compress(b"abc") + b"more", "the gzip data are damaged", id="gzip, text after it"),
        pytest.param(zstd(TEXT)[:-1], "the zstd data end before", id="zstd, last byte missing"),
        pytest.param(zstd(b"abc" * 99, write_checksum=True)[:-4] + bytes(4), "the zstd data are", id="zstd, checksum"),
        pytest.param(zstd(b"abc") + b"more", "the zstd data are damaged", id="zstd, text after it"),
        pytest.param(b"PK\x03\x04....", "a zip archive; give JSON Lines", id="zip"),
        pytest.param(b"BZh91AY&SY", "compressed with bzip2", id="bzip2"),
        pytest.param(b"\xfd7zXZ\x00", "compressed with xz", id="xz"),
    ],
)
def test_damaged_and_foreign_files_are_refused(data, message):
    """Naming the file; a whole file that lost its end would look like a smaller one."""
    with pytest.raises(UsageError, match=f"^p: {re.escape(message)}"):
        lines_of(data)


def test_a_compressed_file_is_read_as_far_as_needed():
    """The first line costs what fills one buffer, not the file."""
    data = gzip.compress(TEXT * 20, compresslevel=0)
    tally = Tally()
    lines = read_lines(io.BufferedReader(io.BytesIO(data)), "p", tally)
    assert next(lines) == (1, b'{"id": 0}')
    assert tally.bytes <= streams._BUFFER + streams._BLOCK < len(data)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_blank_lines_count(pack):
    """One by one and in blocks: 5,000 of each kind lie before line 20,002. Space around a line is no part of it."""
    blanks = b"\n" * 5000 + b"\r\n" * 5000 + b" \t\n" * 5000 + b"\xef\xbb\xbf\n" * 5000
    data = pack(b"\xef\xbb\xbfa\n" + blanks + b"\t b\r\nc")
    tally = Tally()
    lines = list(read_lines(io.BufferedReader(io.BytesIO(data)), "p", tally))
    assert lines == [(1, b"a"), (20_002, b"b"), (20_003, b"c")]
    assert (tally.bytes, tally.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def endless(piece, pack):
    """256 MiB of a piece of text, in some kilobytes."""
    return pack(piece * ((256 << 20) // len(piece)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(lambda: endless(b"\n", zstd), r"p:\d+: more than 16 MiB of blank lines; remove them", id="blank"),
        pytest.param(lambda: endless(b"x", zstd), "p:1: a line of 64 MiB or more; write one JSON", id="zstd"),
        pytest.param(lambda: gzip.compress(bytes(65 << 20), 1), "p:1: a line of 64 MiB or more", id="gzip"),
    ],
)
def test_what_never_ends_is_refused(data, message):
    """Lines and blanks that a few kilobytes decompress to."""
    with pytest.raises(UsageError, match=message):
        lines_of(data())
