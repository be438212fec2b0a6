"""A vLLM loop of your own that makes a dataset: `rollgen.RolloutWriter` plans, checks, stores and remembers.

    python examples/03_own_loop.py examples/prompts.jsonl loop-rollouts --model Qwen/Qwen3-0.6B

After an interruption of any kind, run it again: it makes what is still owed. Several processes share the work, each
with a part of its own: `--part 0/4`, `--part 1/4`, ... On a GPU vLLM returns the sampling masks; on a CPU it cannot, so
the supports are read from processed logprobs, of which a few samples need more than were asked for at first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import rollgen
from rollgen.config import EMBEDDED_MODEL
from rollgen.engines.base import SampleRequest
from rollgen.errors import IncompleteSupport

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

ON_CPU = current_platform.is_cpu()
TOP_K = 50
BATCH = 256
"""Requests given to vLLM at once."""


def main() -> None:
    args = parse_arguments()
    number, _, of = args.part.partition("/")
    writer = rollgen.RolloutWriter(
        args.out,
        prompts=args.prompts,
        writer=f"w{number}",
        part=(int(number), int(of)),
        model=args.model,
        dtype=args.dtype,
        capture="logprobs" if ON_CPU else "native",
        n=2,
        max_tokens=48,
        temperature=0.8,
        top_k=TOP_K,
        top_p=0.9,
    )
    with writer:
        llm = load(args.model, writer.manifest.model.dtype, writer.manifest.model.context_length, args.max_num_seqs)
        owed = writer.owed()
        while requests := list(islice(owed, BATCH)):
            sample(llm, writer, requests)
    print(f"{len(rollgen.RolloutDataset(args.out))} samples in {args.out}")


def sample(llm: LLM, writer: rollgen.RolloutWriter, requests: list[SampleRequest]) -> None:
    """Make these requests. Some of them may need more logprobs: the same sample is asked for again, by its seed."""
    logprobs = min(2 * TOP_K, writer.manifest.vocab_size) if ON_CPU else 0
    while requests:
        prompts = [{"prompt_token_ids": request.prompt.token_ids.tolist()} for request in requests]
        params = [SamplingParams(logprobs=logprobs, **request.sampling_params) for request in requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        requests = list(add(writer, zip(requests, outputs, strict=True)))
        logprobs = min(2 * logprobs, writer.manifest.vocab_size)


def add(writer: rollgen.RolloutWriter, made: Iterator[tuple[SampleRequest, object]]) -> Iterator[SampleRequest]:
    """Store the outputs; what must be asked for again comes back."""
    for request, output in made:
        try:
            writer.add(request, output)
        except IncompleteSupport:
            yield request


def load(model: str, dtype: str, context_length: int, max_num_seqs: int) -> LLM:
    """What every engine needs here is `logprobs_mode`: log-probabilities after truncation, not before."""
    arguments = {"return_sampling_mask": True}
    if ON_CPU:  # vLLM cannot sample with a seed in chunks there, and would take nearly all memory
        arguments = {
            "max_logprobs": -1,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, context_length),
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30,
        }
    return LLM(
        model,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        **arguments,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=str(EMBEDDED_MODEL), help="default: the embedded demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--part", default="0/1", help="which part of the prompts this process makes (default: all)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests in a batch at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
