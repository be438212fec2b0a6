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


@pytest.fixture(scope="module")
def sampled(rollgen: Any, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 8 prompts whose answer is a number, 2 samples each, in float32."""
    out = tmp_path_factory.mktemp("sampled") / "out"
    flags = ["--dtype", "float32", "--temperature", 0.8, "--top-k", 50, "--top-p", 0.9]
    size = ["--limit", 8, "--n", 2, "--max-tokens", 64, "--max-model-len", 1024]
    rollgen("generate", REPOSITORY / "examples/prompts.jsonl", "--model", smollm2, "--out", out, *flags, *size)
    return out


def run_example(name: str, dataset: Path, *arguments: object) -> Any:
    """What the script prints with `--json`."""
    command = [sys.executable, REPOSITORY / "examples" / name, dataset, *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_replay_is_exact_with_masks_and_biased_without(sampled: Path, smollm2: Path) -> None:
    """vLLM against a Hugging Face forward pass, both float32: mean ratio 1 with masks, about 0.92 without."""
    result = run_example("02_train_step.py", sampled, "--model", smollm2, "--samples", 16)
    masked, unmasked = result["before"]["with masks"], result["before"]["without masks"]
    assert masked["tokens"] > 400
    assert abs(masked["mean_ratio"] - 1) < 1e-4
    assert masked["max_logprob_difference"] < 5e-4
    assert 0.85 < unmasked["mean_ratio"] < 0.97


def test_verify_recomputes_what_was_sampled(rollgen: Any, sampled: Path, smollm2: Path) -> None:
    """The same proof by the command, over all samples; its bounds hold with room to spare."""
    outcome = json.loads(rollgen("verify", sampled, "--recompute", smollm2, "--json").stdout)
    assert outcome["clean"]
    figures = outcome["recompute"]
    assert (figures["samples"], figures["same_checkpoint"], figures["problem"]) == (16, True, None)
    assert abs(figures["mean_ratio"] - 1) < 1e-5
    assert figures["max_abs_delta_logprob"] < 5e-4
    assert 0.85 < figures["mean_ratio_without_masks"] < 0.97


def test_offline_grpo_starts_from_exact_ratios(sampled: Path, smollm2: Path) -> None:
    """The first of two steps sees ratios of 1 with masks, the second one a policy that has moved."""
    first, second = run_example("04_grpo_offline.py", sampled, "--model", smollm2, "--steps", 2)["steps"]
    assert abs(first["with masks"]["mean_ratio"] - 1) < 1e-4
    assert first["with masks"]["largest"] < 5e-4
    assert first["clipped"] == 0
    assert 0.85 < first["without masks"]["mean_ratio"] < 0.97
    assert second["with masks"]["largest"] > 1e-3
    assert second["loss"] < first["loss"]
