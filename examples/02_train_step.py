"""One policy-gradient step on a generated dataset, and what the sampling masks change about it.

    rollgen generate examples/prompts.jsonl --dtype float32 --n 2 --max-tokens 48 --out step-rollouts
    python examples/02_train_step.py step-rollouts

The model that sampled is loaded again, so pi_theta is pi_old and every importance ratio pi_theta / pi_old should be 1.
Normalised over the stored supports it is (to 1e-4 in float32); over the full vocabulary, as trainers do without masks,
each ratio is too small by the probability mass that top-k and top-p cut away. The reward is a toy that needs no
answer key: the share of distinct tokens in the response, against loops.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import rollgen
from rollgen.config import EMBEDDED_MODEL

CLIP = 0.2
NOISE = 0.1
"""Ratios further than this from 1 are counted."""


def main() -> None:
    args = parse_arguments()
    ds = rollgen.RolloutDataset(args.dataset)
    rollouts = [ds[index] for index in range(min(args.samples, len(ds)))]
    advantages = centred_rewards(rollouts)
    starts = range(0, len(rollouts), args.micro_batch)
    batches = [rollgen.collate(rollouts[start : start + args.micro_batch]) for start in starts]

    name = args.model or model_location(ds.manifest.model.name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=ds.manifest.model.dtype).eval()  # eval: no dropout
    before = {
        "with masks": compare(model, batches),
        "without masks": compare(model, [without_masks(batch) for batch in batches]),
    }
    loss = train_step(model, batches, advantages.split(args.micro_batch), args.learning_rate)
    after = compare(model, batches)
    report(before, loss, after, as_json=args.json)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset", type=Path, help="directory that `rollgen generate` wrote")
    parser.add_argument("--model", help="the model that sampled; default: the name in the dataset's manifest")
    parser.add_argument("--samples", type=int, default=32, help="rollouts in the step (default 32)")
    parser.add_argument("--micro-batch", type=int, default=2, help="rollouts in memory at once (default 2)")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")
    return parser.parse_args()


def model_location(name: str) -> str:
    """A manifest holds no paths. The embedded demo model is at its known place, any other name is a model hub's."""
    return str(EMBEDDED_MODEL) if name == EMBEDDED_MODEL.name else name


def centred_rewards(rollouts: list[rollgen.Rollout]) -> Tensor:
    """Reward minus the mean reward of the same prompt, [R]. The mean of all where a prompt has one sample only."""
    rewards = torch.tensor([rollout.token_ids.unique().numel() / rollout.token_ids.numel() for rollout in rollouts])
    prompts = torch.tensor([rollout.prompt_index for rollout in rollouts])
    same = prompts.unsqueeze(0) == prompts.unsqueeze(1)
    same[same.sum(1) == 1] = True
    return rewards - (same * rewards).sum(1) / same.sum(1)


def without_masks(batch: rollgen.RolloutBatch) -> rollgen.RolloutBatch:
    """The batch as a trainer sees it that has no masks: every support is the full vocabulary."""
    offsets = torch.zeros_like(batch.support.offsets)
    return replace(batch, support=rollgen.ops.Support(batch.support.ids[:0], offsets, batch.vocab_size))


def log_policy(model: PreTrainedModel, batch: rollgen.RolloutBatch) -> Tensor:
    """log pi_theta of the response tokens, [N]. Padding is on the right: causal attention never looks at it."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    return batch.support_logprobs(logits)[batch.response_mask]


@torch.no_grad()
def compare(model: PreTrainedModel, batches: list[rollgen.RolloutBatch]) -> dict[str, float]:
    """Importance ratios pi_theta / pi_old over all response tokens."""
    difference = torch.cat([log_policy(model, batch) - batch.logprobs[batch.response_mask] for batch in batches])
    ratio = difference.exp()
    return {
        "tokens": difference.numel(),
        "mean_ratio": ratio.mean().item(),
        "max_logprob_difference": difference.abs().max().item(),
        "share_outside_10_percent": ((ratio - 1).abs() > NOISE).float().mean().item(),
    }


def train_step(
    model: PreTrainedModel, batches: list[rollgen.RolloutBatch], advantages: tuple[Tensor, ...], learning_rate: float
) -> float:
    """One AdamW step on the clipped policy-gradient loss (PPO), averaged over tokens. Returns the loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    tokens = sum(len(batch.support) for batch in batches)
    total = 0.0
    for batch, advantage in zip(batches, advantages, strict=True):
        ratio = (log_policy(model, batch) - batch.logprobs[batch.response_mask]).exp()
        weight = advantage.unsqueeze(1).expand_as(batch.input_ids)[batch.response_mask]
        gain = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
        loss = -gain.sum() / tokens
        loss.backward()
        total += loss.item()
    optimiser.step()
    return total


def report(before: dict[str, dict[str, float]], loss: float, after: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"before": before, "loss": loss, "after": after}))
        return
    for label, figures in {**before, "after the step, with masks": after}.items():
        print(
            f"{label:28} mean ratio {figures['mean_ratio']:.6f}   "
            f"largest |difference of logprobs| {figures['max_logprob_difference']:.2e}   "
            f"ratios outside 1 ± 0.1: {figures['share_outside_10_percent']:.1%}"
        )
    print(f"loss {loss:.6f} over {after['tokens']} tokens")


if __name__ == "__main__":
    main()
