"""SkyRL: the prompts that its trainer iterates, and the samples that a generator of a few lines answers with.

    prompts.parquet     a row a prompt: `prompt`, one message whose text is the prompt_id, and `group`, its number
    samples-<n>.pt      flat tensors of whole groups; `torch.load(mmap=True, weights_only=True)` reads single samples

Follows the package skyrl 0.4.0: `train/generators/base.py` (`GeneratorOutput`), `train/trainer.py`,
`train/dataset/dataset.py` (`PromptDataset`), `backends/skyrl_train/utils/sample_support.py`. SkyRL loads no finished
rollouts from files: its trainer takes them from a generator, which can be replaced, and docs/export.md has one that
reads these. Its loader shuffles prompts, so samples are found by the number of their group.

A support is dense there: as wide as the widest of the whole dataset, padded with -1. Here supports are ids and sizes,
and become dense when a batch is made. A token without one is refused by its trainer: so samples that were truncated and
others that were not do not go into one export, nor do several temperatures. Rewards become advantages there, by group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rollgen.exporters.grouped import GroupedExporter, Steps
from rollgen.exporters.records import Block, Records
from rollgen.exporters.remainder import KEY, remainder_places, remainders
from rollgen.exporters.tensors import save
from rollgen.loader.samples import Experts

PROMPTS: Final = "prompts.parquet"
_MESSAGE: Final = pa.struct([("role", pa.string()), ("content", pa.string())])
_SCHEMA: Final = pa.schema([("prompt", pa.list_(_MESSAGE)), ("group", pa.int64())])
_ROUTING: Final = (
    "generator.inference_engine.enable_return_routed_experts=true",
    "trainer.policy.megatron_config.moe_enable_routing_replay=true",
)
_PLACES: Final = {
    **remainder_places("samples"),
    "prompt_token_ids": "prompt_token_ids",
    "token_ids": "response_ids, loss_masks",
    "logprobs": "rollout_logprobs",
    "sampling_mask": "rollout_sample_support",
    "finish_reason": f"stop_reasons, samples.{KEY}.finish_reason",
    "reward": "rewards",
    "temperature": "generator.sampling_params.temperature",
}


class SkyRL(GroupedExporter):
    """Equally many samples of each prompt, in files of some 250,000 tokens."""

    follows: ClassVar[str] = "skyrl 0.4.0"
    name: ClassVar[str] = "skyrl"

    @property
    def places(self) -> Mapping[str, str]:
        return _PLACES | ({"routed_experts": "rollout_expert_indices"} if self.routed_experts else {})

    def write(self, records: Records, directory: Path) -> Sequence[str]:
        steps = self.steps(records)
        with pq.ParquetWriter(directory / PROMPTS, _SCHEMA) as writer:
            for number, block in enumerate(records.blocks()):
                steps.drawn.see(block)
                save(_content(block), directory / f"samples-{number:06d}.pt")
                writer.write_table(_prompts(block))
        advice = ["skyrl: give the trainer a generator that reads these files (docs/export.md)"]
        if steps.drawn.truncated:
            advice.append(
                "skyrl: top_k below is the width of its arrays, that of the widest support: it samples nothing"
            )
        return [*advice, " ".join([*_settings(steps), *(_ROUTING if self.routed_experts else ())])]


def _settings(steps: Steps) -> Sequence[str]:
    """What SkyRL's command line needs.

    Its default loss takes for pi_old what the trainer's own model says when a step begins; `rollout_is` takes what is
    stored. It evaluates before training unless it is told not to, and refuses a mini batch above the batch.
    """
    settings = [
        f"skyrl (PATH: this directory): data.train_data=\"['PATH/{PROMPTS}']\"",
        f"trainer.train_batch_size={steps.prompts}",  # its loader would drop the rest of each epoch
        f"trainer.policy_mini_batch_size={steps.prompts}",
        f"generator.n_samples_per_prompt={steps.samples}",
        f"generator.sampling_params.temperature={steps.drawn.temperature}",
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.eval_interval=-1",
    ]
    if steps.drawn.truncated:
        settings += [
            "trainer.algorithm.enable_sample_support_replay=true",
            "generator.inference_engine.enable_return_sample_support_set=true",
            f"generator.sampling_params.top_k={max(steps.drawn.widest, 2)}",  # it takes 1 for no sampling at all
        ]
    return settings


def _prompts(block: Block) -> pa.Table:
    """A row for each group.

    Only ids are trained on. A chat of the prompt's text might exceed `max_prompt_length`, and SkyRL leaves out such
    prompts; one of its id does not.
    """
    first = np.flatnonzero(np.diff(block.group, prepend=-1))
    names = block.samples.scalars["prompt_id"][first].tolist()
    messages = [[{"role": "user", "content": name}] for name in names]
    return pa.table({"prompt": messages, "group": block.group[first]}, schema=_SCHEMA)


def _content(block: Block) -> dict[str, Any]:
    """B samples of P prompt tokens and T generated ones in all; where each begins is in offsets, int64 [B + 1]."""
    samples = block.samples
    assert block.reward is not None  # `needs_reward`
    stopped = samples.scalars["finish_reason"] == "stop"
    return {
        "group": torch.from_numpy(block.group),
        "prompt_token_ids": torch.from_numpy(samples.prompt_ids.values),
        "prompt_offsets": torch.from_numpy(samples.prompt_ids.offsets),
        "response_ids": torch.from_numpy(samples.token_ids.values),
        "response_offsets": torch.from_numpy(samples.token_ids.offsets),
        "rollout_logprobs": torch.from_numpy(samples.logprobs),
        "rewards": torch.from_numpy(block.reward),
        "stop_reasons": np.where(stopped, "stop", "length").tolist(),
        "support_ids": torch.from_numpy(samples.mask_ids),
        "support_offsets": torch.from_numpy(samples.mask_offsets),
        "support_sizes": torch.from_numpy(samples.mask_lengths),  # int32 [T]
        "widest_support": int(samples.mask_lengths.max()),
        KEY: remainders(block),
        **({} if samples.experts is None else _experts(samples.experts)),
    }


def _experts(experts: Experts) -> dict[str, torch.Tensor]:
    """int16 [P + T - B, layers, top_k]: none of the last token of a sample, which never went through the model."""
    numbers, layers, top_k = experts
    return {
        "expert_indices": torch.from_numpy(numbers.values).view(-1, layers, top_k),
        "expert_offsets": torch.from_numpy(numbers.offsets // (layers * top_k)),
    }
