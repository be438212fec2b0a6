"""A mixture of experts in real vLLM: the stored numbers of experts are those that the model's routers choose.

On Model Runner V2 under Triton's interpreter, which is what returns them; see `test_native.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.tiny_moe import EXPERTS, LAYERS, TOP_K, make_tiny_moe_model
from transformers import AutoModelForCausalLM

from rollgen.format.manifest import RoutedExperts, read_manifest
from rollgen.loader import RolloutDataset, RolloutStream
from rollgen.verify.dataset import verify_dataset

pytestmark = pytest.mark.vllm

INTERPRETED_TRITON = Path(__file__).parent / "interpreted_triton"
RETURN_EXPERTS = ("--engine-arg", "enable_return_routed_experts=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four experts; each token goes to two."""
    return make_tiny_moe_model(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="module")
def dataset(rollgen: Any, model: Path, write_prompts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples of 6 tokens of a short prompt and of one that fills more than a block of the prefix cache."""
    directory = tmp_path_factory.mktemp("experts")
    long = {"id": "long", "prompt_token_ids": [0, *(3 + place % 300 for place in range(199))]}
    prompts = write_prompts(directory / "prompts.jsonl", [{"id": "short", "prompt": "What is"}, long])
    sampling = ("--n", 2, "--max-tokens", 6, "--top-k", 8, "--dtype", "float32", "--max-num-seqs", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rollgen.environment, "PYTHONPATH", str(INTERPRETED_TRITON))
        rollgen("generate", prompts, "--model", model, "--out", directory / "out", *sampling, *RETURN_EXPERTS)
    return directory / "out"


def test_what_the_manifest_says(dataset: Path) -> None:
    """The shape, which vLLM takes from the model; weights that never change are not worth a column."""
    manifest = read_manifest(dataset)
    assert manifest.routed_experts == RoutedExperts(layers=LAYERS, top_k=TOP_K, experts=EXPERTS)
    assert manifest.weight_versions is False
    assert manifest.identity["engine_arg"] == {"enable_return_routed_experts": True}
    assert verify_dataset(dataset).is_clean


def test_they_are_the_choice_of_the_routers(dataset: Path, model: Path) -> None:
    """Of every token of prompt and response but the last one, in each layer, the two with the largest logits."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    compared = 0
    for rollout in RolloutDataset(dataset, routed_experts=True):
        tokens = torch.cat([rollout.prompt_ids, rollout.token_ids])[None]
        with torch.no_grad():
            logits = reference(tokens, output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(TOP_K).indices for layer in logits], dim=1)[:-1]
        assert rollout.routed_experts is not None
        np.testing.assert_array_equal(rollout.routed_experts.sort().values, chosen.sort().values)
        compared += chosen.numel()
    # Two samples each of 200 + 6 - 1 tokens, and of a prompt of a few: two layers, two experts.
    assert compared > 2 * 205 * LAYERS * TOP_K


def test_a_batch_for_a_trainer(dataset: Path) -> None:
    """Numbers that differ inside a layer, everywhere but at the last token of a rollout and on padding."""
    (batch,) = RolloutStream(dataset, routed_experts=True, shuffle=False)
    assert batch.routed_experts is not None
    known = batch.attention_mask.clone()
    known[torch.arange(len(batch)), batch.attention_mask.sum(1) - 1] = False
    first, second = batch.routed_experts.unbind(-1)
    assert (first != second)[known].all()
    assert not batch.routed_experts[~known].any()


def test_a_run_without_them_is_another_run(rollgen: Any, dataset: Path, model: Path) -> None:
    """Refused before the model loads."""
    sampling = ("--n", 2, "--max-tokens", 6, "--top-k", 8, "--dtype", "float32")
    arguments = ("generate", dataset.parent / "prompts.jsonl", "--model", model, "--out", dataset, "--resume")
    refused = rollgen(*arguments, *sampling, code=4)
    assert "engine_arg" in refused.stderr
