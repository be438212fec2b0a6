"""`Answer`: a stored sample as a scoring function sees it, and what the function's results come to.

Light: the processes that score import this and the scorer's module, and neither torch nor Arrow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rollgen.errors import UsageError
from rollgen.inert import Discretion, brief
from rollgen.rollouts import LARGEST_REWARD, REWARD

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array


@dataclass(frozen=True, slots=True)
class Answer:
    """One stored sample with its prompt, as a scoring function gets it."""

    prompt_id: str
    sample_index: int
    generation: int
    """0, or which retry made it: with a larger max_tokens."""
    prompt: str | None
    """As given: raw text, or messages as JSON text; None when it was given as token ids."""
    text: str | None
    """`token_ids` decoded without special tokens; None when that was not done."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """What was sampled, the end-of-sequence token included."""
    finish_reason: str
    """`stop`, `length` (cut at max_tokens) or `repetition`."""
    stop_reason: str | None
    """What stopped it, as JSON text: `2` is a token id, `"2"` a stop string."""
    max_tokens: int
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other field of the prompt's row. The samples of a prompt may share it: do not change it."""


Result: TypeAlias = float | Mapping[str, float] | Exception
"""Of one answer: its reward; a mapping of numbers that has "reward"; or an exception that says why there is none."""
ScoringFunction: TypeAlias = Callable[[Sequence[Answer]], Sequence[Result]]


class StoredAnswer(NamedTuple):
    """A row on its way to a scoring function: cheap to send to another process, unlike lists of ids."""

    prompt_id: str
    prompt_index: int
    sample_index: int
    generation: int
    tokens_crc32: int
    prompt: str | None
    text: str | None
    prompt_token_ids: Int32Array
    token_ids: Int32Array
    finish_reason: str
    stop_reason: str | None
    max_tokens: int
    metadata: str | None
    """As stored: the text of a JSON object."""


class Score(NamedTuple):
    """What became of one answer."""

    values: dict[str, float] | None
    """With "reward", all finite and at most LARGEST_REWARD; None when it could not be scored."""
    error: str | None = None
    """Why not, on one line, fit to be stored in a dataset."""


def failed(reason: str) -> Score:
    """One that has no reward, and why."""
    return Score(None, discreet(reason))


def discreet(reason: str) -> str:
    """As it may be stored: on one line, brief, without what only this process knows, secrets of its environment now.

    Secrets go first: one that is cut in two is not found any more.
    """
    return brief(Discretion()(reason))


def told(error: BaseException) -> str:
    """Its type and what it says."""
    try:
        said = str(error)
    except Exception as another:  # noqa: BLE001  whoever wrote it may have made a mistake there too
        said = f"(what it says cannot be told: {type(another).__name__})"
    return f"{type(error).__name__}: {said}"


def as_answers(rows: Iterable[StoredAnswer]) -> list[Answer]:
    """What a scoring function gets. Metadata that several rows have is parsed once. Raises ValueError."""
    parsed: dict[str | None, dict[str, Any]] = {None: {}}
    for row in rows:
        if row.metadata is not None and row.metadata not in parsed:
            parsed[row.metadata] = json.loads(row.metadata)
    return [
        Answer(
            prompt_id=row.prompt_id,
            sample_index=row.sample_index,
            generation=row.generation,
            prompt=row.prompt,
            text=row.text,
            prompt_token_ids=row.prompt_token_ids.tolist(),
            token_ids=row.token_ids.tolist(),
            finish_reason=row.finish_reason,
            stop_reason=row.stop_reason,
            max_tokens=row.max_tokens,
            metadata=parsed[row.metadata],
        )
        for row in rows
    ]


def listed(results: object, count: int) -> object:
    """Results that have an order as a list, of one more than `count` at most, because they may have no end.

    Anything else as it is. Raises what a generator raises.
    """
    if isinstance(results, str | bytes | bytearray | Mapping | Set) or not isinstance(results, Iterable):
        return results
    return list(islice(results, count + 1))


def as_scores(results: object, count: int) -> list[Score]:
    """What a scoring function returned, `listed`, for `count` answers.

    Raises UsageError when that is not one for each: nothing is known of any answer then, and it is no answer's fault.
    """
    if not isinstance(results, list):
        raise UsageError(
            f"the function returned {_kind(results)}, not a list of results; it is given a list of answers"
        )
    if len(results) != count:
        many = f"more than {count}" if len(results) > count else str(len(results))
        raise UsageError(f"the function returned {many} results for {count} answers; it must return one for each")
    return [_as_score(result) for result in results]


def _as_score(result: object) -> Score:
    if isinstance(result, Exception):
        return failed(told(result))
    values: Mapping[Any, Any] = result if isinstance(result, Mapping) else {REWARD: result}
    if REWARD not in values:
        return failed(f'the function returned a mapping without "{REWARD}"')
    numbers = {}
    for name, value in values.items():
        if not isinstance(name, str):
            return failed(f"the function returned a mapping with {_kind(name)} as a name")
        number = value.item() if getattr(value, "shape", None) == () else value  # of NumPy, torch and their like
        if not isinstance(number, Real):
            return failed(f"the function returned {_kind(value)} for {name!r}, not a number")
        size: Any = abs(number)
        if not size < math.inf:
            return failed(f"the function returned {number} for {name!r}, not a finite number")
        if not size <= LARGEST_REWARD:  # also for whole numbers that are beyond float64
            return failed(f"the function returned a number for {name!r} that float32 cannot hold: beyond 3.4e38")
        numbers[str(name)] = float(number)
    return Score(numbers)


def _kind(value: object) -> str:
    """`None`, `a value of type str`."""
    return "None" if value is None else f"a value of type {type(value).__name__}"
