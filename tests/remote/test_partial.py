"""Parts of shards: what was fetched reads like the shard, what was not is an error, and little is asked for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.disk import largest_file
from models.storage import send

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.journal import JournalLine, file_sha256
from rollgen.format.reader import open_dataset, open_shard, read_columns, read_row_group, stored_keys
from rollgen.remote import partial
from rollgen.remote.objects import ObjectStore
from rollgen.remote.partial import Part, fetch_columns, fetch_footer, fetch_part, joined

WIDE = ["prompt_token_ids", "token_ids", "logprobs", "sampling_mask"]
NAME = "data/part-w0-000000.parquet"


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """One shard of three row groups, two samples of 500 tokens each."""
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 1_000)
    return make_dataset(tmp_path / "dataset", shards=1, prompts=6, n=1, tokens=500)


@pytest.fixture
def store(dataset: Path) -> ObjectStore:
    """The dataset in object storage."""
    return send(dataset, "memory://partial")


@pytest.fixture
def line(dataset: Path) -> JournalLine:
    """What the journal says of the shard."""
    (stored,) = open_dataset(dataset).shards
    assert stored.line is not None
    return stored.line


@pytest.fixture
def no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched for being near: shards of tests are small."""
    monkeypatch.setattr(partial, "_GAP_BYTES", 0)
    monkeypatch.setattr(partial, "_TAIL_BYTES", 64)


def table_of(path: Path, line: JournalLine | None, columns: list[str]) -> pa.Table:
    with open_shard(path, line=line) as shard:
        return read_columns(shard, columns)


def test_columns(tmp_path: Path, dataset: Path, store: ObjectStore, line: JournalLine, no_gaps: None) -> None:
    """They read as from the shard, checked against its line; every other column is an error, in every row group."""
    columns, path = ["replayable", "sample_index", "text"], tmp_path / "part"
    fetch_columns(store, line, columns, path)
    assert table_of(path, line, columns).equals(table_of(dataset / NAME, line, columns))
    assert path.stat().st_size == line.bytes
    with open_shard(path, line=line) as shard:
        for group in range(3):
            for column in {*shard.schema.names} - {*columns, "prompt_index"}:
                with pytest.raises(DatasetError, match=f"row group {group}: damaged or not a shard: {column}: damaged"):
                    read_row_group(shard, group, [column])


def test_keys(tmp_path: Path, dataset: Path, store: ObjectStore, line: JournalLine) -> None:
    """What a run needs to go on."""
    fetch_columns(store, line, ["prompt_index", "sample_index", "prompt_id", "generation"], tmp_path / "part")
    with open_shard(tmp_path / "part", line=line) as part, open_shard(dataset / NAME) as whole:
        found, expected = stored_keys(part), stored_keys(whole)
    assert found.prompt_id.to_pylist() == expected.prompt_id.to_pylist()
    assert found.prompt_index.tolist() == expected.prompt_index.tolist() == list(range(6))


def test_a_row_group(tmp_path: Path, dataset: Path, store: ObjectStore, line: JournalLine, no_gaps: None) -> None:
    """All its columns, or some; no other row group."""
    footer = fetch_footer(store, NAME, line.bytes)
    for columns in (None, ("token_ids", "sampling_mask")):
        path = tmp_path / f"{columns}"
        fetch_part(store, NAME, line.bytes, footer, Part(columns, 1), path)
        with open_shard(path, line=line) as part, open_shard(dataset / NAME) as whole:
            names = list(columns or whole.schema.names)
            assert read_row_group(part, 1, names).equals(read_row_group(whole, 1, names))
            with pytest.raises(DatasetError, match="row group 2: damaged"):
                read_row_group(part, 2, names)


def test_everything(tmp_path: Path, dataset: Path, store: ObjectStore, line: JournalLine, no_gaps: None) -> None:
    """All that pages hold is there; the index of pages between them and the footer, which nobody reads, is not."""
    fetch_part(store, NAME, line.bytes, fetch_footer(store, NAME, line.bytes), Part(), tmp_path / "part")
    names = [*WIDE, "metadata"]
    assert table_of(tmp_path / "part", line, names).equals(table_of(dataset / NAME, line, names))


def test_columns_that_the_shard_lacks(tmp_path: Path, store: ObjectStore, line: JournalLine, no_gaps: None) -> None:
    """One that a later format added has its value all the same."""
    fetch_columns(store, line, ["nothing of the kind"], tmp_path / "part")
    assert table_of(tmp_path / "part", line, ["prompt_index"])["prompt_index"].to_pylist() == list(range(6))


