"""What engines answer, made out of a fake completion: the same tokens in every shape that a loop may hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from models.fake_engine import fake_completion

from rollgen.engines.base import SampleRequest


def plain(request: SampleRequest, **changes: Any) -> dict[str, Any]:
    """A mapping of numpy arrays."""
    completion = fake_completion(request)
    return {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "mask_ids": completion.mask_ids,
        "mask_offsets": completion.mask_offsets,
        "finish_reason": completion.finish_reason,
        **changes,
    }


def sglang(request: SampleRequest) -> dict[str, Any]:
    """A response of SGLang's `/generate` with `return_sampling_mask`."""
    completion = fake_completion(request)
    masks = np.split(completion.mask_ids, completion.mask_offsets[1:-1])
    logprobs = completion.logprobs.tolist()
    return {
        "output_ids": completion.token_ids.tolist(),
        "meta_info": {
            "finish_reason": {"type": completion.finish_reason},
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs, completion.token_ids.tolist(), strict=True)
            ],
            "output_token_sampling_mask": [mask.tolist() for mask in masks],
            "output_token_sampling_logprobs": logprobs,
        },
    }


@dataclass
class CompletionOutput:
    """vLLM's, as far as it is read."""

    index: int
    token_ids: list[int]
    logprobs: list[dict[int, float]]
    sampling_mask: list[list[int]]
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """vLLM's, as far as it is read."""

    outputs: list[CompletionOutput] = field(default_factory=list)


def vllm(*requests: SampleRequest) -> RequestOutput:
    """One output for each request, as of a request with n > 1."""
    outputs = []
    for index, request in enumerate(requests):
        completion = fake_completion(request)
        tokens, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
        masks = np.split(completion.mask_ids, completion.mask_offsets[1:-1])
        outputs.append(
            CompletionOutput(
                index,
                tokens,
                [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
                [mask.tolist() for mask in masks],
                completion.finish_reason,
            )
        )
    return RequestOutput(outputs)
