"""The compact protocol: values by hand, and bytes that are no such thing."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.format.footer import MAX_CHUNKS, MAX_ROW_GROUPS, row_groups
from rollgen.format.thrift import (
    BINARY,
    BOOLEAN,
    BYTE,
    I32,
    I64,
    LIST,
    PLAIN,
    STRUCT,
    Shape,
    ThriftError,
    read_struct,
    skip_struct,
)

LISTS = Shape({1: I64, 2: BINARY, 3: PLAIN, 4: Shape({1: I64}, PLAIN.simple)}, PLAIN.simple)


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        # Field 1, zigzag 0 -> 0; field 3 (delta 2), zigzag 3 -> -2; field 4 true; stop.
        pytest.param(
            "15001503 11 00", {1 << 4 | I32: 0, 2 << 4 | I32: -2, 3 << 4 | BOOLEAN: True}, id="integers, true"
        ),
        pytest.param(
            "25ac02 12 00", {2 << 4 | I32: 150, 3 << 4 | BOOLEAN: False}, id="0x2c + 2 * 128 = 300, zigzag 150"
        ),
        pytest.param("05 1402 00", {10 << 4 | I32: 1}, id="long form: field number as an integer, 0x14 -> 10"),
        pytest.param(
            "1c 1502 00 18 026869 00", {1 << 4 | STRUCT: {1 << 4 | I32: 1}, 2 << 4 | BINARY: b"hi"}, id="nested"
        ),
        pytest.param("13 ff 00", {1 << 4 | BYTE: 255}, id="a byte is itself"),
        pytest.param("16ffffffffffffffffff01 00", {1 << 4 | I64: -(2**63)}, id="the smallest int64"),
        pytest.param("15ffffffff0f 00", {1 << 4 | I32: -(2**31)}, id="the smallest int32"),
        pytest.param("158000 00", {1 << 4 | I32: 0}, id="a byte more than needed"),
        pytest.param("05 feff03 02 00", {32767 << 4 | I32: 1}, id="the last field"),
    ],
)
def test_values(encoded: str, expected: dict[int, object]) -> None:
    """Bytes by hand: `<delta to the field number><type>` and then the value, ended by a zero byte."""
    data = bytes.fromhex(encoded)
    assert read_struct(data + b"rest") == (expected, len(data))
    assert skip_struct(data + b"rest", 0) == len(data)


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        pytest.param("19 2602 04 19 18 0161 00", {1 << 4 | LIST: [1, 2], 2 << 4 | LIST: [b"a"]}, id="lists"),
        pytest.param("19 f6 10" + "02" * 16 + "00", {1 << 4 | LIST: [1] * 16}, id="list of 16, in long form"),
        pytest.param("39 1c 1502 00 00", {3 << 4 | LIST: [{1 << 4 | I32: 1}]}, id="structs"),
        pytest.param("4c 19 1602 00 00", {4 << 4 | STRUCT: {1 << 4 | LIST: [1]}}, id="in a struct"),
    ],
)
def test_lists(encoded: str, expected: dict[int, object]) -> None:
    """Where the shape has them, read and passed over alike."""
    data = bytes.fromhex(encoded)
    assert read_struct(data + b"rest", 0, LISTS) == (expected, len(data))
    assert skip_struct(data + b"rest", 0, LISTS) == len(data)


@pytest.mark.parametrize(
    "encoded",
    [
        pytest.param("15 02 05 02 04 00", id="a field twice"),
        pytest.param("25 02 05 02 04 00", id="a field that falls"),
        pytest.param("05 00 04 00", id="field 0"),
        pytest.param("05 01 04 00", id="field -1"),
        pytest.param("05 828008 04 00", id="field 65537, in 16 bits field 1"),
        pytest.param("05 feff03 02 15 02 00", id="field 32768"),
        pytest.param("f1" * 2185 + "00", id="2185 fields, 15 apart: the last is 32775"),
        pytest.param("f1" * 4370 + "00", id="up to 65550: in 16 bits from the front again"),
        pytest.param("15 8080808010 00", id="2^32 in 32 bits"),
        pytest.param("15 808080808000 00", id="a 32-bit integer of six bytes"),
        pytest.param("14 808004 00", id="2^16 in 16 bits"),
        pytest.param("16 ffffffffffffffffff02 00", id="2^64 in 64 bits"),
        pytest.param("10 00", id="the end of a struct, as a field"),
        pytest.param("19 15 02 00", id="numbers where there are wide ones"),
        pytest.param("19 1c 00 00", id="structs where there are numbers"),
        pytest.param("29 16 02 00", id="numbers where there are texts"),
        pytest.param("39 16 02 00", id="numbers where there are structs"),
        pytest.param("59 16 02 00", id="a list of numbers where there is none"),
        pytest.param("59 12 01 00", id="a list of booleans where there is none"),
        pytest.param("59 06 00", id="an empty list where there is none"),
    ],
)
def test_what_readers_do_not_agree_on(encoded: str) -> None:
    """No writer writes it, and generated readers read something else than the bytes say."""
    data = bytes.fromhex(encoded)
    with pytest.raises(ThriftError):
        read_struct(data, 0, LISTS)
    with pytest.raises(ThriftError):
        skip_struct(data, 0, LISTS)
    with pytest.raises(ThriftError):
        skip_struct(data, 0)


def test_only_what_is_wanted() -> None:
    """Integers come anyway; the rest is passed over, at every depth."""
    data = bytes.fromhex("1502 18 0161 1c 18 0162 1504 00 00")  # 1: 1, 2: "a", 3: {1: "b", 2: 2}
    only = frozenset({3 << 4 | STRUCT})
    assert read_struct(data, wanted=only)[0] == {1 << 4 | I32: 1, 3 << 4 | STRUCT: {2 << 4 | I32: 2}}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x15", id="cut in a value"),
        pytest.param(b"\x15\xff\xff", id="cut in an integer"),
        pytest.param(b"\x15" + b"\xff" * 9999, id="endless integer"),
        pytest.param(b"\x18\xff\xff\xff\xff\x0f", id="a text of 4 GiB"),
        pytest.param(b"\x19\xfc\xff\xff\xff\xff\x0f", id="a list of 2^32 structs"),
        pytest.param(b"\x19\xf6\xff\xff\xff\xff\x0f", id="a list of 2^32 integers"),
        pytest.param(b"\x1c" * 9999, id="bottomless structs"),
        pytest.param(b"\x19" * 9999, id="bottomless lists"),
        pytest.param(b"\x1b\x00", id="a map"),
    ],
)
def test_hostile_bytes_end_in_an_error(data: bytes) -> None:
    """Neither recursion nor memory nor time grows with what the bytes claim."""
    with pytest.raises(ThriftError):
        read_struct(data)
    with pytest.raises((ThriftError, IndexError)):
        skip_struct(data, 0)
    with pytest.raises(ThriftError):
        row_groups(b"\x49" + data[1:] + bytes(8) if data[:1] == b"\x19" else data + bytes(8))


def test_random_bytes(request: pytest.FixtureRequest) -> None:
    """Reading and skipping agree on where a struct ends, whatever it is made of."""
    rng = random.Random(0)
    ends = 0
    for _ in range(3000):
        data = bytes(
            rng.choice((0, 2, 4, 21, 22, 24, 25, 28, 37, rng.randrange(256))) for _ in range(rng.randrange(40))
        )
        try:
            end = read_struct(data)[1]
        except ThriftError:
            continue
        assert skip_struct(data, 0) == end, data.hex()
        ends += 1
    assert ends > 300  # most begin with a short struct


def test_row_groups_of_a_file(tmp_path: Path) -> None:
    """Rows, sizes and statistics as pyarrow tells them, of columns of every kind, over two row groups."""
    table = pa.table({"x": pa.array(range(5), pa.int64()), "s": ["é"] * 5, "l": [[[1], None], [], [[2, 3]], [[]], []]})
    pq.write_table(table, tmp_path / "x", row_group_size=3, use_dictionary=["s"])
    content = (tmp_path / "x").read_bytes()
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") :]
    groups, metadata = row_groups(footer), pq.read_metadata(tmp_path / "x")
    assert [group.rows for group in groups] == [3, 2]
    for number, group in enumerate(groups):
        assert group.columns == 3
        for leaf in range(3):
            chunk, told = group.chunk(leaf), metadata.row_group(number).column(leaf)
            assert chunk.start == (told.dictionary_page_offset or told.data_page_offset)
            assert chunk.bytes == told.total_compressed_size
            assert chunk.uncompressed == told.total_uncompressed_size
            assert chunk.values == told.num_values
    assert groups[1].bounds(0) == ((3).to_bytes(8, "little"), (4).to_bytes(8, "little"))
    assert groups[0].bounds(1) == ("é".encode(), "é".encode())


@pytest.mark.parametrize(
    ("groups", "columns", "message"),
    [
        (MAX_ROW_GROUPS, 2, None),
        (MAX_ROW_GROUPS + 1, 0, "4097 row groups; the limit is 4096"),
        (1, MAX_CHUNKS, None),
        (1, MAX_CHUNKS + 1, "131073 column chunks; the limit is 131072"),
        (3, MAX_CHUNKS // 2, "more than 131072 column chunks"),
    ],
)
def test_how_many_row_groups(groups: int, columns: int, message: str | None) -> None:
    """A shard has tens, of 22 columns. Here a chunk takes one byte, and pyarrow would take a kilobyte for each."""

    def list_of_structs(count: int) -> bytes:
        return b"\xfc" + bytes([count & 0x7F | 0x80, count >> 7 & 0x7F | 0x80, count >> 14])

    group = b"\x19" + list_of_structs(columns) + bytes(columns) + b"\0"
    footer = b"\x49" + list_of_structs(groups) + group * groups + b"\0" + bytes(8)
    if message is None:
        assert len(row_groups(footer)) == groups
    else:
        with pytest.raises(ValueError, match=message):
            row_groups(footer)
