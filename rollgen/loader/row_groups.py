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
from rollgen.format.manifest import RoutedExperts
from rollgen.format.ragged import NestedRagged, nested_ragged, ragged
from rollgen.format.reader import ShardReader, read_row_group
from rollgen.format.schema import MAX_EXPERTS
from rollgen.loader.samples import VERSIONS, Experts, Samples
from rollgen.rollouts import TRUNCATING, WeightVersions, truncates

_LISTS: Final = ("prompt_token_ids", "token_ids", "logprobs", "sampling_mask")
_CHECKED: Final = ("response_length", "temperature", *TRUNCATING)


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
    experts: RoutedExperts | None = None,
) -> Samples:
    """Read, verify and decode one row group with these scalar columns, and with the support_logprobs if asked for.

    VERSIONS is a scalar too: one WeightVersions a row. `experts` says what those are that are wanted, as the manifest
    has it. Raises DatasetError, naming file and row group, for damage, for lists that do not align, and for numbers
    that nothing has.
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
    prompt_ids, lengths = ragged(table["prompt_token_ids"]), np.diff(token_ids.offsets)
    problem = _find_problem(table, lengths, mask, vocab_size)
    if problem is None and VERSIONS in scalars:
        problem = _find_version_problem(table, lengths)
    routed = None
    if experts is not None:
        routed = Experts(ragged(table["routed_experts"]), experts.layers, experts.top_k)
        problem = problem or _find_expert_problem(routed, np.diff(prompt_ids.offsets) + lengths - 1, experts)
    if problem is not None:
        raise DatasetError(f"{shard.place}: row group {index}: {problem}")
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
    truncated = truncates(*(table[name].to_numpy() for name in TRUNCATING))
    if not np.array_equal(np.diff(mask.offsets) == 0, np.repeat(~truncated, lengths)):
        return "a support is empty or null although its row truncates, or is listed although it does not"
    if mask.values.size and (mask.values.min() < 0 or mask.values.max() >= vocab_size):
        return f"a support id is outside the model's vocabulary of {vocab_size}"
    return None


def _find_version_problem(table: pa.Table, lengths: npt.NDArray[np.int64]) -> str | None:
    """What would give tokens to the wrong weights."""
    versions, (starts, offsets) = ragged(table[VERSIONS]), ragged(table["weight_version_starts"])
    first = offsets[:-1]
    if not np.array_equal(versions.offsets, offsets) or (np.diff(offsets) == 0).any():
        return "weight_versions and their starts differ in length, or are empty"
    if (versions.values == "").any():
        return "a weight version is empty"
    rises = np.append(True, starts[1:] > starts[:-1])
    rises[first] = starts[first] == 0  # the one before is of another row
    if not rises.all() or (starts[offsets[1:] - 1] >= lengths).any():
        return "the weight versions do not start at 0 and rise below the tokens"
    return None


def _find_expert_problem(routed: Experts, positions: npt.NDArray[np.int64], layout: RoutedExperts) -> str | None:
    """What would send tokens elsewhere; `positions` [N] are the tokens of each row that went through the model."""
    numbers, offsets = routed.numbers
    if not np.array_equal(np.diff(offsets), positions * layout.ids):
        return "tokens and routed experts differ in length"
    limit = layout.experts or MAX_EXPERTS
    if numbers.size and (numbers.min() < 0 or numbers.max() >= limit):
        return f"a number of an expert is not below {limit}, or negative"
    return None


def _versions(table: pa.Table) -> npt.NDArray[np.object_]:
    """object [N]"""
    lists = (table[name].to_pylist() for name in (VERSIONS, "weight_version_starts"))
    told = (WeightVersions(tuple(versions), tuple(starts)) for versions, starts in zip(*lists, strict=True))
    return np.fromiter(told, np.object_, len(table))


def _values(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Numbers as they are, texts as objects."""
    return np.asarray(column.to_numpy())
