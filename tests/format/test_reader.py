"""The reader: what it accepts from other writers, and that no damage gets past it.

The damage tests flip single bits of a tiny shard. Bits are drawn afresh each time and the seed is printed; over all
bits of the pages and of the footer the outcome was measured once: an error, or the very same table.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.config import digest
from rollgen.errors import DatasetError
from rollgen.format.columns import build_table
from rollgen.format.commit import WriterSlot, quarantine
from rollgen.format.journal import JournalLine
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.reader import open_dataset, open_shard, read_row_group, stored_keys, verify_shard
from rollgen.format.schema import FOOTER_CONFIG_DIGEST, FOOTER_FORMAT_VERSION, parquet_options, shard_schema
from rollgen.rollouts import Completion

IDENTITY = {"model": "tiny"}
DIGEST = digest(IDENTITY)
FOOTER = {FOOTER_FORMAT_VERSION: b"1.0", FOOTER_CONFIG_DIGEST: DIGEST.encode()}
SCHEMA = shard_schema(support_logprobs=False)
FLIPS = 400


def make_table(rows: int = 4) -> pa.Table:
    """Rows of three tokens: a support of two ids, a singleton, and one token that is not truncated."""
    token = np.arange(rows, dtype=np.int32)
    columns: dict[str, Any] = {
        "prompt_id": [f"p{i // 2}" for i in range(rows)],
        "sample_index": token % 2,
        "generation": [0] * rows,
        "prompt_index": np.arange(rows) // 2,
        "prompt_length": [1] * rows,
        "response_length": [3] * rows,
        "prompt_token_ids": [[i] for i in range(rows)],
        "token_ids": [[i, i + 1, i + 2] for i in range(rows)],
        "logprobs": [[-0.5, 0.0, -3.25]] * rows,
        "sampling_mask": [[[i, i + 9], [i + 1], None] for i in range(rows)],
        "finish_reason": ["stop"] * rows,
        "stop_reason": [None] * rows,
        "temperature": [1.0] * rows,
        "top_p": [0.95] * rows,
        "min_p": [0.0] * rows,
        "top_k": [50] * rows,
        "max_tokens": [16] * rows,
        "seed": np.arange(rows) + 2**62,
        "replayable": [True] * rows,
        "text": ["text"] * rows,
        "prompt": ["prompt"] * rows,
        "metadata": ['{"answer": 7}'] * rows,
    }
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in SCHEMA}, schema=SCHEMA)


def write(path: Path, table: pa.Table, *, rows: int = 2, footer: dict[bytes, bytes] = FOOTER, **options: Any) -> Path:
    """A shard with row groups of `rows` rows; `options` replace those of the format."""
    schema = table.schema.with_metadata(footer)
    with pq.ParquetWriter(path, schema, **parquet_options(schema) | options) as writer:
        writer.write_table(table.cast(schema), row_group_size=rows)
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A sound shard of two row groups."""
    return write(tmp_path / "part-w0-000000.parquet", make_table())


@pytest.fixture
def rng() -> random.Random:
    """A fresh seed each time; pytest shows what is printed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def dataset(tmp_path: Path, make_manifest: Callable[..., Manifest]) -> Path:
    """A directory with a manifest and two committed shards."""
    directory = tmp_path / "dataset"
    directory.mkdir()
    manifest = make_manifest(identity=IDENTITY, config_digest=DIGEST)
    assert create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot:
        for _ in range(2):
            slot.append(slot.publish(write(slot.temporary(), make_table()), rows=4, tokens=12, mask_ids=12))
    return directory


def flipped(content: bytes, bits: list[int]) -> Iterator[bytes]:
    """The content with one bit changed, for each of `bits`."""
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def footer_start(content: bytes) -> int:
    """Where the Parquet footer begins: its length stands before the last magic bytes."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def read_all(path: Path, line: JournalLine | None = None) -> pa.Table:
    """Everything in a shard."""
    with open_shard(path, line=line) as reader:
        return pa.concat_tables(read_row_group(reader, index) for index in range(len(reader.row_group_rows)))


