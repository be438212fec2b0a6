"""Row groups, decoded into `Samples`: read, verified and checked.

A row group is the unit of reading and of damage. `load_row_group` returns it as numpy arrays or raises; nothing that
would train on wrong numbers in silence passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.errors import DatasetError, MissingFile, Unreadable
from rollgen.format.ragged import NestedRagged, nested_ragged, ragged
from rollgen.format.reader import ShardReader, read_row_group
from rollgen.loader.samples import VERSIONS, Experts, Samples
from rollgen.rollouts import WeightVersions

_LISTS: Final = ("prompt_token_ids", "token_ids", "logprobs", "sampling_mask")
_CHECKED: Final = ("response_length", "temperature", "top_k", "top_p", "min_p")


def columns_of(scalars: Sequence[str], *, support_logprobs: bool = False, experts: bool = False) -> list[str]:
    """The columns that `load_row_group` reads for these."""
    names = [*_LISTS, *_CHECKED, *(name for name in scalars if name not in _CHECKED)]
    optional = {
        "support_logprobs": support_logprobs,
        "weight_version_starts": VERSIONS in scalars,
        "routed_experts": experts,
    }
    return names + [name for name, wanted in optional.items() if wanted]


def or_again(load: Callable[[], Samples], drop_copy: Callable[[], bool]) -> Samples:
    """`load()`, once more when the damage may have been that of a copy, which `drop_copy` forgets then."""
    try:
        return load()
    except (MissingFile, Unreadable):  # no damage
        raise
    except DatasetError:
        if not drop_copy():
            raise
        return load()


def load_row_group(
    shard: ShardReader,
    index: int,
    vocab_size: int,
    scalars: Sequence[str],
    *,
    support_logprobs: bool = False,
    experts: tuple[int, int] | None = None,
) -> Samples:
    """Read, verify and decode one row group with these scalar columns, and with the support_logprobs if asked for.

    VERSIONS is a scalar too: one WeightVersions a row. `experts` are those of so many layers, so many of each.
    Raises DatasetError, naming file and row group, for damage and for lists that do not align.
    """
    names = columns_of(scalars, support_logprobs=support_logprobs, experts=experts is not None)
    table = read_row_group(shard, index, names, use_threads=False)  # processes are the parallelism
    token_ids, logprobs = ragged(table["token_ids"]), ragged(table["logprobs"])
    mask = nested_ragged(table["sampling_mask"])
    aligned = [(token_ids.offsets, logprobs.offsets), (token_ids.offsets, mask.row_offsets)]
    support = nested_ragged(table["support_logprobs"]) if support_logprobs else None
    if support is not None:
        aligned.append((mask.offsets, support.offsets))
    if not all(np.array_equal(one, other) for one, other in aligned):
        raise DatasetError(f"{shard.place}: row group {index}: tokens, logprobs and masks differ in length")
    if problem := _find_problem(table, np.diff(token_ids.offsets), mask, vocab_size):
        raise DatasetError(f"{shard.place}: row group {index}: {problem}")
    prompt_ids = ragged(table["prompt_token_ids"])
    routed = None if experts is None else Experts(ragged(table["routed_experts"]), *experts)
    if routed is not None:
        positions = np.diff(prompt_ids.offsets) + np.diff(token_ids.offsets) - 1
        if not np.array_equal(np.diff(routed.numbers.offsets), positions * routed.layers * routed.top_k):
            raise DatasetError(f"{shard.place}: row group {index}: tokens and routed experts differ in length")
    return Samples(
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs.values,
        mask_ids=mask.values,
        mask_lengths=np.diff(mask.offsets).astype(np.int32),
        mask_offsets=mask.offsets[mask.row_offsets],
        support_logprobs=None if support is None else support.values,
        scalars={name: _versions(table) if name == VERSIONS else _values(table[name]) for name in scalars},
        vocab_size=vocab_size,
        experts=routed,
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


def _versions(table: pa.Table) -> npt.NDArray[np.object_]:
    """object [N]"""
    lists = (table[name].to_pylist() for name in (VERSIONS, "weight_version_starts"))
    told = (WeightVersions(tuple(versions), tuple(starts)) for versions, starts in zip(*lists, strict=True))
    return np.fromiter(told, np.object_, len(table))


def _values(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Numbers as they are, texts as objects."""
    return np.asarray(column.to_numpy())
