"""Prompts to a dataset from Python, and a look at one stored token.

    python examples/01_generate.py examples/prompts.jsonl api-rollouts --model Qwen/Qwen3-0.6B

The same as `rollgen generate`. vLLM starts child processes by spawning, so a script needs the `__main__` guard.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import rollgen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="default: the embedded demo model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, help="requests in a batch at most")
    args = parser.parse_args()

    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("rollgen").setLevel(logging.INFO)
    engine = {"model": args.model, "dtype": args.dtype, "max_num_seqs": args.max_num_seqs}
    sampling = {"n": 2, "max_tokens": 48, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    stats = rollgen.generate(args.prompts, args.out, resume=True, **engine, **sampling)
    print(f"{stats.stored} samples, {stats.tokens} tokens, {stats.mean_support:.1f} ids a support")

    ds = rollgen.RolloutDataset(args.out)
    rollout = ds[0]
    print(f"{rollout.prompt_id} / {rollout.sample_index}: {len(rollout.token_ids)} tokens, {rollout.finish_reason}")
    print(f"first token {int(rollout.token_ids[0])}, log pi {float(rollout.logprobs[0]):.4f}")
    print(f"its support: {rollout.support[0:1].ids.tolist()}")


if __name__ == "__main__":
    main()
