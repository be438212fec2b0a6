"""bfloat16 logits tie at the top_k boundary in most tokens; every stored support must be complete all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.vllm

TOP_K = 50


def test_supports_are_complete_although_ties_exceed_top_k(
    rollgen: Any, tiny_model: Path, tmp_path: Path, write_prompts: Any
) -> None:
    """With top_p 1 a complete support has top_k ids or more, and many have more; samples asked again are counted."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": f"Number {i} is"} for i in range(32)])
    out = tmp_path / "out"
    flags = ["--dtype", "bfloat16", "--top-k", TOP_K, "--top-p", 1, "--max-tokens", 64, "--json"]
    summary = json.loads(rollgen("generate", prompts, "--model", tiny_model, "--out", out, *flags).stdout)
    assert summary["stored"] == 32
    assert summary["resampled"] >= 0
    sizes = [
        len(mask)
        for file in out.glob("data/*.parquet")
        for row in pq.read_table(file, columns=["sampling_mask"]).to_pylist()
        for mask in row["sampling_mask"]
    ]
    assert min(sizes) >= TOP_K
    assert sum(size > TOP_K for size in sizes) > len(sizes) / 10
