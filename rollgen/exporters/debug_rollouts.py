"""The debug rollout files of slime and its relatives: a file a step, which the trainer loads in place of sampling.

    <step>.pt    {"rollout_id": step, "samples": [a dictionary a sample]}, step from 0

The samples of a prompt stand together and prompts are equally many: the trainers tell groups apart by their place in
the file. Files are made with `torch.save` of plain values and tensors only, so `torch.load(weights_only=True)` reads
them. What the trainers have no field for is in each sample's `metadata["rollgen"]`, which they leave alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from rollgen.exporters.grouped import GroupedExporter, Steps
from rollgen.exporters.records import Block, Records
from rollgen.exporters.remainder import KEY, remainder_places, remainders
from rollgen.exporters.tensors import part, save, supports_of
from rollgen.loader.samples import VERSIONS, Experts, Samples

if TYPE_CHECKING:
    from rollgen.rollouts import WeightVersions

_PLACES: Final = {
    **remainder_places("metadata"),
    "prompt_token_ids": "tokens",
    "token_ids": "tokens, response_length",
    "logprobs": "rollout_log_probs",
    "text": "response",
    "prompt": "prompt",
    "reward": "reward",
    "temperature": "--rollout-temperature",
}


class Row(NamedTuple):
    """What trainers have in fields of their own of one sample: P prompt tokens, T generated ones."""

    prompt_length: int
    mask_ids: torch.Tensor | None
    """int32 [nnz]; None when nothing was truncated."""
    mask_offsets: torch.Tensor
    """int64 [T + 1]"""
    mask_logprobs: torch.Tensor | None
    """float32 [nnz]; None when they are not stored."""
    versions: WeightVersions | None


class DebugRollouts(GroupedExporter):
    """What the trainers have in common."""

    @property
    def places(self) -> Mapping[str, str]:
        return _PLACES | ({"routed_experts": "rollout_routed_experts"} if self.routed_experts else {})

    @abstractmethod
    def own_fields(self, row: Row) -> Mapping[str, Any]:
        """The fields of a sample's masks and weights."""

    @abstractmethod
    def advice(self, steps: Steps, *, support_logprobs: bool) -> list[str]:
        """The flags that the trainer needs; whether the dataset has `support_logprobs`."""

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        steps = self.steps(records)
        for step, block in enumerate(records.blocks(steps.prompts)):
            steps.drawn.see(block)
            rows = list(self._rows(block, step * steps.prompts * steps.samples))
            save({"rollout_id": step, "metadata": {}, "samples": rows}, directory / f"{step}.pt")
        return self.advice(steps, support_logprobs=records.manifest.support_logprobs)

    def _rows(self, block: Block, first: int) -> Iterator[dict[str, Any]]:
        """The samples of a block as dictionaries; `first` is the number of the first one in the export."""
        samples, told = block.samples, remainders(block)
        columns = {name: samples.scalars[name].tolist() for name in ("prompt", "text", "finish_reason")}
        assert block.reward is not None  # `needs_reward`
        rewards, groups = block.reward.tolist(), block.group.tolist()
        for number in range(len(block)):
            prompt = samples.prompt_ids.values[part(samples.prompt_ids.offsets, number)].tolist()
            tokens = part(samples.token_ids.offsets, number)
            response = samples.token_ids.values[tokens].tolist()
            yield {
                "group_index": groups[number],
                "index": first + number,
                "prompt": columns["prompt"][number] or "",
                "tokens": prompt + response,
                "response": columns["text"][number] or "",
                "response_length": len(response),
                "reward": rewards[number],
                "loss_mask": [1] * len(response),
                "rollout_log_probs": samples.logprobs[tokens].tolist(),
                **self.own_fields(_row(samples, number, len(prompt))),
                "rollout_routed_experts": None if samples.experts is None else _experts(samples.experts, number),
                "remove_sample": False,
                "status": "completed" if columns["finish_reason"][number] == "stop" else "truncated",
                "metadata": {KEY: told[number]},
            }


def _row(samples: Samples, number: int, prompt_length: int) -> Row:
    ids, offsets = supports_of(samples, number)
    stored = samples.support_logprobs
    return Row(
        prompt_length=prompt_length,
        mask_ids=ids if len(ids) else None,
        mask_offsets=offsets,
        mask_logprobs=None if stored is None else torch.from_numpy(stored[part(samples.mask_offsets, number)]),
        versions=samples.scalars[VERSIONS][number] if VERSIONS in samples.scalars else None,
    )


def _experts(experts: Experts, number: int) -> torch.Tensor:
    """int32 [P + T - 1, layers, top_k]"""
    numbers = experts.numbers.values[part(experts.numbers.offsets, number)]
    return torch.from_numpy(numbers.astype(np.int32)).view(-1, experts.layers, experts.top_k)
