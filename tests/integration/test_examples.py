"""The examples as a reader would run them: the embedded model, real vLLM, and a training step on what it sampled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

REPOSITORY = Path(__file__).parents[2]


def test_replay_is_exact_with_masks_and_biased_without(rollgen: Any, smollm2: Path, tmp_path: Path) -> None:
    """vLLM against a Hugging Face forward pass, both float32: mean ratio 1 with masks, about 0.92 without."""
    out = tmp_path / "out"
    flags = ["--dtype", "float32", "--temperature", 0.8, "--top-k", 50, "--top-p", 0.9]
    size = ["--limit", 16, "--max-tokens", 64, "--max-model-len", 1024]
    rollgen("generate", REPOSITORY / "examples/prompts.jsonl", "--model", smollm2, "--out", out, *flags, *size)
    command = [
        sys.executable,
        REPOSITORY / "examples/02_train_step.py",
        out,
        "--model",
        smollm2,
        "--samples",
        "16",
        "--json",
    ]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    masked, unmasked = result["before"]["with masks"], result["before"]["without masks"]
    assert masked["tokens"] > 400
    assert abs(masked["mean_ratio"] - 1) < 1e-4
    assert masked["max_logprob_difference"] < 5e-4
    assert 0.85 < unmasked["mean_ratio"] < 0.97
