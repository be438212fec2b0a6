"""Offline GRPO: a few optimiser steps on stored rollouts, with exact importance ratios.

    python examples/04_grpo_offline.py grpo-rollouts --prompts examples/arithmetic.jsonl --plot grpo-rollouts.png
    python examples/04_grpo_offline.py grpo-rollouts --steps 8    # from the start again, on what is there

The rewarded answers are those whose last number is right, and a little those that end at all. A step is the whole
dataset, a few prompts at a time. In the first one pi_theta is still pi_old: with masks every ratio pi_theta / pi_old is
1. A softmax over the full vocabulary, of the same hidden states, is off before anything was learned, and stays off.

Training makes nothing of size [tokens, V], and nothing of size [V, H] but the weights, their gradients and the state
of the optimiser: see `used_rows`. Its memory does not depend on V, which `--pad-vocab` widens and `--memory` measures.
Where some [V, H] more do not matter, this is all that is needed:

    hidden = model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    logprobs = batch.support_logprobs_from_hidden(hidden, model.lm_head.weight)

All this is for models whose logits are `hidden @ lm_head.weight.T`; others are refused: see `check_model`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

import rollgen
from rollgen import RolloutBatch
from rollgen.config import EMBEDDED_MODEL
from rollgen.errors import RollgenError, UsageError

SAMPLING = {"n": 6, "max_tokens": 24, "temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_model_len": 1024}
CLIP = 0.2
EPSILON = 1e-4  # keeps the advantages of a group of nearly equal rewards small
NUMBER = r"[-\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"  # U+2212 is the minus sign of typeset text
FINISHED = 0.25  # reward of an answer that ends by itself
WITH, WITHOUT = "with masks", "without masks"


def main() -> None:
    args = parse_arguments()
    if args.prompts:
        rollgen.generate(args.prompts, args.dataset, resume=True, model=args.model, dtype="float32", **SAMPLING)
    stream = rollgen.RolloutStream(args.dataset, batch_tokens=args.batch_tokens, group_by_prompt=True)
    model = load_model(args.model or stream.manifests[0].model.name, args.pad_vocab)
    check_model(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)  # fused: no temporaries

    if args.memory:
        batches = list(stream)[:2]  # the second finds gradients to add to; from then on nothing is new
        print(json.dumps({"step_memory_bytes": peak_bytes(lambda: add_gradients(model, batches, compare=False))}))
        return
    steps = []
    for number in range(1, args.steps + 1):
        optimiser.zero_grad(set_to_none=False)
        steps.append(add_gradients(model, list(stream)))  # an epoch; the next one begins when it is asked for again
        optimiser.step()
        if not args.json:
            print(f"step {number}   {in_words(steps[-1])}")
    if args.json:
        print(json.dumps({"steps": steps}))
    if args.plot:
        plot(steps, args.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset", type=Path, help="directory of a dataset, sampled in float32")
    parser.add_argument("--prompts", type=Path, help="sample these into it first; rows have an `answer`, a number")
    parser.add_argument("--model", help="default: the embedded demo model, or the name in the dataset's manifest")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens in memory at once, about")
    parser.add_argument("--pad-vocab", type=int, help="widen embedding and head to that many rows, with noise")
    parser.add_argument("--memory", action="store_true", help="print, as JSON, the memory of a step, and stop")
    parser.add_argument("--plot", type=Path, help="write ratios and KL divergences as a PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")
    return parser.parse_args()


def load_model(name: str, pad_vocab: int | None) -> PreTrainedModel:
    """In float32, without dropout. A manifest holds no paths: the embedded demo model is at its known place."""
    path = EMBEDDED_MODEL if name == EMBEDDED_MODEL.name else name
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if pad_vocab:
        model.resize_token_embeddings(pad_vocab, mean_resizing=False)
    return model


@torch.no_grad()
def check_model(model: PreTrainedModel) -> None:
    """Raise UsageError unless tables of embedding and head, with the layers between, give the model's own logits.

    Not so where embeddings are scaled outside their table, where the head has a bias, and where logits are scaled or
    capped after it: ratios would be wrong from the first step on.
    """
    ids = torch.arange(min(16, model.config.vocab_size)).unsqueeze(0)
    inputs = F.embedding(ids, model.get_input_embeddings().weight)
    hidden = model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    logits, expected = F.linear(hidden, model.lm_head.weight), model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
        off = (logits - expected).abs().max().item()
        raise UsageError(
            f"{model.config.model_type}: logits from the tables of embedding and head alone are off by {off:.2g}: "
            "this model scales, shifts or caps them; train it on its own logits, with batch.support_logprobs"
        )


def reward(text: str | None, metadata: str | None, finish_reason: str) -> float:
    """1 when the last number of the text is the answer, and FINISHED when the model came to an end."""
    numbers = re.findall(NUMBER, text or "")
    right = bool(numbers) and number(numbers[-1]) == number(str(json.loads(metadata or "{}").get("answer")))
    return right + FINISHED * (finish_reason == "stop")


def number(text: str) -> float:
    """Commas between thousands are left out. NaN, which equals nothing, for what is no number: never right."""
    digits = text.strip().replace("\u2212", "-").replace(",", "")
    return float(digits) if re.fullmatch(NUMBER, text.strip()) else float("nan")


def batch_advantages(batch: RolloutBatch) -> Tensor:
    """Of each rollout, [B]: all samples of a prompt are in one batch."""
    rewards = torch.tensor(list(map(reward, batch.text, batch.metadata, batch.finish_reason)))
    return rollgen.ops.group_advantages(rewards, batch.group, "mean_std", eps=EPSILON)


def clipped_gain(log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r, 1 - CLIP, 1 + CLIP) A) of each token [N], and bool [N] where the clipped one is taken."""
    ratio = log_ratio.exp()
    free, clipped = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
    return torch.minimum(free, clipped), clipped < free