def read_or_error(path: Path) -> pa.Table | str:
    """Everything in a shard, or the message of the DatasetError."""
    try:
        return read_all(path)
    except DatasetError as error:
        return str(error)


def test_reads_what_was_written(shard: Path) -> None:
    """All columns, types and nulls, row group by row group."""
    with open_shard(shard, config_digest=DIGEST) as reader:
        assert reader.row_group_rows == [2, 2]
        assert read_row_group(reader, 1).equals(make_table().slice(2))
        assert reader.schema.equals(SCHEMA)


def test_columns_come_in_the_order_asked_for(shard: Path) -> None:
    """A selection is read alone, ordered as asked and not as stored."""
    with open_shard(shard) as reader:
        table = read_row_group(reader, 0, ["sampling_mask", "prompt_id"])
    assert table.column_names == ["sampling_mask", "prompt_id"]
    assert table["prompt_id"].to_pylist() == ["p0", "p0"]


def test_stored_keys(shard: Path, tmp_path: Path) -> None:
    """Keys of all row groups in file order; none for a shard without rows."""
    with open_shard(shard) as reader:
        keys = stored_keys(reader)
    assert keys.prompt_index.tolist() == [0, 0, 1, 1]
    assert keys.sample_index.tolist() == [0, 1, 0, 1]
    assert keys.prompt_id.to_pylist() == ["p0", "p0", "p1", "p1"]
    assert keys.generation.tolist() == [0, 0, 0, 0]
    assert (keys.prompt_index.dtype, keys.sample_index.dtype, keys.generation.dtype) == (np.int64, np.int32, np.int32)
    with open_shard(write(tmp_path / "empty.parquet", make_table(0))) as reader:
        assert len(stored_keys(reader).prompt_id) == 0


def test_list_of_lists_across_pages_and_row_groups(tmp_path: Path) -> None:
    """Nested lists that continue over page borders decode whole; pages of about 64 bytes make thousands of borders."""
    table = make_table(3000)
    path = write(tmp_path / "x.parquet", table, rows=1100, data_page_size=64, write_batch_size=7)
    verify_shard(path)
    assert read_all(path).equals(table)


