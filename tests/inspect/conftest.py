"""A random dataset on disk beside the completions it was made from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import (
    Attempt,
    EngineRecord,
    Manifest,
    ModelRecord,
    PromptSource,
    Retry,
    create_manifest,
    read_manifest,
    replace_manifest,
)
from rollgen.format.schema import PLAN_FILE, PLAN_SCHEMA
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, Sampling, sample_seed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCAB_SIZE, TOKENIZER_VOCAB_SIZE = 500, 480
PROMPTS, SAMPLES = 12, 3


class Made(NamedTuple):
    directory: Path
    completions: list[Completion]


def manifest(*, support_logprobs: bool, model_name: str = "tiny") -> Manifest:
    identity = {
        "temperature": 0.7,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 60,
        "chat": True,
        "capture": "logprobs",
    }
    attempt = Attempt(
        started_at="2026-01-02T03:04:05+00:00",
        rollgen_version="0",
        n=SAMPLES,
        limit=None,
        prompts=[PromptSource(name="prompts.jsonl", bytes=1, sha256="0" * 64)],
        operational={},
        engine=EngineRecord(name="vllm", version="0.32.0", device="cpu", versions={}, processors="top_k, top_p"),
    )
    return Manifest(
        created_at="2026-01-02T03:04:05+00:00",
        config_digest=digest(identity),
        identity=identity,
        capture="logprobs",
        support_logprobs=support_logprobs,
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=TOKENIZER_VOCAB_SIZE,
        model=ModelRecord(name=model_name, revision=None, fingerprint="f", dtype="float32", context_length=64),
        tokenizer_sha256="0" * 64,
        attempts=[attempt],
    )


def random_completion(rng: np.random.Generator, prompt_index: int, sample_index: int) -> Completion:
    """Every fourth prompt is not truncated; other supports have 1 to 13 ids at top_k 8, so that ties occur."""
    truncates, length = prompt_index % 4 != 3, int(rng.integers(1, 60))
    sizes = rng.integers(1, 14, length) if truncates else np.zeros(length, np.int64)
    supports = [np.sort(rng.choice(VOCAB_SIZE, size, replace=False)) for size in sizes]
    weights = [np.log(rng.dirichlet(np.ones(size))) if size > 1 else np.zeros(size) for size in sizes]
    picks = [int(rng.integers(size)) if size else 0 for size in sizes]
    sampled = [ids[pick] if len(ids) else rng.integers(VOCAB_SIZE) for ids, pick in zip(supports, picks, strict=True)]
    logprobs = [w[pick] if len(w) else -rng.exponential() for w, pick in zip(weights, picks, strict=True)]
    prompt_id = f"p{prompt_index}"
    return Completion(
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_index=prompt_index,
        prompt_token_ids=rng.integers(0, 400, int(rng.integers(1, 9)), dtype=np.int32),
        token_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32),
        mask_ids=np.concatenate(supports).astype(np.int32),
        mask_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        support_logprobs=np.concatenate(weights).astype(np.float32),
        finish_reason=str(rng.choice(["stop", "length"])),
        sampling=Sampling(0.7, 0.9, 8, 0.0, 60) if truncates else Sampling(1.0, 1.0, 0, 0.0, 60),
        seed=sample_seed(0, prompt_id, sample_index),
        stop_reason=str(rng.choice(["7", '"END"'])) if rng.random() < 0.3 else None,
        replayable=bool(rng.random() < 0.9),
        text=f"text of {prompt_id}",
        prompt=f"prompt {prompt_id}",
    )


def write_plan(directory: Path, samples: int) -> None:
    """`PROMPTS` prompts of `samples` samples, then a tombstone."""
    row = {"seed": 0, "temperature": 0.7, "top_p": 0.9, "min_p": 0.0, "top_k": 8, "max_tokens": 60, "stop": []}
    row |= {"stop_token_ids": [], "prompt_token_ids": [1]}
    rows = [{**row, "prompt_id": f"p{index}", "prompt_index": index, "n": samples} for index in range(PROMPTS)]
    rows.append({**row, "prompt_id": "bad", "prompt_index": PROMPTS, "n": 5, "error": "f:1: no prompt"})
    plan = pa.Table.from_pylist(rows, schema=PLAN_SCHEMA)
    pq.write_table(plan, directory / PLAN_FILE, write_page_checksum=True)


def write_dataset(directory: Path, completions: list[Completion], record: Manifest) -> None:
    """A manifest, and one shard for each third of the completions."""
    directory.mkdir()
    create_manifest(directory, record)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, record, commit_interval=math.inf) as writer:
        for position, completion in enumerate(completions, 1):
            writer.add(completion)
            if position % (len(completions) // 3) == 0:
                writer.flush()


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Made]:
    """`make_dataset(seed, support_logprobs=...)` writes `tmp_path/data_<seed>` with a plan that leaves samples owed."""

    def make(seed: int, *, support_logprobs: bool = False, model_name: str = "tiny") -> Made:
        rng = np.random.default_rng(seed)
        keys = [(p, k) for p in range(PROMPTS) for k in range(SAMPLES)]
        completions = [random_completion(rng, *key) for key in keys]
        directory = tmp_path / f"data_{seed}"
        write_dataset(directory, completions, manifest(support_logprobs=support_logprobs, model_name=model_name))
        write_plan(directory, SAMPLES + 1)
        return Made(directory, completions)

    return make


@pytest.fixture
def commit() -> Callable[..., None]:
    """`commit(directory, completions, writer="w0")`: one more shard of a dataset."""

    def write(directory: Path, completions: list[Completion], writer: str = "w0") -> None:
        record = read_manifest(directory)
        with WriterSlot(directory, writer) as slot, ShardWriter(slot, record, commit_interval=math.inf) as shard:
            for completion in completions:
                shard.add(completion)

    return write


@pytest.fixture
def make_again(make_dataset: Callable[..., Made], commit: Callable[..., None]) -> Callable[[], Made]:
    """`make_again()`: a dataset whose first sample was made again, as generation 1, with the next one's tokens."""

    def make() -> Made:
        made = make_dataset(0, support_logprobs=True)
        retry = Retry(generation=1, started_at="", where={"finish_reason": "length"}, max_tokens=99, samples=2)
        replace_manifest(made.directory, read_manifest(made.directory).with_retry(retry))
        first, second = made.completions[:2]
        commit(made.directory, [replace(second, sample_index=0, seed=first.seed, generation=1)])
        return made

    return make


@pytest.fixture
def empty_dataset(tmp_path: Path) -> Path:
    """A run that has planned and not yet committed anything."""
    directory = tmp_path / "empty"
    directory.mkdir()
    create_manifest(directory, manifest(support_logprobs=True))
    write_plan(directory, 2)
    return directory
