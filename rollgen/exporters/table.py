"""A block as an Arrow table: the columns of the dataset, of the format's own types, with group, reward and advantage.

For exports that are tables. Numbers are views of the block's arrays. A support that is not truncated is null, as in the
dataset, never an empty list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollgen.errors import UsageError
from rollgen.exporters.records import Block
from rollgen.format.schema import shard_schema
from rollgen.loader.samples import RUN, SCALARS, VERSIONS, Samples, offsets_of

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

_SCHEMA: Final = shard_schema(support_logprobs=True, weight_versions=True, routed_experts=True, run=True)


def table_of(block: Block) -> pa.Table:
    """[B] rows, in the block's order.

    group              int64, from 0: the number of the prompt in the export
    reward, advantage  float64; only when a reward was named
    the others         as in the dataset; the optional columns where the block has them
    """
    samples = block.samples
    columns = {"group": pa.array(block.group), **_lists(samples)}
    names = [name for name in (*SCALARS, RUN) if name in samples.scalars]
    columns |= {name: pa.array(samples.scalars[name], _SCHEMA.field(name).type) for name in names}
    for name, values in (("reward", block.reward), ("advantage", block.advantage)):
        if values is not None:
            columns[name] = pa.array(values)
    return pa.table(columns)


def _lists(samples: Samples) -> dict[str, pa.Array]:
    """The columns of one list a row."""
    tokens = samples.token_ids.offsets
    columns = {
        "prompt_token_ids": _list("prompt_token_ids", *samples.prompt_ids),
        "token_ids": _list("token_ids", *samples.token_ids),
        "logprobs": _list("logprobs", samples.logprobs, tokens),
        "sampling_mask": _of_supports("sampling_mask", samples.mask_ids, samples),
    }
    if samples.support_logprobs is not None:
        columns["support_logprobs"] = _of_supports("support_logprobs", samples.support_logprobs, samples)
    if samples.experts is not None:
        columns["routed_experts"] = _list("routed_experts", *samples.experts.numbers)
    if VERSIONS in samples.scalars:
        spans = samples.scalars[VERSIONS].tolist()
        for name, values in ((VERSIONS, "versions"), ("weight_version_starts", "starts")):
            columns[name] = pa.array([list(getattr(each, values)) for each in spans], _SCHEMA.field(name).type)
    return columns


def _of_supports(name: str, values: npt.NDArray[Any], samples: Samples) -> pa.Array:
    """A list a token, null where it is not truncated, and of these a list a row."""
    kind = _SCHEMA.field(name).type
    untruncated = pa.array(samples.mask_lengths == 0)
    offsets = _offsets(offsets_of(samples.mask_lengths))
    supports = pa.ListArray.from_arrays(offsets, pa.array(values), type=kind.value_type, mask=untruncated)
    return pa.ListArray.from_arrays(_offsets(samples.token_ids.offsets), supports, type=kind)


def _list(name: str, values: npt.NDArray[Any], offsets: Int64Array) -> pa.Array:
    return pa.ListArray.from_arrays(_offsets(offsets), pa.array(values), type=_SCHEMA.field(name).type)


def _offsets(offsets: Int64Array) -> pa.Array:
    """int32, as the format's lists have them. Raises UsageError for a block, a huge group, of which they fall short."""
    if offsets[-1] >= 1 << 31:
        raise UsageError(
            f"the samples of one prompt hold {offsets[-1]:,} values of one column, and an Arrow list takes 2**31 - 1"
        )
    return pa.array(offsets.astype(np.int32))
