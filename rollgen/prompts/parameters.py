"""Sampling parameters of one prompt: which a row may set, their ranges, and what the engine makes of them.

A row's value overrides the run's. Stored values are effective ones: 0 < temperature < 0.01 is raised to 0.01, top_k -1
becomes 0 (off), and a top_k that reaches the vocabulary cuts nothing: alone it becomes 0, so that no support of full
size is asked for; with top_p or min_p it becomes the vocabulary size.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rollgen.config import INT32_MAX, MIN_TEMPERATURE, check_bounded_support, flag
from rollgen.errors import UsageError
from rollgen.rollouts import Sampling

if TYPE_CHECKING:
    from rollgen.config import RunConfig

RUN_ONLY_KEYS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "output_kind",
        "output_text_buffer_length",
        "presence_penalty",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
        "structured_outputs",
        "thinking_token_budget",
        "trace_decode_token_ids",
        "watermarking",
    }
)
"""Public fields of `vllm.SamplingParams` 0.32 that a row cannot set: refused, because the user meant them to act."""

_ALIASES = {"num_samples": "n", "max_new_tokens": "max_tokens"}
"""Spellings of flags, which would otherwise end up in the metadata without effect."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class _Range(NamedTuple):
    low: float
    high: float
    type: type
    meaning: str


_ABOVE_ZERO = math.nextafter(0, 1)
_MIN_TOP_P = 1e-6
_RANGES = {
    "n": _Range(1, INT32_MAX, int, "a whole number from 1 to 2^31 - 1"),
    "seed": _Range(0, 2**63 - 1, int, "a whole number from 0 to 2^63 - 1"),
    "temperature": _Range(_ABOVE_ZERO, 2, float, "a number above 0 (greedy is not sampling) and at most 2"),
    "top_p": _Range(_MIN_TOP_P, 1, float, "a number from 1e-6 to 1 (off)"),
    "top_k": _Range(-1, INT32_MAX, int, "a whole number from 1 to 2^31 - 1, or 0 (off)"),
    "min_p": _Range(0, 1, float, "a number from 0 (off) to 1"),
    "max_tokens": _Range(1, INT32_MAX, int, "a whole number from 1 to 2^31 - 1"),
}
ROW_KEYS = (*_RANGES, "stop", "stop_token_ids")
"""vLLM sampling parameters that a row may set."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How one prompt is sampled, how often, and from which seed."""

    sampling: Sampling
    n: int
    seed: int


def run_parameters(config: RunConfig, vocab_size: int) -> Parameters:
    """The run's defaults, effective. Raises UsageError when one does not fit the model or the format."""
    own = {name: getattr(config, name) for name in ROW_KEYS}
    own |= {"stop": list(config.stop), "stop_token_ids": list(config.stop_token_ids)}
    wrong = [f"{flag(name)}: {problem}" for name, value in own.items() if (problem := _check(name, value, vocab_size))]
    if wrong:
        raise UsageError("; ".join(wrong))
    return _override(Parameters(Sampling(), 1, 0), own, vocab_size)


def take_parameters(fields: dict[str, Any], run: Parameters, vocab_size: int, problems: list[str]) -> Parameters:
    """Remove a row's parameters from `fields` and merge them with the run's; what is wrong goes to `problems`."""
    own = {name: fields.pop(name) for name in ROW_KEYS if name in fields}
    wrong = {name: problem for name, value in own.items() if (problem := _check(name, value, vocab_size))}
    problems += wrong.values()
    problems += (
        f"{name} is a sampling parameter that a row cannot set: use --sampling-arg for the run, or rename the field"
        for name in fields
        if name in RUN_ONLY_KEYS
    )
    problems += (f"{name}: in a row this is called {_ALIASES[name]}" for name in fields if name in _ALIASES)
    valid = {name: value for name, value in own.items() if name not in wrong}
    try:
        return _override(run, valid, vocab_size)
    except ValueError as error:
        problems.append(str(error))
        return replace(run, n=valid.get("n", run.n), seed=valid.get("seed", run.seed))


def check_token_ids(name: str, value: object, vocab_size: int) -> str | None:
    """What is wrong with a list of token ids, or None. Linear and without a Python loop for the usual valid list."""
    if not isinstance(value, list):
        return f"{name} must be a list of token ids, got {show(value)}"
    if not set(map(type, value)) <= {int}:
        wrong = next(item for item in value if type(item) is not int)
        return f"{name} must hold whole numbers only, got {show(wrong)}"
    if value and (min(value) < 0 or max(value) >= vocab_size):
        wrong = next(item for item in value if not 0 <= item < vocab_size)
        return f"{name}: id {show(wrong)} is outside the model's vocabulary, 0 to {vocab_size - 1}"
    return None


def check_encodable(name: str, text: str) -> str | None:
    """What is wrong with a text that has no UTF-8 form, or None."""
    if _SURROGATE.search(text):
        return f"{name} holds half of a surrogate pair (\\ud800 to \\udfff), which has no UTF-8 form; remove it"
    return None


def show(value: object) -> str:
    """A JSON value in an error message: on one line, printable, at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _override(base: Parameters, own: dict[str, Any], vocab_size: int) -> Parameters:
    """`base` with checked values put in, made effective. Raises ValueError for top_p or min_p without top_k."""
    changes = {name: value for name, value in own.items() if name not in ("n", "seed")}
    for name in changes.keys() & {"stop", "stop_token_ids"}:
        value = changes[name]
        changes[name] = (value,) if isinstance(value, str) else tuple(value)
    sampling = _effective(replace(base.sampling, **changes), vocab_size)
    return Parameters(sampling, own.get("n", base.n), own.get("seed", base.seed))


def _effective(sampling: Sampling, vocab_size: int) -> Sampling:
    top_k = min(max(sampling.top_k, 0), vocab_size)
    if top_k == vocab_size and sampling.top_p == 1 and sampling.min_p == 0:
        top_k = 0
    check_bounded_support(top_k, sampling.top_p, sampling.min_p)
    return replace(sampling, temperature=max(sampling.temperature, MIN_TEMPERATURE), top_k=top_k)


def _check(name: str, value: object, vocab_size: int) -> str | None:
    """What is wrong with the value of one parameter, or None."""
    if name == "stop_token_ids":
        return check_token_ids(name, value, vocab_size)
    if name == "stop":
        return _check_stop(value)
    low, high, kind, meaning = _RANGES[name]
    allowed_types = (int,) if kind is int else (int, float)
    if isinstance(value, int | float) and type(value) in allowed_types and low <= value <= high:
        return None
    return f"{name} must be {meaning}, got {show(value)}"


def _check_stop(value: object) -> str | None:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        return f"stop must be a non-empty string or a list of them, got {show(value)}"
    return check_encodable("stop", "".join(strings))