@pytest.mark.parametrize("tail", [8, 64, 1 << 20])
def test_a_footer(
    dataset: Path, store: ObjectStore, line: JournalLine, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked for first: less than the footer, or more than the whole object."""
    monkeypatch.setattr(partial, "_TAIL_BYTES", tail)
    footer = fetch_footer(store, NAME, line.bytes)
    assert (dataset / NAME).read_bytes().endswith(footer)
    assert footer.endswith(b"PAR1")
    assert len(footer) == int.from_bytes(footer[-8:-4], "little") + 8


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1", b"PAR1" + bytes(100), b"PAR1\xff\xff\xff\x7fPAR1", b"PAR1" + b"\x00\x00\x00\x7f" * 20 + b"PAR1"],
    ids=["empty", "magic alone", "no magic", "longer than the file", "longer than any footer"],
)
def test_no_footer(content: bytes) -> None:
    """An error with the URL."""
    store = ObjectStore(f"memory://partial/{uuid4().hex}")
    store.create("data/x", content)
    with pytest.raises(DatasetError, match=f"^{store.url}/data/x: no Parquet footer"):
        fetch_footer(store, "data/x", len(content))


def test_a_footer_that_is_another(tmp_path: Path, store: ObjectStore, line: JournalLine) -> None:
    """Fetched as it is; opening the part against its line refuses it. So does a shard of another size."""
    content = store.read(NAME, 1 << 30)
    store.replace(NAME, content.replace(b"rollgen.config_digest", b"rollgen.config_DIGEST"))
    fetch_columns(store, line, ["sample_index"], tmp_path / "part")
    with pytest.raises(DatasetError, match="the footer is not the one that was committed"):
        open_shard(tmp_path / "part", line=line)
    store.replace(NAME, b"PAR1" + content)
    fetch_columns(store, line, ["sample_index"], tmp_path / "longer")
    with pytest.raises(DatasetError, match="truncated or overwritten"):
        open_shard(tmp_path / "longer", line=line)


def test_pages_beyond_the_end(tmp_path: Path, dataset: Path, line: JournalLine) -> None:
    """A footer that was put behind half of the pages: what it says of the rest is not asked for."""
    store, content = ObjectStore(f"memory://partial/{uuid4().hex}"), (dataset / NAME).read_bytes()
    footer = content[-int.from_bytes(content[-8:-4], "little") - 8 :]
    store.create(NAME, content[:1_000] + footer)
    fetch_part(store, NAME, 1_000 + len(footer), footer, Part(), tmp_path / "part")
    assert (tmp_path / "part").read_bytes()[4:] == content[4:1_000] + footer  # no page is in the first four
    with open_shard(tmp_path / "part") as part, pytest.raises(DatasetError, match="row group 2: damaged"):
        read_row_group(part, 2)


def test_a_damaged_object(tmp_path: Path, store: ObjectStore, line: JournalLine) -> None:
    """Checksums of pages are those of the object: a flipped bit arrives as such."""
    content = bytearray(store.read(NAME, 1 << 30))
    footer = fetch_footer(store, NAME, line.bytes)
    fetch_part(store, NAME, line.bytes, footer, Part(("token_ids",)), tmp_path / "sound")
    with open_shard(tmp_path / "sound", line=line) as shard:
        chunk = shard.parquet.groups[1].chunk(shard.parquet.leaves["token_ids"][0])
    content[chunk.start + chunk.bytes - 1] ^= 1
    store.replace(NAME, bytes(content))
    fetch_columns(store, line, ["token_ids"], tmp_path / "part")
    with open_shard(tmp_path / "part", line=line) as part:
        read_row_group(part, 0, ["token_ids"])
        with pytest.raises(DatasetError, match="row group 1: damaged"):
            read_row_group(part, 1, ["token_ids"])


def test_an_object_that_is_not_there(tmp_path: Path, store: ObjectStore, line: JournalLine) -> None:
    """Missing, by its URL; nothing is left behind."""
    store.delete(NAME)
    with pytest.raises(MissingFile, match=f"^{store.url}/{NAME}: "):
        fetch_columns(store, line, ["sample_index"], tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_full_disk(tmp_path: Path, store: ObjectStore, line: JournalLine) -> None:
    """The local place is named, and not the URL, which is sound."""
    with (
        largest_file(1_000),
        pytest.raises(Unreadable, match=rf"^{tmp_path}: cannot keep what is fetched here: File too large; make room"),
    ):
        fetch_columns(store, line, ["sample_index"], tmp_path / "part")


def test_large_stretches_come_in_pieces(
    tmp_path: Path, dataset: Path, store: ObjectStore, line: JournalLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds one of them."""
    monkeypatch.setattr(partial, "_PIECE_BYTES", 1_000)
    asked: list[int] = []
    read_range = ObjectStore.read_range

    def recorded(objects: ObjectStore, name: str, start: int, stop: int) -> bytes:
        asked.append(stop - start)
        return read_range(objects, name, start, stop)

    footer = fetch_footer(store, NAME, line.bytes)
    monkeypatch.setattr(ObjectStore, "read_range", recorded)
    fetch_part(store, NAME, line.bytes, footer, Part(), tmp_path / "part")
    assert max(asked) == 1_000
    assert table_of(tmp_path / "part", line, WIDE).equals(table_of(dataset / NAME, line, WIDE))
    assert file_sha256(dataset / NAME) == line.sha256


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), max_size=20))
def test_joined(stretches: list[tuple[int, int]]) -> None:
    """Everything is covered, rising; gaps that are left are wide, and what was filled in borders on both sides."""
    ranges = [(start, start + size) for start, size in stretches]
    found = joined(ranges)
    assert all(any(start <= one and other <= stop for start, stop in found) for one, other in ranges)
    assert all(after[0] - before[1] > partial._GAP_BYTES for before, after in pairwise(found))
    assert {start for start, _ in found} <= {start for start, _ in ranges}
    assert {stop for _, stop in found} <= {stop for _, stop in ranges}
