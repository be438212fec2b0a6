"""TRL's trainer on stored rollouts as tests run it: on a CPU, in float32, and with a memory of what it used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rollgen
from rollgen.integrations.trl import RolloutGRPOTrainer


class Recorder(RolloutGRPOTrainer):
    """Remembers which samples were loaded, and which went into each loss."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.loaded: list[list[int]] = []
        self.used: list[list[tuple[str, int]]] = []
        super().__init__(*args, **options)

    def load_rollouts(self, numbers: Sequence[int]) -> list[rollgen.Rollout]:
        self.loaded.append(list(numbers))
        return super().load_rollouts(numbers)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        self.used.append([(rollout.prompt_id, rollout.sample_index) for rollout in inputs.get("rollouts", [])])
        return super()._compute_loss(model, inputs)


Train = Callable[..., Recorder]
"""`make_trainer` of `tests/integrations/conftest.py`."""


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that tells the samples of a prompt apart."""
    return [ids[0] / 512 for ids in completion_ids]


def logged(trainer: RolloutGRPOTrainer, name: str) -> list[float]:
    """What the trainer logged of each step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