def test_bit_flips_in_pages_never_change_a_value(shard: Path, rng: random.Random) -> None:
    """Any bit of the pages or their headers, without a journal line: an error, or the same values."""
    content, expected = shard.read_bytes(), read_all(shard)
    chunks = pq.read_metadata(shard).row_group(1)
    end = max(
        (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
        for chunk in map(chunks.column, range(chunks.num_columns))
    )
    errors = 0
    for damaged in flipped(content, rng.sample(range(32, 8 * end), FLIPS)):
        shard.write_bytes(damaged)
        outcome = read_or_error(shard)
        if isinstance(outcome, str):
            assert f"{shard}: row group" in outcome
            errors += 1
        else:
            assert outcome.equals(expected)
    assert errors > FLIPS * 0.9  # the rest are unused bits of page headers: measured 2.5 %


def test_bit_flips_in_the_footer_are_caught_by_its_hash(dataset: Path, rng: random.Random) -> None:
    """With a journal line every changed bit of the footer is an error, before anything is parsed."""
    stored = open_dataset(dataset).shards[0]
    content = stored.path.read_bytes()
    for damaged in flipped(content, rng.sample(range(8 * footer_start(content), 8 * len(content)), FLIPS)):
        stored.path.write_bytes(damaged)
        with pytest.raises(DatasetError, match="footer"):
            stored.open()


def test_bit_flips_in_a_footer_without_journal_line(shard: Path, rng: random.Random) -> None:
    """Without its hash a damaged footer is still a DatasetError or harmless: it ends neither process nor memory."""
    content, expected = shard.read_bytes(), read_all(shard)
    for damaged in flipped(content, rng.sample(range(8 * footer_start(content), 8 * len(content)), FLIPS)):
        shard.write_bytes(damaged)
        outcome = read_or_error(shard)
        assert str(shard) in outcome if isinstance(outcome, str) else outcome.equals(expected)


@pytest.mark.parametrize(
    "keep", [0, 3, 11, 12, 0.5, -1], ids=["nothing", "3 bytes", "11 bytes", "12 bytes", "half", "one byte less"]
)
@pytest.mark.parametrize("journal", [False, True], ids=["no journal", "journal"])
def test_truncation(dataset: Path, keep: float, journal: bool) -> None:
    """A file cut anywhere is refused on opening, with the sizes when they are known."""
    stored = open_dataset(dataset).shards[0]
    content = stored.path.read_bytes()
    stored.path.write_bytes(content[: int(keep * len(content)) if keep == 0.5 else int(keep)])
    with pytest.raises(DatasetError, match=r"the journal says \d+" if journal else "damaged or not a shard"):
        open_shard(stored.path, line=stored.line if journal else None)


def test_row_count_is_compared_with_the_journal(dataset: Path) -> None:
    """A line that counts other rows than its shard holds was not written for it."""
    stored = open_dataset(dataset).shards[0]
    assert stored.line is not None
    line = JournalLine(**{name: getattr(stored.line, name) for name in JournalLine.__slots__} | {"rows": 5})
    with pytest.raises(DatasetError, match="4 rows, the journal says 5"):
        open_shard(stored.path, line=line)


def test_shard_of_another_dataset(shard: Path) -> None:
    """The config digest in the footer ties a shard to its manifest."""
    with pytest.raises(DatasetError, match="belongs to another dataset"):
        open_shard(shard, config_digest=digest({"model": "other"}))


@pytest.mark.parametrize(
    ("footer", "message"),
    [
        pytest.param({}, "not a rollgen shard: its footer has no rollgen.format_version", id="foreign Parquet"),
        pytest.param(FOOTER | {FOOTER_FORMAT_VERSION: b"2.0"}, "format version 2.0", id="later major"),
        pytest.param(FOOTER | {FOOTER_FORMAT_VERSION: b"\xff"}, "not a shard", id="not text"),
    ],
)
def test_footer_keys(tmp_path: Path, footer: dict[bytes, bytes], message: str) -> None:
    """A lone file says what it is, or is refused."""
    with pytest.raises(DatasetError, match=message):
        open_shard(write(tmp_path / "x.parquet", make_table(), footer=footer))


def test_a_later_minor_version_may_add_columns(tmp_path: Path) -> None:
    """Unknown columns are left alone."""
    table = make_table().append_column("kept_mass", pa.array([0.9] * 4))
    path = write(tmp_path / "x.parquet", table, footer=FOOTER | {FOOTER_FORMAT_VERSION: b"1.7"})
    assert read_all(path).equals(make_table())


@pytest.mark.parametrize("columns", [None, ["generation"], ["generation", "seed"]], ids=str)
def test_an_older_shard_reads_as_generation_0(tmp_path: Path, columns: list[str] | None) -> None:
    """Shards of 1.0 have no such column; it is filled in at its place, also when nothing else is asked for."""
    path = write(tmp_path / "x.parquet", make_table().drop_columns("generation"))
    wanted = make_table().slice(2).select(columns or SCHEMA.names)
    with open_shard(path) as reader:
        assert read_row_group(reader, 1, columns).equals(wanted)
        assert stored_keys(reader).generation.tolist() == [0, 0, 0, 0]
    verify_shard(path)


def replaced(name: str, values: Any, kind: pa.DataType) -> pa.Table:
    """The test table with one column of another type, nullable."""
    table = make_table()
    return table.set_column(table.schema.get_field_index(name), pa.field(name, kind), pa.array(values, kind))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        pytest.param(make_table().drop_columns("logprobs"), "logprobs is missing", id="missing"),
        pytest.param(
            make_table().append_column("seed", pa.array([1] * 4)), "seed is missing, or there twice", id="twice"
        ),
        pytest.param(replaced("seed", ["x"] * 4, pa.string()), "seed is string, not int64", id="wrong scalar"),
        pytest.param(replaced("sample_index", [1] * 4, pa.int64()), "sample_index is int64", id="wider scalar"),
        pytest.param(replaced("token_ids", [1] * 4, pa.int32()), "token_ids is int32, not list", id="not a list"),
        pytest.param(replaced("token_ids", [[1]] * 4, pa.list_(pa.int64())), "token_ids is list", id="wider element"),
        pytest.param(replaced("sampling_mask", [[1]] * 4, pa.list_(pa.int32())), "sampling_mask is list", id="flat"),
        pytest.param(
            make_table().append_column("weight_versions", pa.array([["a"]] * 4)),
            "weight_version_starts is missing",
            id="versions of no tokens",
        ),
        pytest.param(
            make_table().append_column("routed_experts", pa.array([[1]] * 4, pa.list_(pa.int32()))),
            "routed_experts is list<element: int32>, not list<element: int16 not null>",
            id="wider experts",
        ),
    ],
)
def test_wrong_schema(tmp_path: Path, table: pa.Table, message: str) -> None:
    """A column that is missing or holds something else is named."""
    with pytest.raises(DatasetError, match=message):
        open_shard(write(tmp_path / "x.parquet", table))


