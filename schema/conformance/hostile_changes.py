"""The ways in which `make_hostile.py` spoils a dataset: each a function of a `Hostile`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import zstandard
from hostile_dataset import JOURNAL, ROWS, SHARD, Hostile, Row
from make_golden import TIME
from parquet_bytes import (
    CHUNKS,
    CODEC,
    COMPRESSED,
    DATA_HEADER,
    DATA_PAGE,
    DICTIONARY_PAGE,
    I32,
    I64,
    LIST,
    META_DATA,
    PAGE_COMPRESSED,
    PAGE_CRC,
    ROW_GROUPS,
    ROWS_OF_GROUP,
    STRUCT,
    UNCOMPRESSED,
    VALUES,
    Fields,
    data_page,
    decode,
    dictionary_page,
    encode,
    first_group,
    footer_start,
    levels,
    meta_of,
    put,
    varint,
    with_footer,
    with_page_header,
    with_pages,
    with_raw_footer,
    zigzag,
)

from rollgen.format.journal import file_sha256
from rollgen.format.schema import RETRY_SCHEMA

HUGE = 2**31 - 1
PROMPT_ID, SAMPLE_INDEX, PROMPT_TOKENS, TOKENS, METADATA = 0, 1, 6, 7, 21
"""Leaves of the shard's columns."""
RLE_DICTIONARY, PLAIN, RLE = 8, 0, 3
HIDDEN = 1 << 16
"""Field numbers of so much more are the same for who keeps 16 bits of them."""

Spoil = Callable[[Hostile], None]


def footer(change: Callable[[Fields], None]) -> Spoil:
    """Spoil the footer."""
    return lambda case: case.shard_bytes(lambda content: with_footer(content, change))


def group(change: Callable[[Fields], None]) -> Spoil:
    """Spoil the first row group of the footer."""
    return footer(lambda fields: change(first_group(fields)))


def meta(change: Callable[[Fields], None], leaf: int = SAMPLE_INDEX) -> Spoil:
    """Spoil what the footer says of a column chunk."""
    return footer(lambda fields: change(meta_of(fields, leaf)))


def page(
    change: Callable[[Fields], None], change_meta: Callable[[Fields], None] | None = None, leaf: int = SAMPLE_INDEX
) -> Spoil:
    """Spoil the first page header of a column, and what the footer says of it."""
    return lambda case: case.shard_bytes(lambda content: with_page_header(content, leaf, change, change_meta))


def nested(fields: Fields) -> Fields:
    """The data page header inside a page header."""
    inner: Fields = fields[DATA_HEADER][1]
    return inner


def raw(change: Callable[[bytes], bytes]) -> Spoil:
    """Spoil the shard as bytes."""
    return lambda case: case.shard_bytes(change)


def row(number: int, **values: Any) -> Spoil:
    """Set values of a row."""
    return lambda case: case.row(number, **values)


def rows(change: Callable[[list[Row]], None], *, nullable: bool = False) -> Spoil:
    """Change the rows."""
    return lambda case: case.rows(change, nullable=nullable)


def item(column: str, number: int, token: int, value: Any, *, nullable: bool = False) -> Spoil:
    """Set one token's value in a row."""
    return rows(lambda all_rows: all_rows[number][column].__setitem__(token, value), nullable=nullable)


def table(change: Callable[[pa.Table], pa.Table], **options: Any) -> Spoil:
    """Change the shard as a table."""
    return lambda case: case.write_table(change(case.table()), **options)


def line(**values: Any) -> Spoil:
    """Set keys of the journal line."""
    return lambda case: case.line(**values)


def line_text(change: Callable[[str], str]) -> Spoil:
    """Change the text of the journal."""
    return lambda case: rewrite(case.path(JOURNAL), change)


def manifest(**values: Any) -> Spoil:
    """Set keys of the manifest."""
    return lambda case: case.manifest(**values)


def manifest_text(change: Callable[[str], str]) -> Spoil:
    """Change the text of the manifest."""
    return lambda case: case.manifest_text(change)


