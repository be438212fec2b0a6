"""Rollouts that are sampled here, token by token, from the tiny model; and the scripts in `examples/` as modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLING = Sampling(temperature=0.75, top_k=8, top_p=0.9)


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], ModuleType]:
    """`load_example("04_grpo_offline")`: its functions; `main` does not run."""

    def load(name: str) -> ModuleType:
        spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def rollouts(
    tmp_path: Path, tiny_model: Path, make_completion: Callable[..., Completion], make_manifest: Callable[..., Manifest]
) -> Path:
    """3 prompts of different lengths, 2 samples each, of 5 or 9 tokens; texts as `make_completion` has them."""
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
