"""A small dataset, and trainers on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.trl_training import Recorder, Train, first_token
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    """In float32."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture
def stored(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """6 prompts of 1 to 5 tokens, 2 samples each, of 8 tokens, in 2 shards; not what any model would say."""
    return make_dataset(tmp_path / "stored", shards=2, prompts=3, n=2)


@pytest.fixture
def make_trainer(tmp_path: Path, tiny_model: Path, model: PreTrainedModel) -> Train:
    """`make_trainer(rollouts, **changes)`: of GRPOConfig, or of the trainer's own arguments."""
    own = {"rewards", "incomplete_groups", "from_hidden", "eval_dataset", "train_dataset", "tools", "rollout_func"}
    own |= {"allow_unreplayable", "reward_processing_classes"}

    def make(rollouts: Path, reward_funcs: Any = first_token, model: Any = model, **changes: Any) -> Recorder:
        config = {
            "output_dir": str(tmp_path / "output"),
            "num_generations": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.0,
            "lr_scheduler_type": "constant",
            "max_completion_length": None,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "num_train_epochs": 1,
        }
        options = {name: changes.pop(name) for name in own & changes.keys()}
        return Recorder(
            model,
            reward_funcs,
            args=GRPOConfig(**config | changes),
            rollouts=rollouts,
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
            **options,
        )

    return make