def plan(change: Callable[[pa.Table], pa.Table], **options: Any) -> Spoil:
    """Change the plan."""
    return lambda case: case.plan(change, **options)


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def retyped(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(rows_of: pa.Table) -> pa.Table:
        at = rows_of.schema.get_field_index(name)
        values = rows_of[name].to_pylist()
        if pa.types.is_list(kind) and not pa.types.is_list(kind.value_type):
            values = [[token for mask in masks if mask for token in mask] for masks in values]
        return rows_of.set_column(at, pa.field(name, kind, nullable=False), pa.array(values, kind))

    return change


def as_others_write(rows_of: pa.Table) -> pa.Table:
    """Large lists and texts, everything nullable, elements named `item`."""

    def kind(of: pa.DataType) -> pa.DataType:
        if pa.types.is_list(of):
            return pa.large_list(pa.field("item", kind(of.value_type)))
        return pa.large_string() if pa.types.is_string(of) else of

    fields = [pa.field(field.name, kind(field.type)) for field in rows_of.schema]
    return rows_of.cast(pa.schema(fields, metadata=rows_of.schema.metadata))


def later_minor(case: Hostile) -> None:
    """Format 1.7: unknown columns, footer keys, manifest keys, journal keys, plan columns and files."""
    content = case.table()
    keys = content.schema.metadata | {b"rollgen.format_version": b"1.7", b"rollgen.new": b"?"}
    extra = pa.array([[{"a": 1}]] * ROWS)
    case.write_table(content.append_column("kept_mass", extra).replace_schema_metadata(keys))
    case.line(new_key={"a": [1, None]})
    case.plan(lambda planned: planned.append_column("difficulty", pa.array([0.5] * len(planned))))
    case.manifest(format_version="1.7", new_key={"a": 1})
    case.path("new-file.bin").write_bytes(b"\x00")


def bytes_of_text(column: str, value: bytes) -> Callable[[pa.Table], pa.Table]:
    """Put bytes into a text column, in every row."""

    def change(rows_of: pa.Table) -> pa.Table:
        at = rows_of.schema.get_field_index(column)
        texts = pa.array([value] * len(rows_of), pa.binary()).view(pa.string())
        return rows_of.set_column(at, rows_of.schema.field(column), texts)

    return change


def text_bomb(content: bytes) -> bytes:
    """Five pages of `metadata` of 768 MiB each. A page's text begins with its length, which ends in zero bytes."""
    size = 768 << 20
    head = levels([(1, 1)]) + (size).to_bytes(4, "little")
    compressor = zstandard.ZstdCompressor(level=19).compressobj(size=len(head) + size)
    parts = [compressor.compress(head), *(compressor.compress(bytes(1 << 20)) for _ in range(768)), compressor.flush()]
    one = data_page(b"".join(parts), uncompressed=len(head) + size, values=1, encoding=PLAIN)
    header = len(one) - sum(map(len, parts))
    total = ROWS * (header + len(head) + size)
    return with_pages(content, METADATA, one * ROWS, values=ROWS, uncompressed=total, encodings=[RLE, PLAIN])


def dictionary_bomb(content: bytes) -> bytes:
    """`prompt_token_ids` of 2^29 tokens a row: runs of a dictionary of one id, less than 200 bytes for 2 GiB."""
    count = 1 << 29
    ids = zstandard.compress(bytes(4))
    first = dictionary_page(ids, uncompressed=4, values=1)
    data = levels([(1, 0), (count - 1, 1)]) + levels([(count, 1)]) + b"\x01" + varint(count << 1) + b"\x00"
    rest = levels([(ROWS - 1, 0)]) + levels([(ROWS - 1, 1)]) + b"\x01" + varint((ROWS - 1) << 1) + b"\x00"
    pages = [
        first,
        data_page(zstandard.compress(data), uncompressed=len(data), values=count, encoding=RLE_DICTIONARY),
        data_page(zstandard.compress(rest), uncompressed=len(rest), values=ROWS - 1, encoding=RLE_DICTIONARY),
    ]
    headers = sum(map(len, pages)) - len(ids) - len(zstandard.compress(data)) - len(zstandard.compress(rest))
    whole = with_pages(
        content,
        PROMPT_TOKENS,
        b"".join(pages),
        values=count + ROWS - 1,
        uncompressed=headers + 4 + len(data) + len(rest),
        encodings=[PLAIN, RLE, RLE_DICTIONARY],
    )

    def say_dictionary(fields: Fields) -> None:
        chunk = meta_of(fields, PROMPT_TOKENS)
        chunk[11] = (I64, chunk[DATA_PAGE][1])
        put(chunk, DATA_PAGE, chunk[DATA_PAGE][1] + len(first))

    return with_footer(whole, say_dictionary)


def hidden_values(content: bytes) -> bytes:
    """2^30 values in a page that says 4: field 65537 of its header, which a reader of 16 bits takes for field 1."""

    def hide(header: Fields) -> None:
        nested(header)[HIDDEN + 1] = (I32, 1 << 30)

    return with_page_header(content, TOKENS, hide)


def hidden_pages(content: bytes) -> bytes:
    """Other tokens, on a page without CRC that field 65545 of the column chunk points to."""
    fields, _ = decode(content, footer_start(content))
    chunk = meta_of(fields, TOKENS)
    start, size, at = chunk[DATA_PAGE][1], chunk[COMPRESSED][1], footer_start(content)
    header, end = decode(content, start)
    tokens = bytearray(zstandard.decompress(content[end : start + size]))
    tokens[-4:] = bytes(4)
    packed = zstandard.compress(bytes(tokens))
    put(header, PAGE_COMPRESSED, len(packed))
    del header[PAGE_CRC]
    pages = (encode(header) + packed).ljust(size, b"\0")
    chunk[HIDDEN + DATA_PAGE] = (I64, at)
    return with_raw_footer(content[:at] + pages + content[at:], encode(fields))


def twice(content: bytes) -> bytes:
    """The metadata of a column chunk and again, with a dictionary page that the second one does not speak of."""
    fields, _ = decode(content, footer_start(content))
    chunk = first_group(fields)[CHUNKS][1][1][TOKENS]
    meta_data = chunk[META_DATA][1]
    written = encode(chunk)
    at = written.index(encode(meta_data))
    first = encode(meta_data | {DICTIONARY_PAGE: (I64, 4)})
    merged = written[:at] + first + bytes([STRUCT]) + zigzag(META_DATA) + written[at:]
    return with_raw_footer(content, encode(fields).replace(written, merged))


def other_list(content: bytes) -> bytes:
    """A path whose head says numbers: readers that know better read texts, the others go on in the middle of one."""
    path = b"\x18" + varint(len("sample_index")) + b"sample_index"
    return with_raw_footer(content, content[footer_start(content) : -8].replace(path, b"\x15" + path[1:]))


def many_groups(count: int) -> Callable[[bytes], bytes]:
    """Row groups of no rows behind the one that there is."""

    def add(fields: Fields) -> None:
        columns = []
        for chunk in first_group(fields)[CHUNKS][1][1]:
            meta_data = {name: chunk[META_DATA][1][name] for name in (1, 2, 3, CODEC, DATA_PAGE)}
            meta_data |= dict.fromkeys((VALUES, UNCOMPRESSED, COMPRESSED), (I64, 0))
            columns.append({2: (I64, 0), META_DATA: (STRUCT, meta_data)})
        empty = {CHUNKS: (LIST, (STRUCT, columns)), 2: (I64, 0), ROWS_OF_GROUP: (I64, 0)}
        fields[ROW_GROUPS][1][1].extend([empty] * count)

    return lambda content: with_footer(content, add)


def lookup_bomb(case: Hostile) -> None:
    """4,096 rows that share one metadata text of 1 MiB: 4 GiB once looked up, 100 KB as they lie there."""
    content = case.table()
    many = pa.concat_tables([content.slice(4, 1)] * 4096).combine_chunks()
    at = many.schema.get_field_index("sample_index")
    many = many.set_column(at, many.schema.field("sample_index"), pa.array(range(4096), pa.int32()))
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array(['"' + "a" * (1 << 20) + '"']))
    at = many.schema.get_field_index("metadata")
    many = many.set_column(at, pa.field("metadata", text.type), text)
    case.write_table(many, dictionary_pagesize_limit=4 << 20)


