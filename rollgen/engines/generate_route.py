"""vLLM's route `/inference/v1/generate`, as pure functions: what is sent there for one sample, and what comes back.

Everything that decides a sample is sent, also where it has its neutral value: nothing is left to the server's defaults,
which it may have from the model's generation_config.json. What a server does not know it ignores in silence: see
`probe.py`. Logprobs come back as JSON, in which vLLM puts `CLAMPED_LOGPROB` in place of -inf, and of NaN. Among the
candidates of a token it can only be -inf, an excluded id: one NaN makes all logprobs of its token NaN, the sampled
one's too, and that one is never taken clamped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson

from rollgen.engines.base import RequestError, SampleRequest
from rollgen.engines.capture import CLAMPED_LOGPROB, offsets_of
from rollgen.engines.outputs import SampledOutput, read_outputs
from rollgen.engines.shapes import NOT_A_NUMBER
from rollgen.engines.wire import Unreachable
from rollgen.errors import CaptureError, UsageError
from rollgen.inert import brief
from rollgen.rollouts import FINISH_REASONS

GENERATE_PATH: Final = "/inference/v1/generate"
ABORTED: Final = "abort"
"""The finish reason of a request that was ended from outside: a server that shuts down does that."""
_NEUTRAL: Final[Mapping[str, Any]] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "min_tokens": 0,
    "ignore_eos": False,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "watermarking": False,
    "trace_decode_token_ids": None,
    "extra_args": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
}
_FIXED_BYTES: Final = 16 << 20
_ROUTING_BYTES: Final = 4096
"""For each token of prompt and completion: the experts of a model of 61 layers with 8 each are 1.3 KB."""
_LOGPROB_BYTES: Final = 96
"""`{"token_id":151935,"logprob":-12.345678901234567,"rank":151936},` and white space."""
_MASK_ID_BYTES: Final = 12


def request_body(request: SampleRequest, num_logprobs: int, *, model: str, arguments: Mapping[str, Any]) -> bytes:
    """The JSON to send. `arguments` are further sampling parameters."""
    sampling_params = {
        **_NEUTRAL,
        **request.sampling_params,
        "logprobs": num_logprobs,
        "flat_logprobs": True,  # the server's memory and garbage collection: the answer is the same
        "detokenize": bool(request.prompt.sampling.stop),
        **arguments,
    }
    body = {
        "model": model,
        "token_ids": request.prompt.token_ids.tolist(),
        "sampling_params": sampling_params,
        "stream": False,
        "output_mode": "tokens",
    }
    return orjson.dumps(body)


def largest_answer(request: SampleRequest, num_logprobs: int) -> int:
    """Bytes that an answer may need, with room: what is longer is none.

    A mask may have any number of ids, but not all masks of a sample have twice as many as top_k keeps without ties.
    """
    sampling = request.prompt.sampling
    tokens = len(request.prompt.token_ids) + sampling.max_tokens
    of_token = _LOGPROB_BYTES * (num_logprobs + 2) + _MASK_ID_BYTES * (2 * sampling.top_k + 64)
    return _FIXED_BYTES + _ROUTING_BYTES * tokens + of_token * sampling.max_tokens


def read_choice(body: bytes) -> dict[str, Any]:
    """The one choice of an answer, as `outputs.read_outputs` takes it, and the `request_id` of the answer.

    Raises Unreachable when it is cut or aborted, which is worth another try, and RequestError for any other answer.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Unreachable("its answer is not JSON") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RequestError("the server's answer is none to a request for tokens: it lacks its one choice")
    choice: dict[str, Any] = choices[0]
    reason = choice.get("finish_reason")
    if reason == ABORTED:
        raise Unreachable("it aborted the request")
    if reason not in FINISH_REASONS:
        told = brief(repr(reason)) if isinstance(reason, str) else f"of type {type(reason).__name__}"
        raise RequestError(f"vLLM ended the request with finish reason {told}")
    return choice | {"logprobs": _flat_logprobs(choice.get("logprobs")), "request_id": answer.get("request_id")}


def is_answer_to(choice: dict[str, Any], request_id: str) -> bool:
    """Whether it names the X-Request-Id that was sent: vLLM repeats it behind `generate-tokens-`."""
    told = choice["request_id"]
    return isinstance(told, str) and told.endswith(f"-{request_id}")


def read_sample(choice: dict[str, Any], **how: Any) -> SampledOutput:
    """Of a choice, with the keyword arguments of `outputs.read_outputs` and what that raises, but for UsageError."""
    try:
        (sampled,) = read_outputs(choice, **how)
    except UsageError as error:
        raise CaptureError(f"the server's answer cannot be read: {error}") from None
    except RecursionError:  # of a message that would repeat a value
        raise CaptureError("the server's answer cannot be read: it is nested far too deeply") from None
    return sampled


def _flat_logprobs(logprobs: Any) -> dict[str, Any] | None:
    """vLLM's JSON in the fields of its FlatLogprobs, with -inf where it was clamped. Raises CaptureError."""
    if logprobs is None:
        return None
    try:
        rows = [_candidates(token) for token in logprobs["content"]]
        offsets = offsets_of(np.fromiter(map(len, rows), np.int64, len(rows)))
        told = [one["logprob"] for row in rows for one in row]
        return {
            "token_ids": [one["token_id"] for row in rows for one in row],
            "logprobs": [-math.inf if logprob == CLAMPED_LOGPROB else logprob for logprob in told],
            "start_indices": offsets[:-1],
            "end_indices": offsets[1:],
        }
    except (LookupError, *NOT_A_NUMBER):
        raise CaptureError(
            "the logprobs are not those of output_mode=tokens, with a token_id each: the server's vLLM is too old"
        ) from None


def _candidates(token: Any) -> list[Any]:
    """The most likely ids of a token, the sampled one among them, and in front if vLLM told it alone."""
    top = token["top_logprobs"]
    return top if top and top[0]["token_id"] == token["token_id"] else [token, *top]
