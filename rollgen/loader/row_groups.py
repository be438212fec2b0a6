"""Row groups, decoded into `Samples`: read, verified and checked.

A row group is the unit of reading and of damage. `load_row_group` returns it as numpy arrays or raises; nothing that
would train on wrong numbers in silence passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.errors import DatasetError
from rollgen.format.ragged import NestedRagged, nested_ragged, ragged
from rollgen.format.reader import ShardReader, read_row_group
from rollgen.loader.samples import Samples

_LISTS: Final = ("prompt_token_ids", "token_ids", "logprobs", "sampling_mask")
_CHECKED: Final = ("response_length", "temperature", "top_k", "top_p", "min_p")


def load_row_group(
    shard: ShardReader, index: int, vocab_size: int, scalars: Sequence[str], *, support_logprobs: bool = False
) -> Samples:
    """Read, verify and decode one row group with these scalar columns, and with the support_logprobs if asked for.

    Raises DatasetError, naming file and row group, for damage and for lists that do not align.
    """
    names = [*_LISTS, *_CHECKED, *(name for name in scalars if name not in _CHECKED)]
    if support_logprobs:
        names.append("support_logprobs")
    table = read_row_group(shard, index, names, use_threads=False)  # processes are the parallelism
    token_ids, logprobs = ragged(table["token_ids"]), ragged(table["logprobs"])
    mask = nested_ragged(table["sampling_mask"])
    aligned = [(token_ids.offsets, logprobs.offsets), (token_ids.offsets, mask.row_offsets)]
    support = nested_ragged(table["support_logprobs"]) if support_logprobs else None
    if support is not None:
        aligned.append((mask.offsets, support.offsets))
    if not all(np.array_equal(one, other) for one, other in aligned):
        raise DatasetError(f"{shard.path}: row group {index}: tokens, logprobs and masks differ in length")
    if problem := _find_problem(table, np.diff(token_ids.offsets), mask, vocab_size):
        raise DatasetError(f"{shard.path}: row group {index}: {problem}")
    return Samples(
        prompt_ids=ragged(table["prompt_token_ids"]),
        token_ids=token_ids,
        logprobs=logprobs.values,
        mask_ids=mask.values,
        mask_lengths=np.diff(mask.offsets).astype(np.int32),
        mask_offsets=mask.offsets[mask.row_offsets],
        support_logprobs=None if support is None else support.values,
        scalars={name: _values(table[name]) for name in scalars},
        vocab_size=vocab_size,
        text_bytes=sum(table[name].nbytes for name in scalars if pa.types.is_string(table.schema.field(name).type)),
    )


def _find_problem(table: pa.Table, lengths: npt.NDArray[np.int64], mask: NestedRagged, vocab_size: int) -> str | None:
    """What would make a well-formed file train on wrong numbers in silence: the checks that cost next to nothing."""
    if not np.array_equal(table["response_length"].to_numpy(), lengths) or (lengths == 0).any():
        return "response_length is not the number of tokens, or is 0"
    if not (table["temperature"].to_numpy() > 0).all():
        return "a temperature is not above 0"
    truncates = (table["top_k"].to_numpy() > 0) | (table["top_p"].to_numpy() < 1) | (table["min_p"].to_numpy() > 0)
    if not np.array_equal(np.diff(mask.offsets) == 0, np.repeat(~truncates, lengths)):
        return "a support is empty or null although its row truncates, or is listed although it does not"
    if mask.values.size and (mask.values.min() < 0 or mask.values.max() >= vocab_size):
        return f"a support id is outside the model's vocabulary of {vocab_size}"
    return None


def _values(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Numbers as they are, texts as objects."""
    return np.asarray(column.to_numpy())
