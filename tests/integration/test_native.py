"""vLLM's own sampling masks (`return_sampling_mask=True`), on Model Runner V2 under Triton's interpreter.

With `--support-logprobs` each request returns the native mask and the processed logprobs of the same step, and rollgen
refuses a sample in which the ids of one are not the finite ids of the other: what is stored agreed on every token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.vllm

INTERPRETED_TRITON = Path(__file__).parent / "interpreted_triton"


def test_native_masks_are_the_finite_processed_logprobs(
    rollgen: Any, tiny_model: Path, tmp_path: Path, write_prompts: Any
) -> None:
    """8 samples of 8 tokens: capture `auto` becomes native, and every mask equals the support read from logprobs."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": f"Number {i} is"} for i in range(4)])
    out = tmp_path / "out"
    flags = ["--dtype", "float32", "--n", 2, "--max-tokens", 8, "--top-p", 0.9, "--support-logprobs", "--json"]
    rollgen.environment["PYTHONPATH"] = str(INTERPRETED_TRITON)
    summary = json.loads(rollgen("generate", prompts, "--model", tiny_model, "--out", out, *flags).stdout)
    assert (summary["stored"], summary["failed"]) == (8, 0)
    assert json.loads((out / "rollgen.json").read_text())["capture"] == "native"
    tokens = 0
    for file in out.glob("data/*.parquet"):
        for row in pq.read_table(file).to_pylist():
            for token, logprob, mask, support in zip(
                row["token_ids"], row["logprobs"], row["sampling_mask"], row["support_logprobs"], strict=True
            ):
                tokens += 1
                assert mask == sorted(set(mask))
                assert support[mask.index(token)] == logprob
                assert math.isclose(sum(map(math.exp, support)), 1, abs_tol=1e-5)
    print(f"{tokens} tokens compared")
    assert tokens == 64
