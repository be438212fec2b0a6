"""vLLM's own sampling masks (`return_sampling_mask=True`), on Model Runner V2 under Triton's interpreter.

The comparisons are those of `tests/native/proof.py`, which `make native-gpu` runs on a CUDA device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native import proof
from transformers import AutoModelForCausalLM

from rollgen.format.ragged import nested_ragged, ragged

pytestmark = pytest.mark.vllm

INTERPRETED_TRITON = Path(__file__).parent / "interpreted_triton"


@pytest.fixture
def generate(rollgen: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`proof.Generate` with the tiny model, on Model Runner V2."""
    monkeypatch.setitem(rollgen.environment, "PYTHONPATH", str(INTERPRETED_TRITON))

    def run(*arguments: object) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(rollgen("generate", *arguments, "--model", tiny_model, "--json").stdout)
        assert summary["failed"] == 0
        return summary

    return run


def test_native_masks_are_the_supports(generate: Any, tmp_path: Path) -> None:
    """bfloat16, where logits tie; 12 prompts of 6 ways to sample, 5 tokens each: every token agrees in both proofs."""
    prompts = proof.write_prompts(tmp_path / "prompts.jsonl", 12)
    found = proof.prove(generate, prompts, tmp_path, "--dtype", "bfloat16", "--max-tokens", 5)
    print(found)
    assert json.loads((tmp_path / "both" / "rollgen.json").read_text())["capture"] == "native"
    assert json.loads((tmp_path / "logprobs" / "rollgen.json").read_text())["capture"] == "logprobs"
    assert found.exact
    assert found.one_run == found.tokens == 60
    assert found.beyond_top_k > 0


def test_control_run_has_no_masks(generate: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Nothing truncates: null masks, and logprobs equal to a full log_softmax of the same model's logits."""
    prompts = proof.write_prompts(tmp_path / "prompts.jsonl", 6, varied=False)
    assert proof.speed(generate, "control", prompts, tmp_path, "--dtype", "float32", "--max-tokens", 8) > 0
    out = tmp_path / "speed-control"
    assert json.loads((out / "rollgen.json").read_text())["capture"] == "none"
    table = proof.read_rows(out)
    masks = nested_ragged(table["sampling_mask"])
    assert not masks.offsets.any()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    errors = np.concatenate([_errors(model, row) for row in table.to_pylist()])
    print(f"{len(errors)} tokens of the control run, largest error {errors.max():.1e}")
    assert len(errors) == len(ragged(table["token_ids"]).values) == 48
    assert errors.max() < 1e-4


def _errors(model: Any, row: dict[str, Any]) -> np.ndarray:
    """float32 [T], of the stored logprobs against one forward pass."""
    prompt, token_ids = row["prompt_token_ids"], torch.tensor(row["token_ids"])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + row["token_ids"]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    return np.abs(np.array(row["logprobs"], np.float32) - expected.numpy())
