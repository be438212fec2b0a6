"""From finished completion to committed shard, without the engine, beside what people store rollouts with today.

    python -m tests.benchmarks.pipeline [--masks FILE]

rollgen does all it does in a run: masks to numpy, every invariant, Arrow, Parquet, reopen and verify every page, fsync,
SHA-256, link, journal. The alternatives only write: no checks, no checksums, no commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from rollgen.engines.base import Capture
from rollgen.engines.capture import CapturedSupport
from rollgen.engines.outputs import read_outputs
from rollgen.format.commit import WriterSlot
from rollgen.format.invariants import find_problem
from rollgen.format.journal import read_journal
from rollgen.format.manifest import Attempt, EngineRecord, Manifest, ModelRecord
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, Sampling
from tests.benchmarks.masks import RawCompletion, read_completions, real_completions, synthetic_completions

VOCAB_SIZE = 151_936
GROUP = 8
ROUNDS = 3
TOKENS = 600_000
SHARD_BYTES = 16 << 20
"""Several shards in a round, so that with a second core one is encoded while the next is filled."""
NUM_LOGPROBS = 82
"""What the logprobs capture asks for at top_k 50."""

Write = Callable[[Sequence[RawCompletion], Path], int]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", type=Path, help="a Parquet file to use as the second data set")
    arguments = parser.parse_args()
    second = read_completions(arguments.masks) if arguments.masks else synthetic_completions()
    for name, data in (("real masks", real_completions()), ("synthetic masks", second)):
        _table(name, data)


def _table(name: str, data: list[RawCompletion]) -> None:
    tokens = sum(len(row.token_ids) for row in data)
    repeated = max(1, round(TOKENS / tokens))
    ids = sum(len(mask) for row in data for mask in row.masks) / tokens
    print(f"\n{name}: {tokens * repeated:,} tokens, {ids:.1f} ids a support, medians of {ROUNDS} rounds")
    print(f"{'':34}{'Mtokens/s':>10}{'bytes/token':>13}{'speed':>8}")
    cores = sorted(os.sched_getaffinity(0))
    cases: list[tuple[str, Write, int]] = [
        ("rollgen, native, 1 core", write_rollgen, 1),
        ("rollgen, native, 2 cores", write_rollgen, 2),
        ("rollgen, logprobs capture, 1 core", write_rollgen_logprobs, 1),
        ("pyarrow defaults, 1 core", write_pyarrow, 1),
        ("JSON lines + zstd, 1 core", write_jsonl, 1),
        ("pickle, 1 core", write_pickle, 1),
    ]
    cases = [case for case in cases if case[2] <= len(cores)]
    results: dict[str, list[float]] = {case: [] for case, _, _ in cases}
    sizes: dict[str, float] = {}
    for _ in range(ROUNDS):  # interleaved, so that a slow moment of the machine hits all alike
        for case, write, count in cases:
            os.sched_setaffinity(0, cores[:count])
            speed, sizes[case] = _measure(write, data, repeated, tokens)
            results[case].append(speed)
    os.sched_setaffinity(0, cores)
    base = statistics.median(results[cases[0][0]])
    for case, _, _ in cases:
        speed = statistics.median(results[case])
        print(f"{case:34}{speed / 1e6:>10.2f}{sizes[case]:>13.2f}{speed / base:>7.2f}x")


def _measure(write: Write, data: list[RawCompletion], repeated: int, tokens: int) -> tuple[float, float]:
    """Tokens a second and bytes a token. The input is copied first: freeing it is part of the work."""
    rows = [row._replace(masks=[list(mask) for mask in row.masks]) for _ in range(repeated) for row in data]
    if write is write_rollgen_logprobs:
        rows = [_with_logprobs(row) for row in rows]
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        size = write(rows, Path(scratch))
        elapsed = time.perf_counter() - started
    gc.unfreeze()
    return tokens * repeated / elapsed, size / (tokens * repeated)


def write_rollgen(rows: list[RawCompletion], directory: Path) -> int:
    """The pipeline of a native run."""
    return _write(rows, directory, _native)


def write_rollgen_logprobs(rows: list[RawCompletion], directory: Path) -> int:
    """The pipeline of a logprobs run: `masks` holds flat ids and logprobs, see `_with_logprobs`."""
    return _write(rows, directory, _from_logprobs)


def _write(rows: list[RawCompletion], directory: Path, read: Callable[[RawCompletion], CapturedSupport]) -> int:
    with (
        WriterSlot(directory, "w0") as slot,
        ShardWriter(slot, _manifest(), commit_interval=1e9, max_buffer_bytes=SHARD_BYTES) as writer,
    ):
        for index in range(len(rows)):
            row, rows[index] = rows[index], None  # type: ignore[call-overload]
            support = read(row)
            completion = Completion(
                prompt_id=f"prompt-{index // GROUP}",
                sample_index=index % GROUP,
                prompt_index=index // GROUP,
                prompt_token_ids=np.asarray(row.prompt_token_ids, np.int32),
                token_ids=np.asarray(row.token_ids, np.int32),
                logprobs=support.logprobs,
                mask_ids=support.mask_ids,
                mask_offsets=support.mask_offsets,
                finish_reason="length",
                sampling=Sampling(),
                seed=index,
            )
            problem = find_problem(completion, VOCAB_SIZE)
            assert problem is None, problem
            writer.add(completion)
            if index % GROUP == GROUP - 1:
                writer.close_group(index // GROUP)
    return sum(line.bytes for line in read_journal(directory).committed.values())


def _native(row: RawCompletion) -> CapturedSupport:
    return _support(row, sampling_mask=row.masks, capture="native")


def _with_logprobs(row: RawCompletion) -> RawCompletion:
    """Equal probabilities over the same supports: the sampled entry, the support, then excluded ids at -inf."""
    ids: list[int] = []
    logprobs: list[float] = []
    for token, mask in zip(row.token_ids, row.masks, strict=True):
        kept = mask[: NUM_LOGPROBS - 1]
        if token not in kept:
            kept[-1] = token
        excluded = NUM_LOGPROBS - len(kept)
        ids += [token, *kept, *range(excluded)]
        equal = -math.log(len(kept))
        logprobs += [equal, *[equal] * len(kept), *[-math.inf] * excluded]
    return row._replace(masks=[ids], logprobs=logprobs)


def _from_logprobs(row: RawCompletion) -> CapturedSupport:
    starts = list(range(0, len(row.logprobs), NUM_LOGPROBS + 1))
    flat = SimpleNamespace(
        token_ids=row.masks[0],
        logprobs=row.logprobs,
        start_indices=starts,
        end_indices=[*starts[1:], len(row.logprobs)],
    )
    return _support(row, logprobs=flat, capture="logprobs")


def _support(row: RawCompletion, *, capture: Capture, **fields: Any) -> CapturedSupport:
    output = {"token_ids": row.token_ids, "logprobs": row.logprobs, "finish_reason": "length"} | fields
    (sampled,) = read_outputs(output, truncates=True, vocab_size=VOCAB_SIZE, capture=capture)
    return sampled.support


def write_pyarrow(rows: list[RawCompletion], directory: Path) -> int:
    """Lists straight into a table, default encodings: what a first attempt looks like."""
    columns = {name: [getattr(row, name) for row in rows] for name in RawCompletion._fields}
    pq.write_table(pa.table(columns), directory / "rows.parquet")
    return (directory / "rows.parquet").stat().st_size


def write_jsonl(rows: list[RawCompletion], directory: Path) -> int:
    """One JSON object a line, zstd level 3: the usual rollout dump."""
    with (directory / "rows.jsonl.zst").open("wb") as file, zstandard.ZstdCompressor(3).stream_writer(file) as out:
        for row in rows:
            out.write(json.dumps(row._asdict()).encode() + b"\n")
    return (directory / "rows.jsonl.zst").stat().st_size


def write_pickle(rows: list[RawCompletion], directory: Path) -> int:
    """The lists as they are."""
    with (directory / "rows.pickle").open("wb") as file:
        pickle.dump([tuple(row) for row in rows], file, protocol=5)
    return (directory / "rows.pickle").stat().st_size


def _manifest() -> Manifest:
    engine = EngineRecord(name="none", version="0", device="cpu", versions={}, processors="")
    return Manifest(
        created_at="",
        config_digest="",
        identity={},
        capture="native",
        support_logprobs=False,
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=VOCAB_SIZE,
        model=ModelRecord(name="none", revision=None, fingerprint="", dtype="float32", context_length=1),
        tokenizer_sha256="",
        attempts=[
            Attempt(started_at="", rollgen_version="", n=1, limit=None, prompts=[], operational={}, engine=engine)
        ],
    )


if __name__ == "__main__":
    main()
