"""Rows of a shard in plain Python, valid ones and what is wrong with others: slow and obvious, token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rollgen.format.invariants import SUM_TOLERANCE
from rollgen.format.schema import shard_schema
from rollgen.rollouts import FINISH_REASONS

Row = dict[str, Any]

VOCAB_SIZE = 100
INT32_MAX = 2**31 - 1
HALF = float(np.float32(math.log(0.5)))
NAN, INF = math.nan, math.inf

ROW: Row = {
    "prompt_id": "p",
    "sample_index": 0,
    "generation": 0,
    "prompt_index": 0,
    "prompt_length": 2,
    "response_length": 3,
    "prompt_token_ids": [1, 99],
    "token_ids": [7, 30, 99],
    "logprobs": [HALF, 0.0, HALF],
    "sampling_mask": [[7, 8], [30], [98, 99]],
    "finish_reason": "stop",
    "stop_reason": None,
    "temperature": 0.75,
    "top_p": 0.875,
    "min_p": 0.0,
    "top_k": 8,
    "max_tokens": 3,
    "seed": 0,
    "replayable": True,
    "text": None,
    "prompt": None,
    "metadata": None,
}
"""Three tokens with supports {7, 8}, {30} and {98, 99}, of a vocabulary that ends at 99, as many as max_tokens."""
FULL: Row = ROW | {
    "response_length": 2,
    "token_ids": [0, 99],
    "logprobs": [-1.0, 0.0],
    "sampling_mask": [None, None],
    "top_p": 1.0,
    "top_k": 0,
}
"""Nothing truncates."""
SINGLE: Row = ROW | {
    "response_length": 1,
    "token_ids": [5],
    "logprobs": [0.0],
    "sampling_mask": [[5]],
    "prompt_token_ids": [],
    "prompt_length": 0,
}
"""One token whose support is one id."""
SUPPORTED: Row = ROW | {"support_logprobs": [[HALF, HALF], [0.0], [HALF, HALF]]}


def supported(row: Row) -> Row:
    """With support logprobs, made up for rows of the above."""
    mass = [None if ids is None else [0.0] if len(ids) == 1 else [HALF, HALF] for ids in row["sampling_mask"]]
    return row if "support_logprobs" in row else row | {"support_logprobs": mass}


def table_of(rows: list[Row], *, support_logprobs: bool = False) -> pa.Table:
    return pa.Table.from_pylist(rows, shard_schema(support_logprobs=support_logprobs))


def a_chunk_a_row(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(row, 1) for row in range(len(table))])


def sliced(table: pa.Table) -> pa.Table:
    """A view of the middle of a larger one, whose ends are cut off inside the same buffers."""
    return pa.concat_tables([table, table, table]).combine_chunks().slice(len(table), len(table))


def with_empty_chunks(table: pa.Table) -> pa.Table:
    none = table.slice(0, 0)
    return pa.concat_tables([none, table.slice(0, 1), none, table.slice(1), none])


LAYOUTS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "one chunk": lambda table: table,
    "a chunk a row": a_chunk_a_row,
    "sliced": sliced,
    "empty chunks": with_empty_chunks,
}


def is_json_object(text: str | None) -> bool:
    try:
        return text is None or isinstance(json.loads(text), dict)
    except ValueError:
        return False


HOLDS: dict[str, Callable[[Any], bool]] = {
    "sample_index": lambda value: value >= 0,
    "generation": lambda value: value >= 0,
    "prompt_index": lambda value: value >= 0,
    "temperature": lambda value: 0 < value < INF,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "top_k": lambda value: value >= 0,
    "max_tokens": lambda value: value >= 1,
    "seed": lambda value: value >= 0,
    "finish_reason": lambda value: value in FINISH_REASONS,
    "metadata": is_json_object,
}


def is_logprob(value: float) -> bool:
    return -INF < value <= 0


def shape(lists: list[list[Any] | None]) -> list[int | None]:
    return [None if inner is None else len(inner) for inner in lists]


def plain_problems(row: Row, vocab_size: int) -> Iterator[tuple[str, str, int | None]]:
    """Kind, check and token of all that is wrong with one row, by the words of the specification."""
    for name, holds in HOLDS.items():
        if not holds(row[name]):
            yield "sampling", name, None
    tokens, prompt = row["token_ids"], row["prompt_token_ids"]
    counts = {
        "prompt": row["prompt_length"] == len(prompt),
        "response": row["response_length"] == len(tokens),
        "none": bool(tokens),
        "max": len(tokens) <= row["max_tokens"],
    }
    parallel = {
        "logprobs": len(row["logprobs"]) == len(tokens),
        "mask": len(row["sampling_mask"]) == len(tokens),
        "supports": shape(row.get("support_logprobs", row["sampling_mask"])) == shape(row["sampling_mask"]),
    }
    yield from (("lengths", name, None) for name, right in (counts | parallel).items() if not right)
    if all(parallel.values()):
        yield from (("ids", "prompt", None) for token in prompt if not 0 <= token < vocab_size)
        for place in range(len(tokens)):
            yield from ((kind, check, place) for kind, check in plain_token_problems(row, place, vocab_size))


def plain_token_problems(row: Row, place: int, vocab_size: int) -> Iterator[tuple[str, str]]:
    token, logprob, support = (row[name][place] for name in ("token_ids", "logprobs", "sampling_mask"))
    truncates = row["top_k"] > 0 or row["top_p"] < 1 or row["min_p"] > 0
    if not 0 <= token < vocab_size:
        yield "ids", "token"
    if not is_logprob(logprob):
        yield "logprobs", "range"
    elif support is not None and len(support) == 1 and logprob != 0:
        yield "logprobs", "singleton"
    if (support is None) == truncates:
        yield "support", "null" if support is None else "listed"
    if support == []:
        yield "support", "empty"
    if not support:
        return
    if not all(0 <= member < vocab_size for member in support):
        yield "support", "range"
    if support != sorted(set(support)):
        yield "support", "order"
    if token not in support:
        yield "support", "inside"
    if "support_logprobs" in row:
        yield from plain_support_problems(token, logprob, support, row["support_logprobs"][place])


def plain_support_problems(
    token: int, logprob: float, support: list[int], stored: list[float]
) -> Iterator[tuple[str, str]]:
    if not all(map(is_logprob, stored)):
        yield "logprobs", "stored range"
        return
    if abs(sum(map(math.exp, stored)) - 1) > SUM_TOLERANCE:
        yield "logprobs", "mass"
    if is_logprob(logprob) and any(
        member == token and other != logprob for member, other in zip(support, stored, strict=True)
    ):
        yield "logprobs", "sampled"


def oracle(rows: list[Row], vocab_size: int) -> list[tuple[str, int, int | None, int]]:
    """Each check that fails: its kind, first place and count, sorted as texts."""
    places: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    for number, row in enumerate(rows):
        for kind, check, token in plain_problems(row, vocab_size):
            places.setdefault((kind, check), []).append((number, token))
    return sorted(((kind, *where[0], len(where)) for (kind, _), where in places.items()), key=str)
