"""Rollouts to measure with, as an engine returns them: nested Python lists.

real        tests/data/real_masks.parquet: 39k really sampled tokens, cut into completions of 150 and repeated
synthetic   made here, sized like a published RL run (mean about 8 ids, median 2, 46 % singletons, tail to 500) over
            a vocabulary of 151,936; ids are Zipf distributed, which is harder to compress than real text
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

REAL = Path(__file__).parent.parent / "data" / "real_masks.parquet"
COMPLETION_TOKENS = 150


class RawCompletion(NamedTuple):
    """One completion in the engine's own types."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    masks: list[list[int]]


def real_completions() -> list[RawCompletion]:
    """The real file, in pieces of COMPLETION_TOKENS tokens."""
    return read_completions(REAL)


def read_completions(path: Path) -> list[RawCompletion]:
    """Any Parquet file with token_ids, logprobs and sampling_mask columns."""
    pieces = []
    for row in pq.read_table(path).to_pylist():
        for start in range(0, len(row["token_ids"]) - COMPLETION_TOKENS + 1, COMPLETION_TOKENS):
            part = slice(start, start + COMPLETION_TOKENS)
            prompt = row.get("prompt_token_ids") or [1, 2, 3]
            pieces.append(
                RawCompletion(prompt, row["token_ids"][part], row["logprobs"][part], row["sampling_mask"][part])
            )
    return pieces


def synthetic_completions(completions: int = 400, vocab_size: int = 151_936, seed: int = 0) -> list[RawCompletion]:
    """Made-up completions with realistic support sizes."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, vocab_size + 1)
    weights = 1.0 / (ranks + 2.7)
    cumulative = np.cumsum(weights / weights.sum())
    id_of_rank = rng.permutation(vocab_size)
    made = []
    for _ in range(completions):
        sizes = np.where(
            rng.random(COMPLETION_TOKENS) < 0.46, 1, np.minimum(500, 2 + rng.pareto(1.05, COMPLETION_TOKENS) * 2.2)
        ).astype(int)
        masks = [_distinct_ids(rng, cumulative, id_of_rank, size) for size in sizes]
        token_ids = [mask[int(rng.integers(len(mask)))] for mask in masks]
        logprobs = [0.0 if len(mask) == 1 else -float(rng.exponential()) for mask in masks]
        made.append(RawCompletion([1, 2, 3], token_ids, logprobs, masks))
    return made


def _distinct_ids(rng: np.random.Generator, cumulative: np.ndarray, id_of_rank: np.ndarray, size: int) -> list[int]:
    ids: set[int] = set()
    while len(ids) < size:
        draws = np.searchsorted(cumulative, rng.random(size - len(ids)))
        ids.update(id_of_rank[np.minimum(draws, len(id_of_rank) - 1)].tolist())
    return sorted(ids)
