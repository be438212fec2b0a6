"""TRL's GRPOTrainer on stored rollouts, with their masks and without.

    python examples/05_trl_grpo.py demo-rollouts
    python examples/05_trl_grpo.py rollouts/ --model Qwen/Qwen3-0.6B --reward correct --num-generations 8

Needs `pip install -e '.[trl]'` in a clone. The model that sampled is trained for a few steps, in float32 and from the
same weights each time. In the first step pi_theta still is pi_old, so that every importance ratio pi_theta / pi_old
should be 1. On the stored supports it is; over the full vocabulary, as TRL has it, ratios are too small by the mass
that top-k and top-p cut away, and some are clipped before anything was learned.

The reward is one that `rollgen score` stored, or else a toy: the share of distinct tokens, against loops.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig

import rollgen
from rollgen.config import EMBEDDED_MODEL
from rollgen.errors import RollgenError, UsageError
from rollgen.integrations.trl import RolloutGRPOTrainer

WITH, WITHOUT = "with masks", "without masks"
FIGURES = {
    "mean_ratio": "sampling/importance_sampling_ratio/mean",
    "smallest_ratio": "sampling/importance_sampling_ratio/min",
    "largest_ratio": "sampling/importance_sampling_ratio/max",
    "logprob_difference": "sampling/sampling_logp_difference/mean",
    "clipped": "clip_ratio/region_mean",
    "entropy": "entropy",
    "reward": "reward",
}
"""What is printed, by the names under which the trainer logs it."""


class WithoutMasks(RolloutGRPOTrainer):
    """The same on the full vocabulary: how TRL trains without masks."""

    def load_rollouts(self, numbers: Sequence[int]) -> list[rollgen.Rollout]:
        return [replace(rollout, support=everything(rollout.support)) for rollout in super().load_rollouts(numbers)]


def everything(support: rollgen.ops.Support) -> rollgen.ops.Support:
    """As many rows, all of them not truncated."""
    return rollgen.ops.Support(support.ids[:0], torch.zeros_like(support.offsets), support.vocab_size)


def main() -> None:
    args = parse_arguments()
    runs = {name: train(trainer, args) for name, trainer in ((WITH, RolloutGRPOTrainer), (WITHOUT, WithoutMasks))}
    if args.json:
        print(json.dumps(runs))
        return
    for name, steps in runs.items():
        for number, step in enumerate(steps, 1):
            print(
                f"{name:14} step {number}   mean ratio {step['mean_ratio']:.6f} "
                f"({step['smallest_ratio']:.3f} to {step['largest_ratio']:.3f})   clipped {step['clipped']:.1%}   "
                f"entropy {step['entropy']:.3f}   reward {step['reward']:.3f}"
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset", type=Path, help="directory of a dataset, sampled in float32")
    parser.add_argument("--model", help="the model that sampled; default: the name in the dataset's manifest")
    parser.add_argument("--reward", default=(), help="name of a stored reward")
    parser.add_argument("--steps", type=positive, default=2)
    parser.add_argument("--num-generations", type=positive, default=2, help="samples of a group, 2 at least")
    parser.add_argument("--micro-batch", type=positive, default=4, help="rollouts in memory at once (default 4)")
    parser.add_argument("--accumulate", type=positive, default=2, help="micro-batches of a step (default 2)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")
    args = parser.parse_args()
    step = args.micro_batch * args.accumulate
    if args.num_generations < 2 or step % args.num_generations:
        parser.error(f"--num-generations {args.num_generations}: 2 or more, a divisor of the {step} rollouts of a step")
    return args


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def train(trainer_class: type[RolloutGRPOTrainer], args: argparse.Namespace) -> list[dict[str, float]]:
    """What the trainer logs of each step."""
    model, tokenizer = load_model(args.model or rollgen.RolloutDataset(args.dataset).manifest.model.name)
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_class(
            model,
            [] if args.reward else distinct_tokens,
            args=trl_config(args, directory),
            rollouts=args.dataset,
            rewards=args.reward,
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if FIGURES["mean_ratio"] in entry]
    return [{figure: entry[key] for figure, key in FIGURES.items()} for entry in logged]


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """In float32; the embedded model is that of the clone, wherever this is run."""
    path = str(Path(__file__).parents[1] / EMBEDDED_MODEL) if name == EMBEDDED_MODEL.name else name
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path}: no model can be loaded from there: {reason}; give another with --model") from error


def trl_config(args: argparse.Namespace, directory: str) -> GRPOConfig:
    """Float32 and no dropout, so that nothing but the weights makes ratios move."""
    return GRPOConfig(
        output_dir=directory,
        max_steps=args.steps,
        num_generations=args.num_generations,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_completion_length=None,
        bf16=False,
        disable_dropout=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """As TRL calls reward functions."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


if __name__ == "__main__":
    try:
        main()
    except RollgenError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
