"""bfloat16 logits tie at the top_k boundary in most tokens; every stored support must be complete all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollgen.verify.recompute import recompute

pytestmark = pytest.mark.vllm

TOP_K = 50


@pytest.fixture(scope="module")
def dataset(rollgen: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, write_prompts: Any) -> Path:
    """32 samples of at most 64 tokens, top_p 1; samples that were asked again are counted."""
    directory = tmp_path_factory.mktemp("ties")
    prompts = write_prompts(directory / "prompts.jsonl", [{"prompt": f"Number {i} is"} for i in range(32)])
    out = directory / "out"
    flags = ["--dtype", "bfloat16", "--top-k", TOP_K, "--top-p", 1, "--max-tokens", 64, "--json"]
    summary = json.loads(rollgen("generate", prompts, "--model", tiny_model, "--out", out, *flags).stdout)
    assert summary["stored"] == 32
    assert summary["resampled"] >= 0
    return out


def test_supports_are_complete_although_ties_exceed_top_k(dataset: Path) -> None:
    """With top_p 1 a complete support has top_k ids or more, and many have more."""
    sizes = [
        len(mask)
        for file in dataset.glob("data/*.parquet")
        for row in pq.read_table(file, columns=["sampling_mask"]).to_pylist()
        for mask in row["sampling_mask"]
    ]
    assert min(sizes) >= TOP_K
    assert sum(size > TOP_K for size in sizes) > len(sizes) / 10


def test_recomputed_ratios_are_within_the_noise_of_bfloat16(dataset: Path, tiny_model: Path) -> None:
    """vLLM and transformers, both bfloat16, are about as far apart as transformers is from itself in float32."""
    found = recompute(dataset, str(tiny_model))
    assert found.noise_floor is not None
    assert 0 < found.with_masks.mean_abs < 2 * found.noise_floor.mean_abs
    assert found.problem() is None
    assert abs(found.with_masks.mean_ratio - 1) < 0.01
    assert found.without_masks.mean_ratio < 0.9
