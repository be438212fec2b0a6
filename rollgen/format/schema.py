"""Format v1 of a shard: the Arrow schema, the Parquet encodings and the footer keys; `schema/SPEC.md` is the contract.

The schema is explicit and never inferred. Measured on 39k really sampled tokens (vocabulary 49k) and 250k synthetic
ones (vocabulary 152k), BYTE_STREAM_SPLIT + zstd takes 1.48 bytes a mask id on the first and 12.95 bytes a token on the
second. PLAIN is 2 % smaller on the first and 6 % larger on the second; dictionary and delta encodings are 20-40 %
larger on both. Numbers of experts take 0.88 bytes each of 128 experts and 1.18 of 512, as entropy has it; PLAIN takes
1.12 and 1.48, raw bytes in a binary column 0.88 and 1.31. Data page v1, because v2 leaves the levels uncompressed. Page
checksums are written here and verified in `reader.py`: both default to off in pyarrow.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import pyarrow as pa

FORMAT_NAME: Final = "rollgen"
FORMAT_VERSION: Final = "1.3"
"""MAJOR.MINOR. A reader accepts its own MAJOR; MINOR adds columns, keys and files only: 1.1 added generations, 1.2 what
engines tell of their weights and experts, 1.3 datasets of several runs, and rewards."""

GENERATION_VERSION: Final = "1.1"
"""The MINOR that added the column `generation`."""
REWARDS_VERSION: Final = "1.3"
"""The MINOR that added rewards, and what their files say they are of."""

MANIFEST_FILE: Final = "rollgen.json"
PLAN_FILE: Final = "plan.parquet"
RETRY_FILES: Final = "retry-*.parquet"
DATA_DIR: Final = "data"
JOURNAL_DIR: Final = "journal"
FAILURES_DIR: Final = "failures"
TOKENIZER_DIR: Final = "tokenizer"
QUARANTINE_DIR: Final = "quarantine"
RETIRED_DIR: Final = "retired"
LOGS_DIR: Final = "logs"
REWARDS_DIR: Final = "rewards"

FOOTER_FORMAT_VERSION: Final = b"rollgen.format_version"
FOOTER_CONFIG_DIGEST: Final = b"rollgen.config_digest"
FOOTER_VOCAB_SIZE: Final = b"rollgen.vocab_size"
FOOTER_TOKENIZER_VOCAB_SIZE: Final = b"rollgen.tokenizer_vocab_size"
FOOTER_ENGINE: Final = b"rollgen.engine"
"""Key/value metadata of each shard's footer, so that a lone file explains itself. Values are UTF-8 text."""
REWARDS_KEY: Final = b"rollgen.rewards"
"""And what a file of rewards has there, beside format version and config digest."""

ROW_GROUP_TOKENS: Final = 57_344
"""Generated tokens after which a row group is closed: the unit of random access and of damage."""
DATA_PAGE_BYTES: Final = 4 << 20
ZSTD_LEVEL: Final = 5


def retry_file(generation: int) -> str:
    """Name of the file that lists the samples of a retry; one of RETRY_FILES."""
    return f"retry-{generation}.parquet"


def has_generation(format_version: str) -> bool:
    """Whether shards of this MINOR have the column `generation`."""
    return format_version != "1.0"


def has_extras(format_version: str) -> bool:
    """Whether shards of this MINOR may have the columns of weights and experts."""
    return format_version not in ("1.0", "1.1")


def has_runs(format_version: str) -> bool:
    """Whether a dataset of this MINOR may be of several runs."""
    return format_version not in ("1.0", "1.1", "1.2")


def _list_of(value: pa.DataType, *, nullable_element: bool = False) -> pa.ListType:
    return pa.list_(pa.field("element", value, nullable=nullable_element))


