"""`rollgen verify` on one core: tokens a second, beside what it is made of.

    python -m tests.benchmarks.verify [--masks FILE]

A dataset with a plan, 16 samples a prompt, is verified as the command does it: hashes, pages, every invariant of every
token, plan, seeds, keys. Beside it are the same files read by the loader's reader (which verifies pages, and checks the
cheap invariants), and hashed only. From the page cache; rounds are interleaved, medians are shown.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import create_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.loader.row_groups import load_row_group
from rollgen.prompts.plan import PlanWriter
from rollgen.rollouts import Prompt, sample_seed
from rollgen.verify.dataset import verify_dataset
from tests.benchmarks.loading import limit_threads
from tests.benchmarks.masks import RawCompletion, read_completions, real_completions, synthetic_completions
from tests.conftest import random_completion, random_prompt, some_manifest

TOKENS = 1_000_000
SAMPLES = 16
ROUNDS = 5


def main() -> None:
    """Print a table for each kind of mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", type=Path, help="another file with token_ids, logprobs and sampling_mask")
    arguments = parser.parse_args()
    limit_threads(sorted(os.sched_getaffinity(0))[-1:])
    sources = {"real": real_completions, "synthetic": synthetic_completions}
    if arguments.masks:
        sources = {arguments.masks.name: lambda: read_completions(arguments.masks)}
    for name, source in sources.items():
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / "dataset"
            tokens = write_dataset(directory, source())
            print(f"\n{name} masks, {tokens:,} tokens, one core:")
            for label, seconds in measure(directory).items():
                print(f"  {label:<34}{tokens / seconds / 1e6:7.2f} M tokens/s")


def write_dataset(directory: Path, completions: list[RawCompletion]) -> int:
    """A dataset of about TOKENS tokens with a plan. Returns the number of tokens."""
    directory.mkdir()
    rows = -(-TOKENS // sum(len(raw.token_ids) for raw in completions)) * len(completions)
    prompts = rows // SAMPLES
    with PlanWriter(directory / PLAN_FILE) as plan:
        for start in range(0, prompts, 1024):
            plan.write([_prompt(index) for index in range(start, min(prompts, start + 1024))])
    manifest = some_manifest(
        vocab_size=151_936, tokenizer_vocab_size=151_000, plan_sha256=file_sha256(directory / PLAN_FILE)
    )
    create_manifest(directory, manifest)
    tokens = 0
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for row in range(prompts * SAMPLES):
            raw = completions[row % len(completions)]
            prompt = _prompt(row // SAMPLES)
            sizes = [len(mask) for mask in raw.masks]
            writer.add(
                replace(
                    random_completion(row // SAMPLES, row % SAMPLES, tokens=1),
                    token_ids=np.array(raw.token_ids, np.int32),
                    logprobs=np.array(raw.logprobs, np.float32),
                    mask_ids=np.concatenate([np.sort(mask) for mask in raw.masks]).astype(np.int32),
                    mask_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
                    sampling=prompt.sampling,
                    seed=sample_seed(0, prompt.prompt_id, row % SAMPLES),
                )
            )
            tokens += len(raw.token_ids)
            if row % 2048 == 2047:
                writer.flush()
    return tokens


def _prompt(index: int) -> Prompt:
    prompt = random_prompt(index, n=SAMPLES)
    return replace(prompt, sampling=replace(prompt.sampling, max_tokens=512))


def measure(directory: Path) -> dict[str, float]:
    """Median seconds of each way to go through all shards."""
    ways: dict[str, Callable[[Path], object]] = {
        "rollgen verify": _verify,
        "the loader's verified read": _load,
        "SHA-256 alone": _hash,
    }
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(ROUNDS):
        for label, way in ways.items():
            start = time.perf_counter()
            way(directory)
            seconds[label].append(time.perf_counter() - start)
    return {label: statistics.median(values) for label, values in seconds.items()}


def _verify(directory: Path) -> None:
    verification = verify_dataset(directory)
    assert verification.is_clean, verification.findings


def _load(directory: Path) -> None:
    dataset = open_dataset(directory)
    for stored in dataset.shards:
        with stored.open() as shard:
            for index in range(len(shard.row_group_rows)):
                load_row_group(shard, index, dataset.manifest.vocab_size, ["prompt_id", "sample_index"])


def _hash(directory: Path) -> None:
    for stored in open_dataset(directory).shards:
        file_sha256(stored.path)


if __name__ == "__main__":
    main()