def as_others_write(table: pa.Table) -> pa.Table:
    """The same values with large lists, large strings and everything nullable, as polars and datasets write."""

    def loose(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.large_list(pa.field("item", loose(kind.value_type)))
        return pa.large_string() if pa.types.is_string(kind) else kind

    return table.cast(pa.schema([pa.field(field.name, loose(field.type)) for field in table.schema]))


def test_weights_and_experts_of_others(tmp_path: Path, make_completion: Callable[..., Completion]) -> None:
    """Large lists of large strings become those of the format; a null among them is refused."""
    schema = shard_schema(support_logprobs=False, weight_versions=True, routed_experts=True)
    table = build_table([make_completion(k, 0, extras=True) for k in range(4)], schema)
    with open_shard(write(tmp_path / "x.parquet", as_others_write(table))) as reader:
        assert read_row_group(reader, 0).equals(table.slice(0, reader.row_group_rows[0]))
    column = as_others_write(table)["weight_versions"].to_pylist()
    nulls = pa.array([[None], *column[1:]], pa.large_list(pa.field("item", pa.large_string())))
    place = table.schema.get_field_index("weight_versions")
    changed = as_others_write(table).set_column(place, "weight_versions", nulls)
    with (
        open_shard(write(tmp_path / "y.parquet", changed)) as reader,
        pytest.raises(DatasetError, match="column weight_versions holds 1 null elements"),
    ):
        read_row_group(reader, 0)


def test_other_list_flavours_become_the_v1_types(tmp_path: Path) -> None:
    """What other tools write with the same meaning is read as the same table."""
    path = write(tmp_path / "x.parquet", as_others_write(make_table()))
    assert read_all(path).equals(make_table())


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        pytest.param("prompt_id", ["p", None, "p", "p"], "null", id="scalar"),
        pytest.param("token_ids", [[1], None, [1], [1]], "null", id="list"),
        pytest.param("token_ids", [[1], [None], [1], [1]], "token_ids holds 1 null", id="element"),
        pytest.param("sampling_mask", [[[1]], [[1, None]], [], []], "sampling_mask holds 1 null", id="id of a support"),
    ],
)
def test_nulls_where_the_format_has_none(tmp_path: Path, name: str, values: list[Any], message: str) -> None:
    """A file whose schema allows nulls is fine until there is one."""
    loose = as_others_write(make_table())
    position = loose.schema.get_field_index(name)
    table = loose.set_column(position, loose.field(name), pa.array(values, loose.field(name).type))
    with pytest.raises(DatasetError, match=rf"row group 0: .*{message}"):
        verify_shard(write(tmp_path / "x.parquet", table))


def test_pages_without_checksums_are_refused(tmp_path: Path) -> None:
    """A shard written without them reads well in pyarrow, and would hide any damage."""
    path = write(tmp_path / "x.parquet", make_table(), write_page_checksum=False)
    with pytest.raises(DatasetError, match=r"row group 0: .*carries no checksum"):
        verify_shard(path)


def test_missing_file(tmp_path: Path) -> None:
    """A path that leads nowhere is a DatasetError too."""
    with pytest.raises(DatasetError, match=r"nowhere\.parquet: missing"):
        open_shard(tmp_path / "nowhere.parquet")