TOKEN_LIST: Final = _list_of(pa.int32())
LOGPROB_LIST: Final = _list_of(pa.float32())
MASK_LIST: Final = _list_of(_list_of(pa.int32()), nullable_element=True)
SUPPORT_LOGPROB_LIST: Final = _list_of(_list_of(pa.float32()), nullable_element=True)
VERSION_LIST: Final = _list_of(pa.string())
START_LIST: Final = _list_of(pa.int32())
EXPERT_LIST: Final = _list_of(pa.int16())
MAX_EXPERTS: Final = 1 << 15
"""Of a layer: their numbers are int16."""
OPTIONAL_COLUMNS: Final = ("run", "support_logprobs", "weight_versions", "routed_experts")
"""Those that all shards of a dataset have, or none; `weight_version_starts` comes with `weight_versions`."""

_STATISTICS: Final = tuple("run prompt_id sample_index generation prompt_index prompt_length response_length".split())
_DICTIONARIES: Final = ("run", "prompt_id", "finish_reason", "stop_reason", "prompt", "metadata")
_SPLIT_LEAVES: Final = {
    "sampling_mask": "sampling_mask.list.element.list.element",
    "support_logprobs": "support_logprobs.list.element.list.element",
    "routed_experts": "routed_experts.list.element",
}
"""What is stored as BYTE_STREAM_SPLIT, by column."""


@cache
def shard_schema(
    *,
    support_logprobs: bool,
    weight_versions: bool = False,
    routed_experts: bool = False,
    run: bool = False,
    generation: bool = True,
) -> pa.Schema:
    """The columns of a shard, in order. All but the last are optional ones; shards of 1.0 have no `generation`."""
    versions = [
        pa.field("weight_versions", VERSION_LIST, nullable=False),
        pa.field("weight_version_starts", START_LIST, nullable=False),
    ]
    fields = [
        *([pa.field("run", pa.string(), nullable=False)] if run else []),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        *([pa.field("generation", pa.int32(), nullable=False)] if generation else []),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("response_length", pa.int32(), nullable=False),
        pa.field("prompt_token_ids", TOKEN_LIST, nullable=False),
        pa.field("token_ids", TOKEN_LIST, nullable=False),
        pa.field("logprobs", LOGPROB_LIST, nullable=False),
        pa.field("sampling_mask", MASK_LIST, nullable=False),
        *([pa.field("support_logprobs", SUPPORT_LOGPROB_LIST, nullable=False)] if support_logprobs else []),
        *(versions if weight_versions else []),
        *([pa.field("routed_experts", EXPERT_LIST, nullable=False)] if routed_experts else []),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("stop_reason", pa.string()),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("top_p", pa.float32(), nullable=False),
        pa.field("min_p", pa.float32(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("replayable", pa.bool_(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("metadata", pa.string()),
    ]
    return pa.schema(fields)


PLAN_SCHEMA: Final = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("min_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("stop", _list_of(pa.string()), nullable=False),
        pa.field("stop_token_ids", TOKEN_LIST, nullable=False),
        pa.field("prompt_token_ids", TOKEN_LIST, nullable=False),
        pa.field("prompt", pa.string()),
        pa.field("metadata", pa.string()),
        pa.field("error", pa.string()),
    ]
)
"""One row per input row, in input order; `error` is set on tombstones (bad rows skipped on request)."""

RETRY_SCHEMA: Final = pa.schema(
    [
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
    ]
)
"""One row per sample to be made again, sorted by prompt_index and sample_index."""

REWARD_SCHEMA: Final = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("tokens_crc32", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("error", pa.string()),
    ]
)
"""One row per sample and try to score it; further float64 columns follow, as the scorer names them."""


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Keyword arguments of `pq.ParquetWriter` for a shard of this schema."""
    byte_stream_split = {leaf: "BYTE_STREAM_SPLIT" for column, leaf in _SPLIT_LEAVES.items() if column in schema.names}
    return {
        "compression": "zstd",
        "compression_level": ZSTD_LEVEL,
        "use_dictionary": [name for name in _DICTIONARIES if name in schema.names],
        "column_encoding": byte_stream_split,
        "data_page_version": "1.0",
        "data_page_size": DATA_PAGE_BYTES,
        "write_page_checksum": True,
        "write_page_index": True,
        "write_statistics": [name for name in _STATISTICS if name in schema.names],
        "store_schema": True,
    }
