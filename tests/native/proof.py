"""The proof that native sampling masks are what was sampled from: the same prompts several ways, compared in Arrow.

    both        masks, and beside them the processed logprobs of the same step (`--capture native --support-logprobs`);
                rollgen refuses a sample in which the ids of a mask are not those with a finite logprob
    native      masks alone (`--capture native`)
    logprobs    no masks: supports read from the finite logprobs (`--capture logprobs`)
    control     nothing truncates, no supports at all (top_k 0, top_p 1)

`native` and `logprobs` must give the same dataset: token ids, logprobs and masks of every token. They run one request
at a time, without prefix cache, because the numbers of a forward pass depend on what else is in its batch.

Runs on a CUDA device (`python -m tests.native`, which is `make native-gpu`) and, with a tiny model under Triton's
interpreter, in `tests/integration/test_native.py`. How the command is run is up to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.format.journal import list_shards
from rollgen.format.ragged import NestedRagged, nested_ragged, ragged

Generate = Callable[..., dict[str, Any]]
"""Runs `rollgen generate` with these arguments to the end and returns its `--json` summary."""

VARIANTS: Final[Sequence[dict[str, Any]]] = (
    {},
    {"top_k": 5, "top_p": 1},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 50, "top_p": 1, "temperature": 0.7},
    {"top_k": 200, "top_p": 0.95, "temperature": 1.3},
    {"top_k": 1},
)
"""Of one prompt after the other: every row samples in its own way, and some with ties at the boundary."""
ALONE: Final = ("--max-num-seqs", 1, "--engine-arg", "enable_prefix_caching=false")
BOTH: Final = ("--capture", "native", "--support-logprobs")
NATIVE: Final = ("--capture", "native")
LOGPROBS: Final = ("--capture", "logprobs")
CONTROL: Final = ("--top-k", 0, "--top-p", 1)
SPEEDS: Final = {"native": NATIVE, "logprobs": LOGPROBS, "control": CONTROL}
SUM_TOLERANCE: Final = 1e-5
COMPARED: Final = ("prompt_id", "sample_index", "token_ids", "logprobs", "sampling_mask")


@dataclass(frozen=True, slots=True)
class Proof:
    """What agreed, in tokens. Everything did if `exact`."""

    one_run: int
    """Tokens of `both`: each mask is the ids with a finite logprob, and their probabilities sum to 1."""
    tokens: int
    """Tokens of `native`, compared with `logprobs`; of these agree:"""
    same_ids: int
    same_logprobs: int
    same_masks: int
    largest_support: int
    beyond_top_k: int
    """Tokens whose support is larger than top_k: ties at the boundary, all kept."""

    @property
    def exact(self) -> bool:
        return self.tokens == self.same_ids == self.same_logprobs == self.same_masks

    def __str__(self) -> str:
        return (
            f"{self.one_run} tokens of one run: every mask is the ids with a finite logprob\n"
            f"{self.tokens} tokens of two runs, native masks and logprobs: equal ids {self.same_ids}, "
            f"logprobs {self.same_logprobs}, masks {self.same_masks}\n"
            f"largest support {self.largest_support}, {self.beyond_top_k} supports larger than their top_k"
        )


def write_prompts(path: Path, count: int, *, varied: bool = True) -> Path:
    """`count` short prompts; `varied` ones each with the next of VARIANTS."""
    rows = [{"prompt": f"Number {i} is"} | (VARIANTS[i % len(VARIANTS)] if varied else {}) for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prove(generate: Generate, prompts: Path, out: Path, *flags: object) -> Proof:
    """Sample the prompts three ways, into datasets below `out`, and compare them. Raises AssertionError in one run."""
    for name, capture in (("both", BOTH), ("native", (*NATIVE, *ALONE)), ("logprobs", (*LOGPROBS, *ALONE))):
        generate(prompts, "--out", out / name, *capture, *flags)
    return compare(check_both(read_rows(out / "both")), read_rows(out / "native"), read_rows(out / "logprobs"))


def speed(generate: Generate, name: str, prompts: Path, out: Path, *flags: object) -> float:
    """Tokens per second of one way to sample, `name` of SPEEDS, with full batches."""
    summary = generate(prompts, "--out", out / f"speed-{name}", *SPEEDS[name], *flags)
    return float(summary["tokens_per_second"])


def read_rows(dataset: Path) -> pa.Table:
    """All rows of a dataset, in the order of their keys."""
    table = pa.concat_tables([pq.read_table(path) for path in list_shards(dataset)])
    return table.sort_by([("prompt_index", "ascending"), ("sample_index", "ascending")])


def compare(one_run: int, native: pa.Table, logprobs: pa.Table) -> Proof:
    """Token by token. Rows that sampled different ids agree on nothing after the first of these."""
    assert native["prompt_id"].equals(logprobs["prompt_id"])
    assert native["sample_index"].equals(logprobs["sample_index"])
    same = [0, 0, 0]
    for row in range(native.num_rows):
        ours, theirs = ({name: table[name][row].as_py() for name in COMPARED[2:]} for table in (native, logprobs))
        alike = [a == b for a, b in zip(ours["token_ids"], theirs["token_ids"], strict=False)]
        until = alike.index(False) if False in alike else len(alike)
        same[0] += until
        for place, name in ((1, "logprobs"), (2, "sampling_mask")):
            same[place] += sum(a == b for a, b in zip(ours[name][:until], theirs[name][:until], strict=True))
    masks = nested_ragged(native["sampling_mask"])
    sizes = np.diff(masks.offsets)
    top_k = np.repeat(native["top_k"].to_numpy(), np.diff(masks.row_offsets))
    return Proof(one_run, len(sizes), *same, int(sizes.max()), int((sizes > top_k).sum()))


def check_both(table: pa.Table) -> int:
    """Check a dataset of BOTH and return its tokens: sampled ids inside, their logprobs equal, sums 1."""
    masks, support = nested_ragged(table["sampling_mask"]), nested_ragged(table["support_logprobs"])
    assert np.array_equal(masks.offsets, support.offsets)
    token_ids, logprobs = ragged(table["token_ids"]).values, ragged(table["logprobs"]).values
    sampled = masks.values == np.repeat(token_ids, np.diff(masks.offsets))
    assert np.array_equal(support.values[sampled], logprobs)
    assert np.abs(_mass(support) - 1).max() < SUM_TOLERANCE
    return len(token_ids)


def _mass(support: NestedRagged) -> np.ndarray:
    """float64 [T], the sum of each support's probabilities."""
    return np.add.reduceat(np.exp(support.values, dtype=np.float64), support.offsets[:-1])