def test_open_dataset(dataset: Path) -> None:
    """Shards come sorted with their journal lines, and open and verify with them."""
    opened = open_dataset(dataset)
    assert [shard.path.name for shard in opened.shards] == ["part-w0-000000.parquet", "part-w0-000001.parquet"]
    assert opened.manifest.config_digest == DIGEST
    for shard in opened.shards:
        assert shard.line is not None
        verify_shard(shard.path, line=shard.line, config_digest=shard.config_digest)


def test_a_shard_without_journal_line_is_part_of_the_dataset(dataset: Path) -> None:
    """It is in place, so it is committed: a live run is about to write the line, or died before."""
    journal = dataset / "journal" / "w0.jsonl"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    first, second = open_dataset(dataset).shards
    assert first.line is not None
    assert second.line is None
    with second.open() as reader:
        assert reader.row_group_rows == [2, 2]


def test_a_missing_shard_is_an_error_until_it_is_retired(dataset: Path) -> None:
    """A reader must not train on half a dataset; of what resume has retired, the samples are owed again."""
    first, second = open_dataset(dataset).shards
    quarantine(dataset, second.path)
    with pytest.raises(DatasetError, match=r"part-w0-000001\.parquet: missing, though committed; .*--resume"):
        open_dataset(dataset)
    assert second.line is not None
    with WriterSlot(dataset, "w0") as slot:
        slot.retire(second.line)
    assert open_dataset(dataset).shards == (first,)


def test_a_retired_shard_in_place_is_passed_over(dataset: Path) -> None:
    """A shard that was replaced by others is no longer part of the dataset, even where it was not deleted."""
    first, second = open_dataset(dataset).shards
    assert first.line is not None
    with WriterSlot(dataset, "w0") as slot:
        slot.retire(first.line)
    assert first.path.exists()
    assert open_dataset(dataset).shards == (second,)


def test_a_manifest_without_page_checksums_is_refused(dataset: Path) -> None:
    """The promise is in the manifest, so that a writer that cannot keep it can say so."""
    path = dataset / "rollgen.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest |= {"page_checksums": False}
    path.write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    with pytest.raises(DatasetError, match="page_checksums is false"):
        open_dataset(dataset)


def test_texts_that_are_not_utf8(tmp_path: Path) -> None:
    """pyarrow does not look; whoever reads the text would fail later, far from the file."""
    text = pa.array([b"\xff"] * 4, pa.binary()).view(pa.string())
    table = make_table().set_column(SCHEMA.get_field_index("text"), SCHEMA.field("text"), text)
    path = write(tmp_path / "x.parquet", table)
    with open_shard(path) as shard:
        assert read_row_group(shard, 0, ["prompt_id"]).num_rows == 2
        with pytest.raises(DatasetError, match=r"x\.parquet: row group 0: .*: text: .*UTF8"):
            read_row_group(shard, 0, ["text"])
        with pytest.raises(DatasetError, match=r"row group 1: .*: text: "):
            read_row_group(shard, 1)


def test_texts_that_are_looked_up_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dictionary holds counts as often as it is referred to: exactly, where the bound would be too much."""
    monkeypatch.setattr("rollgen.format.parquet.MAX_DECODED_BYTES", 500_000)
    short, long = "s", "l" * 50_000
    for texts, is_read in (
        (([short] * 19 + [long]) * 2, True),
        (([short] * 9 + [long]) * 4, True),
        ([long] * 40, False),
    ):
        table = pa.concat_tables([make_table()] * 10)
        table = table.set_column(SCHEMA.get_field_index("metadata"), SCHEMA.field("metadata"), pa.array(texts))
        with open_shard(write(tmp_path / "x.parquet", table, rows=40)) as shard:
            if is_read:
                assert read_row_group(shard, 0, ["metadata"])["metadata"].to_pylist() == texts
                continue
            # 40 * 50,000 looked up, and 50,004 of dictionary with a few bytes of headers and indices.
            with pytest.raises(DatasetError, match=r"20500\d\d bytes once decoded; the limit is 500000"):
                read_row_group(shard, 0, ["metadata"])
