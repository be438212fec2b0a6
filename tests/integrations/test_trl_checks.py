"""What is refused before TRL trains, and by which words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from models.trl_training import Train
from packaging.specifiers import SpecifierSet
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollgen.errors import UsageError
from rollgen.integrations import trl_checks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"use_vllm": True}, r"GRPOConfig\(use_vllm=True\): nothing is sampled here", id="vllm"),
        pytest.param({"use_liger_kernel": True}, "supports do not reach its fused loss", id="liger"),
        pytest.param({"remove_unused_columns": True}, "it would remove the numbers", id="columns"),
        pytest.param({"tools": [len]}, "tools: prompts and completions are those of `rollouts`", id="tools"),
        pytest.param({"rollout_func": len}, "rollout_func: prompts and completions are", id="rollout-func"),
        pytest.param({"train_dataset": object()}, "train_dataset: prompts and completions are", id="train-dataset"),
        pytest.param({"max_completion_length": 7}, r"a completion has 8 tokens, more than .*length=7\)", id="length"),
        pytest.param({"num_generations": 4}, "6 prompts have a number of samples that num_generations=4", id="group"),
        pytest.param(
            {"per_device_train_batch_size": 14}, "6 groups .* do not fill a generation batch of 7", id="batch"
        ),
        pytest.param({"reward_funcs": []}, "no reward: give reward_funcs", id="no-reward"),
        pytest.param(
            {"reward_funcs": [], "rewards": "right", "eval_dataset": object()},
            "eval_dataset: TRL samples its completions, which have no stored reward",
            id="evaluation-of-stored-rewards",
        ),
    ],
)
def test_what_would_train_otherwise_is_refused(
    stored: Path, make_trainer: Train, changes: dict[str, Any], message: str
) -> None:
    """By one line, before TRL is asked for anything."""
    with pytest.raises(UsageError, match=message):
        make_trainer(stored, **changes)


def test_a_narrower_model_is_refused(stored: Path, make_trainer: Train, model: PreTrainedModel) -> None:
    """Supports are over 512 ids."""
    model.resize_token_embeddings(500, mean_resizing=False)
    with pytest.raises(UsageError, match="logits are 500 wide, the rollouts were sampled from 512 ids"):
        make_trainer(stored, model=model)


def test_hidden_states_of_a_model_that_caps_its_logits_are_refused(stored: Path, make_trainer: Train) -> None:
    """Its logits are not what its head makes."""
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("gemma2", final_logit_softcapping=0.1, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UsageError, match="from_hidden: gemma2 scales, shifts or caps its logits"):
        make_trainer(stored, model=model, from_hidden=True)
    make_trainer(stored, model=model)


def test_a_version_of_trl_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which are."""
    monkeypatch.setattr(trl_checks, "SUPPORTED", SpecifierSet(">=99,<100"))
    with pytest.raises(UsageError, match=r"^trl \S+: .* pip install 'trl(>=99,<100|<100,>=99)'$"):
        trl_checks.check_version()


def test_without_trl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no package is to be found."""
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match=r"^trl is not installed: pip install -e '\.\[trl\]' in the clone"):
        trl_checks.check_version()
