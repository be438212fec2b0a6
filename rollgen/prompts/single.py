"""One prompt that comes by itself, as token ids: under the rules of an input row, without a file.

All problems are reported together, in one UsageError that names the prompt.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from rollgen.config import INT32_MAX
from rollgen.errors import UsageError
from rollgen.prompts.parameters import Parameters, check_encodable, check_token_ids, take_parameters
from rollgen.prompts.readers import object_line, parse_object
from rollgen.rollouts import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollgen.prompts.model import ModelInfo
    from rollgen.rollouts import Int32Array, Sampling

INT63_MAX = 2**63 - 1
_SAMPLING_KEYS = frozenset({"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids"})


def single_prompt(
    run: Parameters,
    model: ModelInfo,
    *,
    prompt_id: str,
    token_ids: Sequence[int],
    prompt: str | None,
    metadata: Mapping[str, Any] | None,
    sampling: Mapping[str, Any],
) -> Prompt:
    """The prompt with its effective sampling: `run`'s, overridden by `sampling`, max_tokens clamped to the context."""
    texts = {"prompt_id": prompt_id, "prompt": prompt}
    text_of_metadata = _json(metadata)
    problems = [problem for name, text in texts.items() if text is not None and (problem := _text(name, text))]
    ids = _ids(token_ids, model, problems)
    effective = _sampling(sampling, run, model.vocab_size, problems)
    if problems:
        raise UsageError(f"prompt {prompt_id!r}: {'; '.join(problems)}")
    room = model.context_length - ids.size
    return Prompt(
        prompt_id=prompt_id,
        prompt_index=id_number(prompt_id),
        token_ids=ids,
        sampling=replace(effective, max_tokens=min(effective.max_tokens, room)),
        n=1,
        seed=run.seed,
        prompt=prompt,
        metadata=text_of_metadata,
    )


def id_number(prompt_id: str) -> int:
    """The number of a prompt that has no place in a plan: 63 bits of SHA-256 over its id, the same everywhere."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big") >> 1


def check_sample(sample_index: SupportsIndex, seed: SupportsIndex | None) -> int:
    """The sample_index as an int. Raises UsageError for numbers that the columns of these names cannot hold."""
    problems = [
        *_whole("sample_index", sample_index, INT32_MAX),
        *_whole("seed", 0 if seed is None else seed, INT63_MAX),
    ]
    if problems:
        raise UsageError("; ".join(problems))
    return index(sample_index)


def _sampling(own: Mapping[str, Any], run: Parameters, vocab_size: int, problems: list[str]) -> Sampling:
    """`run` with `own` put in; what is wrong goes to `problems`."""
    problems += (
        f"{name} is not a sampling parameter of a request (those are {', '.join(sorted(_SAMPLING_KEYS))}); what holds "
        "for the whole dataset goes in sampling_arg"
        for name in own.keys() - _SAMPLING_KEYS
    )
    fields = {
        name: list(value) if isinstance(value, tuple) else value.item() if isinstance(value, np.generic) else value
        for name, value in own.items()
        if name in _SAMPLING_KEYS and value is not None
    }
    return take_parameters(fields, run, vocab_size, problems).sampling


def _whole(name: str, value: object, largest: int) -> tuple[str, ...]:
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value <= largest:
        return ()
    return (f"{name} must be a whole number from 0 to {largest}, got {value!r}",)


def _text(name: str, value: object) -> str | None:
    if not isinstance(value, str) or (name == "prompt_id" and not value):
        return f"{name} must be {'a non-empty string' if name == 'prompt_id' else 'a string'}, got {value!r}"
    return check_encodable(name, value)


def _json(metadata: Mapping[str, Any] | None) -> str | None:
    """One JSON object as text, as a row from Python would hold it. Raises UsageError for what JSON cannot say."""
    if metadata is None:
        return None
    try:
        text = object_line(metadata).decode()
        parse_object(text.encode())
    except ValueError as error:
        raise UsageError(f"metadata: {error}") from None
    return text


def _ids(token_ids: Sequence[int], model: ModelInfo, problems: list[str]) -> Int32Array:
    """int32 [P]; empty where something is wrong, which goes to `problems`."""
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # lists of several lengths
        ids = np.empty((0, 0))
    if ids.ndim == 1 and not ids.size:
        problems.append("prompt_token_ids is empty")
    elif ids.ndim != 1 or ids.dtype.kind not in "iu":
        problems.append("prompt_token_ids must be a list of whole numbers")
    elif problem := check_token_ids("prompt_token_ids", ids.tolist(), model.vocab_size):
        problems.append(problem)
    elif ids.size >= model.context_length:
        problems.append(f"the prompt fills the context: {ids.size} tokens of {model.context_length}; shorten it")
    else:
        return ids.astype(np.int32)
    return np.empty(0, np.int32)
