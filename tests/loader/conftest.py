"""Small datasets on disk, made by the real writer, with every kind of row that a loader meets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Attempt, EngineRecord, Manifest, ModelRecord, create_manifest
from rollgen.format.schema import shard_schema
from rollgen.format.writer import footer_metadata, write_parquet
from rollgen.rollouts import Completion, Sampling

VOCAB_SIZE = 300

MakeCompletion = Callable[..., Completion]
MakeDataset = Callable[..., Path]


@pytest.fixture
def make_completion() -> MakeCompletion:
    """`make_completion(prompt_index, sample_index, tokens=5, **changes)`: random, the same for the same key."""
    return completion


def completion(
    prompt_index: int, sample_index: int, *, tokens: int = 5, full: bool = False, **changes: object
) -> Completion:
    """Supports of 1 to 9 ids with the sampled one inside, or none at all when `full`."""
    rng = np.random.default_rng([prompt_index, sample_index])
    sizes = np.zeros(tokens, np.int64) if full else rng.integers(1, 10, tokens)
    offsets = np.concatenate([[0], sizes.cumsum()])
    # Rows start below 100 and rise by 1 to 20 eight times at most: below 260.
    steps = rng.integers(1, 21, offsets[-1]).cumsum()
    first = offsets[:-1][sizes > 0]
    ids = steps - np.repeat(steps[first] - rng.integers(0, 100, len(first)), sizes[sizes > 0])
    sampled = rng.integers(0, VOCAB_SIZE, tokens) if full else ids[first + rng.integers(0, sizes)]
    made = Completion(
        prompt_id=f"p{prompt_index}",
        sample_index=sample_index,
        prompt_index=prompt_index,
        prompt_token_ids=rng.integers(0, VOCAB_SIZE, 1 + prompt_index % 4).astype(np.int32),
        token_ids=sampled.astype(np.int32),
        logprobs=np.where(sizes == 1, 0, -rng.random(tokens)).astype(np.float32),
        mask_ids=ids.astype(np.int32),
        mask_offsets=offsets.astype(np.int64),
        finish_reason="stop",
        sampling=Sampling(temperature=0.5 + prompt_index / 8, top_k=0 if full else 9),
        seed=17 * prompt_index + sample_index,
        text=f"text {prompt_index}.{sample_index}",
        metadata=f'{{"answer": {prompt_index}}}',
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """`make_dataset(shards, support_logprobs=False)`: a directory with one committed shard for each list."""

    def make(shards: Iterable[list[Completion]], *, support_logprobs: bool = False) -> Path:
        directory = tmp_path / "dataset"
        directory.mkdir()
        manifest = a_manifest(support_logprobs=support_logprobs)
        assert create_manifest(directory, manifest)
        schema = shard_schema(support_logprobs=support_logprobs).with_metadata(footer_metadata(manifest))
        with WriterSlot(directory, "w0") as slot:
            for rows in shards:
                write_parquet(slot.temporary(), rows, schema)
                slot.publish(slot.temporary(), rows=len(rows), tokens=0, mask_ids=0)
        return directory

    return make


def a_manifest(*, support_logprobs: bool) -> Manifest:
    """A manifest of a run that never was."""
    identity = {"model": "tiny"}
    engine = EngineRecord(name="none", version="0", device="cpu", versions={}, processors="top_k")
    attempt = Attempt(
        started_at="2026-01-01T00:00:00Z",
        rollgen_version="0",
        n=1,
        limit=None,
        prompts=[],
        operational={},
        engine=engine,
    )
    return Manifest(
        created_at="2026-01-01T00:00:00Z",
        config_digest=digest(identity),
        identity=identity,
        capture="native",
        support_logprobs=support_logprobs,
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=VOCAB_SIZE - 4,
        model=ModelRecord(name="tiny", revision=None, fingerprint="0", dtype="float32", context_length=64),
        tokenizer_sha256="0",
        attempts=[attempt],
    )