def mid_row(content: bytes) -> bytes:
    """The first of `token_ids` continues a row that does not exist."""
    fields, _ = decode(content, footer_start(content))
    count = meta_of(fields, TOKENS)[VALUES][1]
    data = levels([(1, 1), (4, 0), (count - 5, 1)]) + levels([(count, 1)]) + bytes(4 * count)
    packed = zstandard.compress(data)
    one = data_page(packed, uncompressed=len(data), values=count, encoding=PLAIN)
    total = len(one) - len(packed) + len(data)
    return with_pages(content, TOKENS, one, values=count, uncompressed=total, encodings=[RLE, PLAIN])


def claimed_text(content: bytes) -> bytes:
    """A key of the footer that claims to be 1 GB long."""
    encoded = content[footer_start(content) : -8]
    key = b"rollgen.config_digest"
    at = encoded.index(key) - 1
    return with_raw_footer(content, encoded[:at] + varint(1_000_000_000) + encoded[at + 1 :])


def bottomless(content: bytes) -> bytes:
    """An unknown field of the footer, structs nested 5,000 deep."""
    encoded = content[footer_start(content) : -8]
    return with_raw_footer(content, encoded[:-1] + b"\x7c" + b"\x1c" * 5000 + bytes(5001) + b"\0")


def second_shard(case: Hostile) -> None:
    """A copy of the shard under the next name, with a line of its own."""
    other = "data/part-w0-000001.parquet"
    shutil.copy(case.path(SHARD), case.path(other))
    [known] = (json.loads(text) for text in case.path(JOURNAL).read_text().splitlines())
    case.lines([known, known | {"file": Path(other).name}])


def retry(case: Hostile, keys: list[tuple[int, int]], *, samples: int | None = None, sha256: str | None = None) -> None:
    """A retry of these samples, its list as it is."""
    prompt, sample = zip(*keys, strict=True)
    columns = [pa.array(prompt, pa.int64()), pa.array(sample, pa.int32()), pa.array([12] * len(keys), pa.int32())]
    lists = pa.Table.from_arrays(columns, schema=RETRY_SCHEMA)
    path = case.path("retry-1.parquet")
    pa.parquet.write_table(lists, path, compression="zstd", write_page_checksum=True)
    retry = {"generation": 1, "started_at": TIME, "where": {"finish_reason": "length"}, "max_tokens": 12}
    counted = {"samples": len(keys) if samples is None else samples, "sha256": sha256 or file_sha256(path)}
    case.manifest(retries=[retry | counted])


def replacement(case: Hostile, content: str) -> None:
    case.path("journal/replacement.json").write_text(content)


def failures(case: Hostile, text: str) -> None:
    case.path("failures").mkdir()
    case.path("failures/w0.jsonl").write_text(text)


def missing_retry(case: Hostile) -> None:
    retry(case, [(2, 0)])
    case.path("retry-1.parquet").unlink()