def add_gradients(model: PreTrainedModel, batches: list[RolloutBatch], *, compare: bool = True) -> dict[str, Any]:
    """Add those of the clipped loss, averaged over all tokens. Returns figures, with `compare` also without masks."""
    tokens = sum(len(batch.support) for batch in batches)
    loss, clipped = 0.0, 0
    log_ratios: dict[str, list[Tensor]] = {WITH: [], WITHOUT: []}
    for batch in batches:
        old = batch.logprobs[batch.response_mask]
        with used_rows(model, batch) as (narrow, embedding, head):
            inputs = {"inputs_embeds": F.embedding(narrow.input_ids, embedding), "attention_mask": batch.attention_mask}
            hidden = model.model(**inputs, use_cache=False).last_hidden_state
            log_ratio = narrow.support_logprobs_from_hidden(hidden, head)[batch.response_mask] - old
            gain, is_clipped = clipped_gain(log_ratio, batch_advantages(batch)[batch.response_rollouts])
            batch_loss = -gain.sum() / tokens
            batch_loss.backward()
        loss, clipped = loss + batch_loss.item(), clipped + int(is_clipped.sum())
        log_ratios[WITH].append(log_ratio.detach())
        if compare:
            log_ratios[WITHOUT].append(full_logprobs(batch, hidden, model.lm_head.weight) - old)
    ratios = {name: ratio_figures(torch.cat(parts)) for name, parts in log_ratios.items() if parts}
    return {"loss": loss, "tokens": tokens, "clipped": clipped / tokens, **ratios}


@contextmanager
def used_rows(model: PreTrainedModel, batch: RolloutBatch) -> Iterator[tuple[RolloutBatch, Tensor, Tensor]]:
    """The batch with its ids renumbered to the U that occur in it, and those rows of embedding and head, [U, H] each.

    For each use of a weight autograd would make a [V, H], and hold it through the backward, only to add it to the
    gradient. These rows are leaves of their own; their gradients are added at the end (to a tied weight, both).
    The row of a `padding_idx` gets its gradient like any other, which an embedding that has one would keep from it.
    Raises UsageError for tokens that were sampled from all V ids.
    """
    if batch.support.has_full_rows:
        raise UsageError("some tokens were sampled without truncation: generate with a top_k")
    ids, places = torch.cat([batch.input_ids.flatten(), batch.support.ids]).unique(return_inverse=True)
    input_ids, support_ids = places.split([batch.input_ids.numel(), batch.support.ids.numel()])
    support = rollgen.ops.Support(support_ids.int(), batch.support.offsets, len(ids))
    weights = model.get_input_embeddings().weight, model.lm_head.weight
    embedding, head = (weight.detach()[ids].requires_grad_() for weight in weights)
    yield replace(batch, input_ids=input_ids.view_as(batch.input_ids), support=support), embedding, head
    for weight, rows in zip(weights, (embedding, head), strict=True):
        weight.grad.index_add_(0, ids, rows.grad)


@torch.no_grad()
def full_logprobs(batch: RolloutBatch, hidden: Tensor, weight: Tensor) -> Tensor:
    """log pi_theta as a trainer without masks has it, [N]: each support the full vocabulary, some ids at a time."""
    offsets = torch.zeros_like(batch.support.offsets)
    support = rollgen.ops.Support(batch.support.ids[:0], offsets, batch.vocab_size)
    return replace(batch, support=support).support_logprobs_from_hidden(hidden, weight)[batch.response_mask]


def ratio_figures(log_ratio: Tensor) -> dict[str, float]:
    """From log r of all tokens [N]: the mean r, KL(pi_old || pi_theta) as the mean of r - 1 - log r, largest |log r|.

    That estimate (k3 of http://joschu.net/blog/kl-approx.html) expects the ratios to be 1 on average. Without masks
    they are not, and it is as wrong as they are.
    """
    log_ratio = log_ratio.double()
    kl = (log_ratio.expm1() - log_ratio).mean()
    return {"mean_ratio": log_ratio.exp().mean().item(), "kl": kl.item(), "largest": log_ratio.abs().max().item()}


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that `work` had allocated at once; what was there before does not count.

    The profiler sees what torch allocates, tracemalloc what numpy and Python do: on a CPU, rollgen takes large zeros
    from numpy. The sum of both peaks is the true one or above it. The memory of the process would say less: allocators
    keep what was freed.
    """
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    of_python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_bytes())["traceEvents"]
    return of_python + max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def in_words(step: dict[str, Any]) -> str:
    ratios = (
        f"{name}: mean ratio {step[name]['mean_ratio']:.6f}, KL {step[name]['kl']:.6f}" for name in (WITH, WITHOUT)
    )
    return "   ".join([*ratios, f"clipped {step['clipped']:.1%}", f"loss {step['loss']:+.5f}"])


def plot(steps: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    numbers = range(1, len(steps) + 1)
    titles = {"mean_ratio": "mean ratio π_θ / π_old", "kl": "KL(π_old ‖ π_θ)"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for name in (WITH, WITHOUT):
            axes.plot(numbers, [step[name][key] for step in steps], marker="o", label=name)
        axes.set(title=title, xlabel="optimiser step", xticks=numbers)
        axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except RollgenError as error:
        sys.exit(f"error: {error}")
