"""What a shard looks like on disk: encodings, checksums and statistics from the footer, and the size of its masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollgen.format.columns import build_table
from rollgen.format.ragged import nested_ragged, ragged
from rollgen.format.schema import FORMAT_VERSION, shard_schema
from rollgen.format.thrift import I32, read_struct
from rollgen.format.writer import build_row_groups, footer_metadata, write_parquet
from rollgen.rollouts import Completion, Sampling

MakeCompletion = Callable[..., Completion]
MASK_LEAF = "sampling_mask.list.element.list.element"
SUPPORT_LEAF = "support_logprobs.list.element.list.element"
REAL_MASKS = Path(__file__).parents[1] / "data" / "real_masks.parquet"


@pytest.fixture(scope="module")
def sampled() -> list[Completion]:
    """256 completions of a language model, with the supports that vLLM sampled from; their probabilities are random."""
    table = pq.read_table(REAL_MASKS)
    masks, tokens, logprobs = (
        nested_ragged(table["sampling_mask"]),
        ragged(table["token_ids"]),
        ragged(table["logprobs"]),
    )
    sizes = np.diff(masks.offsets)
    mass = np.random.default_rng(0).exponential(size=len(masks.values))
    weights = np.log(mass / np.repeat(np.add.reduceat(mass, masks.offsets[:-1]), sizes)).astype(np.float32)
    completions = []
    for index, (start, stop) in enumerate(itertools.pairwise(masks.row_offsets)):
        first, last = masks.offsets[[start, stop]]
        completions.append(
            Completion(
                prompt_id=f"p{index}",
                sample_index=0,
                prompt_index=index,
                prompt_token_ids=np.array([1], np.int32),
                token_ids=tokens.values[start:stop],
                logprobs=logprobs.values[start:stop],
                mask_ids=masks.values[first:last],
                mask_offsets=masks.offsets[start : stop + 1] - first,
                finish_reason="length",
                sampling=Sampling(),
                seed=0,
                support_logprobs=weights[first:last],
            )
        )
    return completions


@pytest.fixture(scope="module")
def shard(sampled: list[Completion], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of them, in one row group."""
    path = tmp_path_factory.mktemp("size") / "shard.parquet"
    write_parquet(
        path, build_row_groups(sampled, shard_schema(support_logprobs=True)), shard_schema(support_logprobs=True)
    )
    return path


def column_chunks(path: Path) -> dict[str, Any]:
    """The column chunks of the first row group, by the path of their leaf."""
    row_group = pq.read_metadata(path).row_group(0)
    chunks = [row_group.column(index) for index in range(row_group.num_columns)]
    return {chunk.path_in_schema: chunk for chunk in chunks}


@pytest.fixture(scope="module")
def plain_shard(sampled: list[Completion], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows as one would write them first: PLAIN, without dictionaries, zstd at its usual level 3."""
    path = tmp_path_factory.mktemp("size") / "plain.parquet"
    schema = shard_schema(support_logprobs=True)
    with pq.ParquetWriter(path, schema, compression="zstd", compression_level=3, use_dictionary=False) as writer:
        writer.write_table(build_table(sampled, schema))
    return path


def test_mask_column_stays_small(shard: Path, plain_shard: Path, sampled: list[Completion]) -> None:
    """Measured: 1.48 bytes a mask id, levels included, and 1.58 when plain. The guard leaves 4 % for another zstd."""
    ids = sum(len(completion.mask_ids) for completion in sampled)
    ours, plain = (column_chunks(path)[MASK_LEAF].total_compressed_size for path in (shard, plain_shard))
    assert ours / ids < 1.54
    assert ours < 0.96 * plain


def test_support_logprobs_are_smaller_split_than_plain(shard: Path, plain_shard: Path) -> None:
    """The same encoding serves float32, whose exponents compress among themselves: 10 % less was measured."""
    ours, plain = (column_chunks(path)[SUPPORT_LEAF].total_compressed_size for path in (shard, plain_shard))
    assert ours < 0.94 * plain


def test_encodings_are_those_of_the_contract(shard: Path) -> None:
    """BYTE_STREAM_SPLIT for ids and logprobs of supports, dictionaries for repeated texts only, zstd for everything."""
    dictionary = {"prompt_id", "finish_reason", "stop_reason", "prompt", "metadata"}
    for leaf, chunk in column_chunks(shard).items():
        assert chunk.compression == "ZSTD", leaf
        assert ("BYTE_STREAM_SPLIT" in chunk.encodings) is (leaf in {MASK_LEAF, SUPPORT_LEAF}), leaf
        assert chunk.has_dictionary_page is (leaf in dictionary), leaf


def test_statistics_where_readers_filter(shard: Path) -> None:
    """Keys and lengths have minimum and maximum; lists and texts, where they would only cost bytes, have none."""
    filtered = {"prompt_id", "sample_index", "generation", "prompt_index", "prompt_length", "response_length"}
    for leaf, chunk in column_chunks(shard).items():
        assert (chunk.statistics is not None and chunk.statistics.has_min_max) is (leaf in filtered), leaf
        assert chunk.has_offset_index, leaf


def test_pages_are_v1_with_a_checksum(shard: Path) -> None:
    """`PageHeader` of parquet.thrift: field 1 is the type (0: data page v1), field 4 the CRC."""
    content = shard.read_bytes()
    for leaf, chunk in column_chunks(shard).items():
        header, _ = read_struct(content[chunk.data_page_offset :][:256])
        assert header[1 << 4 | I32] == 0, leaf
        assert 4 << 4 | I32 in header, leaf


def test_footer_explains_a_lone_shard(
    tmp_path: Path, make_manifest: Callable[..., Any], make_completion: MakeCompletion
) -> None:
    """Format version, digest, both vocabulary sizes and the engine are in the footer of each shard."""
    manifest = make_manifest()
    schema = shard_schema(support_logprobs=False).with_metadata(footer_metadata(manifest))
    write_parquet(tmp_path / "shard.parquet", build_row_groups([make_completion()], schema), schema)
    stored = pq.read_metadata(tmp_path / "shard.parquet").metadata
    assert {key: value for key, value in stored.items() if key.startswith(b"rollgen.")} == {
        b"rollgen.format_version": FORMAT_VERSION.encode(),
        b"rollgen.config_digest": manifest.config_digest.encode(),
        b"rollgen.vocab_size": b"512",
        b"rollgen.tokenizer_vocab_size": b"500",
        b"rollgen.engine": b"fake 1",
    }


def test_null_supports_cost_little(tmp_path: Path, make_completion: MakeCompletion) -> None:
    """A null support costs a level, not an id: 40,000 untruncated tokens take less than a tenth of a byte each."""
    path = tmp_path / "shard.parquet"
    write_parquet(
        path,
        build_row_groups([make_completion(0, 0, tokens=40_000, full=True)], shard_schema(support_logprobs=False)),
        shard_schema(support_logprobs=False),
    )
    assert column_chunks(path)[MASK_LEAF].total_compressed_size < 4_000
    assert column_chunks(path)[MASK_LEAF].num_values == 40_000
