"""What a shard looks like on disk: encodings, checksums and statistics from the footer, and the size of its masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollgen.format.columns import build_table
from rollgen.format.pages import read_struct
from rollgen.format.schema import parquet_options, shard_schema
from rollgen.format.writer import footer_metadata, write_parquet
from rollgen.rollouts import Completion, Sampling

MakeCompletion = Callable[..., Completion]
MASK_LEAF = "sampling_mask.list.element.list.element"
SUPPORT_LEAF = "support_logprobs.list.element.list.element"
VOCAB_SIZE = 49_152
TOKENS = 40_000


@pytest.fixture(scope="module")
def skewed() -> Completion:
    """Supports as a language model makes them: a third are singletons, the others 2 to 50 ids, small ones more often.

    How often an id occurs follows Zipf's law, ids being in no order of frequency.
    """
    rng = np.random.default_rng(0)
    by_rank = rng.permutation(VOCAB_SIZE)
    cumulative = np.cumsum(1 / np.arange(1, VOCAB_SIZE + 1))
    sizes = np.where(rng.random(TOKENS) < 1 / 3, 1, np.minimum(rng.geometric(0.1, TOKENS) + 1, 50))
    drawn = by_rank[np.searchsorted(cumulative, rng.random(sizes.sum()) * cumulative[-1])]
    supports = [np.unique(ids) for ids in np.split(drawn, sizes.cumsum()[:-1])]
    sizes = np.array([len(ids) for ids in supports])
    starts = np.concatenate([[0], sizes.cumsum()])
    mass = rng.exponential(size=starts[-1])
    weights = np.log(mass / np.repeat(np.add.reduceat(mass, starts[:-1]), sizes)).astype(np.float32)
    return Completion(
        prompt_id="p0",
        sample_index=0,
        prompt_index=0,
        prompt_token_ids=np.array([1], np.int32),
        token_ids=np.array([ids[0] for ids in supports], np.int32),
        logprobs=weights[starts[:-1]],
        mask_ids=np.concatenate(supports).astype(np.int32),
        mask_offsets=starts,
        finish_reason="length",
        sampling=Sampling(max_tokens=TOKENS),
        seed=0,
        support_logprobs=weights,
    )


@pytest.fixture(scope="module")
def shard(skewed: Completion, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of one long completion."""
    path = tmp_path_factory.mktemp("size") / "shard.parquet"
    write_parquet(path, [skewed], shard_schema(support_logprobs=True))
    return path


def column_chunks(path: Path) -> dict[str, Any]:
    """The column chunks of the first row group, by the path of their leaf."""
    row_group = pq.read_metadata(path).row_group(0)
    chunks = [row_group.column(index) for index in range(row_group.num_columns)]
    return {chunk.path_in_schema: chunk for chunk in chunks}


def plain_bytes(path: Path, completion: Completion, leaf: str) -> int:
    """What a column chunk takes when it is written plain, all else being equal."""
    schema = shard_schema(support_logprobs=True)
    with pq.ParquetWriter(path, schema, **(parquet_options(schema) | {"column_encoding": None})) as writer:
        writer.write_table(build_table([completion], schema))
    assert "BYTE_STREAM_SPLIT" not in column_chunks(path)[leaf].encodings
    return int(column_chunks(path)[leaf].total_compressed_size)


def test_mask_column_stays_small(shard: Path, skewed: Completion, tmp_path: Path) -> None:
    """Measured here: 1.96 bytes a mask id, levels included, and 2.02 when plain. The guard leaves 5 % for another zstd.

    Sampled text takes less (1.48), because its ids repeat more.
    """
    ours = column_chunks(shard)[MASK_LEAF].total_compressed_size
    assert ours / len(skewed.mask_ids) < 2.06
    assert ours < plain_bytes(tmp_path / "plain.parquet", skewed, MASK_LEAF)


def test_support_logprobs_are_smaller_split_than_plain(shard: Path, skewed: Completion, tmp_path: Path) -> None:
    """The same encoding serves float32: exponents compress among themselves."""
    ours = column_chunks(shard)[SUPPORT_LEAF].total_compressed_size
    assert ours < plain_bytes(tmp_path / "plain.parquet", skewed, SUPPORT_LEAF)


def test_encodings_are_those_of_the_contract(shard: Path) -> None:
    """BYTE_STREAM_SPLIT for ids and logprobs of supports, dictionaries for repeated texts only, zstd for everything."""
    dictionary = {"prompt_id", "finish_reason", "stop_reason", "prompt", "metadata"}
    for leaf, chunk in column_chunks(shard).items():
        assert chunk.compression == "ZSTD", leaf
        assert ("BYTE_STREAM_SPLIT" in chunk.encodings) is (leaf in {MASK_LEAF, SUPPORT_LEAF}), leaf
        assert chunk.has_dictionary_page is (leaf in dictionary), leaf


def test_statistics_where_readers_filter(shard: Path) -> None:
    """Keys and lengths have minimum and maximum; lists and texts, where they would only cost bytes, have none."""
    filtered = {"prompt_id", "sample_index", "prompt_index", "prompt_length", "response_length"}
    for leaf, chunk in column_chunks(shard).items():
        assert (chunk.statistics is not None and chunk.statistics.has_min_max) is (leaf in filtered), leaf
        assert chunk.has_offset_index, leaf


def test_pages_are_v1_with_a_checksum(shard: Path) -> None:
    """`PageHeader` of parquet.thrift: field 1 is the type (0: data page v1), field 4 the CRC."""
    content = shard.read_bytes()
    for leaf, chunk in column_chunks(shard).items():
        header, _ = read_struct(content[chunk.data_page_offset :][:256])
        assert header[1] == 0, leaf
        assert 4 in header, leaf


def test_footer_explains_a_lone_shard(
    tmp_path: Path, make_manifest: Callable[..., Any], make_completion: MakeCompletion
) -> None:
    """Format version, digest, both vocabulary sizes and the engine are in the footer of each shard."""
    manifest = make_manifest()
    schema = shard_schema(support_logprobs=False).with_metadata(footer_metadata(manifest))
    write_parquet(tmp_path / "shard.parquet", [make_completion()], schema)
    stored = pq.read_metadata(tmp_path / "shard.parquet").metadata
    assert {key: value for key, value in stored.items() if key.startswith(b"rollgen.")} == {
        b"rollgen.format_version": b"1.0",
        b"rollgen.config_digest": manifest.config_digest.encode(),
        b"rollgen.vocab_size": b"512",
        b"rollgen.tokenizer_vocab_size": b"500",
        b"rollgen.engine": b"fake 1",
    }


def test_null_supports_cost_little(tmp_path: Path, make_completion: MakeCompletion) -> None:
    """A null support costs a level, not an id: 40,000 untruncated tokens take less than a tenth of a byte each."""
    path = tmp_path / "shard.parquet"
    write_parquet(path, [make_completion(0, 0, tokens=TOKENS, full=True)], shard_schema(support_logprobs=False))
    assert column_chunks(path)[MASK_LEAF].total_compressed_size < TOKENS / 10
    assert column_chunks(path)[MASK_LEAF].num_values == TOKENS
