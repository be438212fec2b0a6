"""Rollouts as the rows of TRL's data sets, which is what reward functions are given, and rewards that are stored.

A row has the prompt, the fields of the prompt's row (`answer`, ...), which TRL hands to reward functions by name, and
the Rollout itself: every reward function may take `rollouts`, one a completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from rollgen.errors import DatasetError
from rollgen.inert import brief
from rollgen.loader.batch import Rollout
from rollgen.prompts.messages import Messages, stored_messages

RewardFunction = Callable[..., list[float | None]]

ROLLOUTS: Final = "rollouts"
"""The field of a row that is the Rollout."""
TAKEN: Final = frozenset(
    f"{ROLLOUTS} prompt prompts completion completions completion_ids image images environment environments tools "
    "trainer_state log_extra log_metric self".split()
)
"""Names that mean something to TRL or are arguments of its own. A field of such a name is not handed on: reward
functions find it in `rollouts[i].metadata`."""


def trl_rows(
    rollouts: Sequence[Rollout], decode: Callable[[Tensor], str], *, fields: frozenset[str], conversational: bool
) -> list[dict[str, Any]]:
    """A row for each, with the same `fields`, those of the dataset: None where a prompt's row had none of that name.

    TRL hands a batch to reward functions as messages or as text, by its first prompt. So that this does not depend on
    the order, `conversational` says whether all prompts of the dataset are messages; if not, `prompt_of` is text.
    """
    known = [fields_of(rollout.metadata, f"prompt {brief(rollout.prompt_id)}") for rollout in rollouts]
    names = sorted(fields.union(*known) - TAKEN)  # a subclass may have given them more
    return [
        {"prompt": prompt_of(rollout, decode, conversational=conversational), ROLLOUTS: rollout}
        | {name: own.get(name) for name in names}
        for rollout, own in zip(rollouts, known, strict=True)
    ]


def fields_of(metadata: str | None, place: str) -> dict[str, Any]:
    """The fields of a prompt's row, from the JSON text that is stored. Raises DatasetError, naming the place."""
    try:
        fields = json.loads(metadata or "{}")
    except (ValueError, RecursionError):
        fields = metadata
    if fields is None:
        return {}
    if not isinstance(fields, dict):
        raise DatasetError(f"{place}: its metadata is no JSON object; `rollgen verify` says where that is so")
    return fields


def prompt_of(rollout: Rollout, decode: Callable[[Tensor], str], *, conversational: bool) -> str | Messages:
    """The messages that were given, or the text; that of the ids where these, or messages among texts, were given."""
    messages = stored_messages(rollout.prompt)
    if messages is not None and conversational:
        return messages
    return decode(rollout.prompt_ids) if rollout.prompt is None or messages is not None else rollout.prompt


def stored_completions(rollouts: Sequence[Rollout], prompts: Sequence[object], trainer: object) -> dict[str, Any]:
    """With `rollouts` bound, a `rollout_func` of TRL, which takes them for its own; their prompts are `prompts`."""
    return {
        "prompt_ids": [rollout.prompt_ids.tolist() for rollout in rollouts],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
        "logprobs": [rollout.logprobs.tolist() for rollout in rollouts],
    }


def stored_reward(name: str) -> RewardFunction:
    """A reward function that returns a stored reward; None for completions that TRL sampled, which have none."""

    def reward(
        completions: Sequence[object], rollouts: Sequence[Rollout] | None = None, **_: object
    ) -> list[float | None]:
        if rollouts is None:
            return [None] * len(completions)
        return [rollout.rewards[name] for rollout in rollouts]

    reward.__name__ = name  # under which TRL logs it
    return reward
