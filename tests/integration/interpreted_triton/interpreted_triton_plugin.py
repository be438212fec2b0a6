"""A vLLM plugin: the interpreter cannot run the top-k/top-p kernel, so vLLM's own PyTorch code takes its place."""

from __future__ import annotations


def register() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
