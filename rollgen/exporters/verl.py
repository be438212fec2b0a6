"""verl: a step's trajectories for its rollout cache (`skip.rollout_tq`), after a conversion where tensordict is.

Follows verl 0.9.1: `verl/utils/skip/rollout_skip.py` (`RolloutTqSkip`) and `verl/experimental/agent_loop` (the fields
that a rollout has for the V1 trainer).

    <step>.pt    {"tensors": {field: [a tensor a sample]}, "values": {field: [...]}, "keys", "tags", "global_steps"}

step from 1, as the trainer counts. verl's own file is a pickled TensorDict, which only that library can make; these are
its content, plain tensors that `torch.load(weights_only=True)` reads, and docs/export.md has the lines that pack them.

verl replays no sampling masks: it would compare log-probabilities over the full vocabulary with those over supports,
a ratio that is off by the mass that was cut. So what was truncated is refused, unless `carry_masks` says that the
trainer has been taught to read the fields `sampling_mask_ids` and `sampling_mask_offsets` of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from pydantic import Field

from rollgen.errors import UsageError
from rollgen.exporters.grouped import GroupedExporter
from rollgen.exporters.records import Block, Records
from rollgen.exporters.remainder import KEY, remainder_places, remainders
from rollgen.exporters.tensors import part, save, supports_of
from rollgen.loader.samples import Experts, Samples

if TYPE_CHECKING:
    import numpy.typing as npt

_PLACES: Final = {
    **remainder_places("extra_fields"),
    "prompt_token_ids": "prompts, input_ids",
    "token_ids": "responses, input_ids, response_mask",
    "logprobs": "rollout_log_probs",
    "prompt": "raw_prompt",
    "reward": "rm_scores",
    "temperature": "actor_rollout_ref.rollout.temperature",
}
_MASKS: Final = "sampling_mask_ids, sampling_mask_offsets"


class Verl(GroupedExporter):
    """Steps of equally many prompts with equally many samples."""

    follows: ClassVar[str] = "0.9.1"
    name: ClassVar[str] = "verl"

    carry_masks: bool = Field(False, description="Take what was truncated: the trainer reads the fields of the masks.")

    @property
    def places(self) -> Mapping[str, str]:
        masks = {"sampling_mask": _MASKS} if self.carry_masks else {}
        return _PLACES | masks | ({"routed_experts": "routed_experts"} if self.routed_experts else {})

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        steps = self.steps(records)
        if steps.drawn.truncated and not self.carry_masks:
            raise UsageError(
                "verl replays no sampling masks: samples that were truncated would be trained with ratios that are "
                "off by the mass that was cut; take --to prime-rl, skyrl, slime or miles, or --option "
                "carry_masks=true for a trainer that reads sampling_mask_ids"
            )
        for step, block in enumerate(records.blocks(steps.prompts), 1):
            save(self._step(block, step), directory / f"{step}.pt")
        return [
            "verl: first make its own tq_batch.pt of each file (docs/export.md)",
            f"verl: data.train_batch_size={steps.prompts} actor_rollout_ref.rollout.n={steps.samples} "
            f"actor_rollout_ref.rollout.temperature={steps.drawn.temperature} trainer.use_v1=True "
            f"algorithm.rollout_correction.bypass_mode=True skip.rollout_tq.enable=True skip.rollout_tq.action=cache "
            f"skip.rollout_tq.steps=[{','.join(map(str, range(1, steps.number + 1)))}]",
        ]

    def _step(self, block: Block, step: int) -> dict[str, Any]:
        """What becomes a `tq_batch.pt`."""
        tensors = [_tensors(block, number) | self._masks(block.samples, number) for number in range(len(block))]
        values = _values(block, step)
        versions = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
        sizes = [(len(row["prompts"]), len(row["responses"])) for row in tensors]
        return {
            "tensors": {name: [row[name] for row in tensors] for name in tensors[0]},
            "values": {name: [row[name] for row in values] for name in values[0]},
            "keys": [f"{row['uid']}_{row['session_id']}_0" for row in values],
            "tags": [
                {"status": "success", "prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
                | versions
                for prompt, response in sizes
            ],
            "global_steps": step,
        }

    def _masks(self, samples: Samples, number: int) -> dict[str, torch.Tensor]:
        if not self.carry_masks:
            return {}
        ids, offsets = supports_of(samples, number)
        return {"sampling_mask_ids": ids, "sampling_mask_offsets": offsets}


def _tensors(block: Block, number: int) -> dict[str, torch.Tensor]:
    """What a sample has for each of its P + T tokens, or of its T generated ones."""
    samples = block.samples
    prompt = _int64(samples.prompt_ids.values[part(samples.prompt_ids.offsets, number)])
    tokens = part(samples.token_ids.offsets, number)
    response = _int64(samples.token_ids.values[tokens])
    trained, score = torch.ones_like(response), torch.zeros(len(response))
    assert block.reward is not None  # `needs_reward`
    score[-1] = block.reward[number]
    experts = {} if samples.experts is None else {"routed_experts": _experts(samples.experts, number)}
    return {
        "prompts": prompt,
        "responses": response,
        "response_mask": trained,
        "loss_mask": trained.clone(),
        "rollout_log_probs": torch.from_numpy(samples.logprobs[tokens]),
        "rm_scores": score,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(len(prompt) + len(response)),
        **experts,
    }


def _values(block: Block, step: int) -> list[dict[str, Any]]:
    """What a sample has beside tensors; a group is told from others by its uid, in which verl allows no underscore."""
    told, prompts = remainders(block), block.samples.scalars["prompt"].tolist()
    groups = block.group.tolist()
    sessions = (np.arange(len(block)) - np.searchsorted(block.group, block.group)).tolist()
    return [
        {
            "uid": str(group),
            "session_id": session,
            "global_steps": step,
            "raw_prompt": prompt or "",
            "multi_modal_inputs": {},
            "num_turns": 2,
            "metrics": {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": 0},
            "extra_fields": {
                "turn_scores": [],
                "tool_rewards": [],
                "min_global_steps": step,
                "max_global_steps": step,
                KEY: row,
            },
        }
        for group, session, prompt, row in zip(groups, sessions, prompts, told, strict=True)
    ]


def _experts(experts: Experts, number: int) -> torch.Tensor:
    """int16 [P + T, layers, top_k]: of the last token, which never went through the model, zeros."""
    numbers = experts.numbers.values[part(experts.numbers.offsets, number)].reshape(-1, experts.layers, experts.top_k)
    return torch.from_numpy(np.concatenate([numbers, np.zeros_like(numbers[:1])]))


def _int64(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
