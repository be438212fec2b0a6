"""examples/02_train_step.py, run on rollouts that are sampled here, token by token, from the tiny model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, Sampling

SCRIPT = Path(__file__).parents[2] / "examples" / "02_train_step.py"
SAMPLING = Sampling(temperature=0.75, top_k=8, top_p=0.9)


def sample(model: PreTrainedModel, written: Completion, tokens: int) -> dict[str, Any]:
    """Top-k, then top-p, as the engine does it; the fields of a Completion that depend on the model."""
    generator = torch.Generator().manual_seed(written.seed)
    context = written.prompt_token_ids.tolist()
    logprobs, supports = [], []
    for _ in range(tokens):
        logits = model(torch.tensor([context])).logits[0, -1] / SAMPLING.temperature
        values, ids = logits.sort(descending=True)
        values, ids = values[: SAMPLING.top_k], ids[: SAMPLING.top_k]
        before = values.softmax(0).cumsum(0) - values.softmax(0)  # mass of the ids ahead of each
        support = ids[before < SAMPLING.top_p].sort().values
        normalised = logits[support].log_softmax(0)
        picked = int(normalised.exp().multinomial(1, generator=generator))
        context.append(int(support[picked]))
        logprobs.append(float(normalised[picked]))
        supports.append(support.numpy())
    return {
        "token_ids": np.array(context[-tokens:], np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "mask_ids": np.concatenate(supports).astype(np.int32),
        "mask_offsets": np.cumsum([0, *map(len, supports)]),
        "sampling": SAMPLING,
    }


@pytest.fixture
def rollouts(
    tmp_path: Path, tiny_model: Path, make_completion: Callable[..., Completion], make_manifest: Callable[..., Manifest]
) -> Path:
    """3 prompts of different lengths, 2 samples each, of 5 or 9 tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()
    manifest = make_manifest()
    assert create_manifest(tmp_path, manifest)
    with (
        torch.no_grad(),
        WriterSlot(tmp_path, "w0") as slot,
        ShardWriter(slot, manifest, commit_interval=math.inf) as writer,
    ):
        for prompt_index in range(3):
            for sample_index in range(2):
                written = make_completion(prompt_index, sample_index)
                writer.add(replace(written, **sample(model, written, 5 + 4 * sample_index)))
    return tmp_path


def test_masks_make_the_importance_ratio_one(rollouts: Path, tiny_model: Path) -> None:
    """With masks every ratio is 1, without them they are all below it; a step moves the policy.

    Without masks the mean ratio is the probability mass that was kept; top_k 8 of 512 ids cuts deep.
    """
    command = [sys.executable, SCRIPT, rollouts, "--model", tiny_model, "--learning-rate", "1e-4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    masked, unmasked = result["before"]["with masks"], result["before"]["without masks"]
    assert masked["tokens"] == unmasked["tokens"] == 3 * (5 + 9)
    assert masked["mean_ratio"] == pytest.approx(1, abs=1e-4)
    assert masked["max_logprob_difference"] < 1e-4
    assert masked["share_outside_10_percent"] == 0
    assert 0.1 < unmasked["mean_ratio"] < 0.9
    assert unmasked["share_outside_10_percent"] > 0.5
    assert result["loss"] == pytest.approx(0, abs=1)
    assert result["after"]["max_logprob_difference"] > 1e-3
