"""Completions to one Arrow table of format v1: concatenated numpy arrays wrapped as lists, no loop over tokens.

And how many rows make a row group: one rule for rows that are new and for rows that are stored already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.format.ragged import nested_ragged, ragged
from rollgen.format.schema import (
    EXPERT_LIST,
    LOGPROB_LIST,
    MASK_LIST,
    ROW_GROUP_TOKENS,
    START_LIST,
    SUPPORT_LOGPROB_LIST,
    TOKEN_LIST,
    VERSION_LIST,
)
from rollgen.rollouts import TEXTS, Completion, WeightVersions, expert_ids, text_length

MAX_ROW_GROUP_IDS = 1 << 26
"""Mask ids after which a row group is closed too, far below the 2^31 - 1 that list offsets can address."""
MAX_ROW_GROUP_CHARACTERS = 1 << 26
"""Of texts, after which it is closed as well: prompts of a megabyte with answers of one token fill no row group."""
MAX_ROW_GROUP_EXPERT_IDS = 1 << 26
"""And numbers of experts, which prompts have too."""
MAX_ROW_GROUP_PROMPT_TOKENS = 1 << 26
"""And of prompts, which answers of a few tokens may share, but each row stores."""


class RowSize(NamedTuple):
    """What a row adds to its row group."""

    tokens: int = 0
    """Generated ones."""
    ids: int = 0
    """Over all its supports."""
    characters: int = 0
    """Of its texts."""
    expert_ids: int = 0
    prompt_tokens: int = 0


class RowGroupFilling:
    """How full a row group is, and after it the next one, while a shard is made row by row."""

    def __init__(self) -> None:
        self._tokens = self._ids = self._characters = self._expert_ids = self._prompt_tokens = 0

    def is_closed_by(self, row: RowSize) -> bool:
        """Count the next row. True if it fills the row group: the one after it begins another."""
        self._tokens += row.tokens
        self._ids += row.ids
        self._characters += row.characters
        self._expert_ids += row.expert_ids
        self._prompt_tokens += row.prompt_tokens
        closed = (
            self._tokens >= ROW_GROUP_TOKENS
            or self._ids >= MAX_ROW_GROUP_IDS
            or self._characters >= MAX_ROW_GROUP_CHARACTERS
            or self._expert_ids >= MAX_ROW_GROUP_EXPERT_IDS
            or self._prompt_tokens >= MAX_ROW_GROUP_PROMPT_TOKENS
        )
        if closed:
            self._tokens = self._ids = self._characters = self._expert_ids = self._prompt_tokens = 0
        return closed


def stored_sizes(table: pa.Table) -> Iterator[RowSize]:
    """Of each row of a table with all columns."""
    masks = nested_ragged(table["sampling_mask"])
    ids = np.diff(masks.offsets[masks.row_offsets])
    texts = [pc.fill_null(pc.utf8_length(table[name]), 0).to_numpy() for name in TEXTS]
    if "weight_versions" in table.column_names:
        texts.append(_characters_of_lists(table["weight_versions"]))
    characters = np.sum(texts, axis=0, dtype=np.int64)
    experts = np.zeros(len(table), np.int64)
    if "routed_experts" in table.column_names:
        experts = pc.list_value_length(table["routed_experts"]).to_numpy()
    tokens, prompt_tokens = (table[name].to_numpy() for name in ("response_length", "prompt_length"))
    columns = (tokens, ids, characters, experts, prompt_tokens)
    return map(RowSize._make, zip(*(column.tolist() for column in columns), strict=True))


def _characters_of_lists(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """int64 [N], of all texts of each row."""
    texts, offsets = ragged(column)
    totals = np.append(0, np.cumsum([len(text) for text in texts], dtype=np.int64))
    characters: npt.NDArray[np.int64] = totals[offsets[1:]] - totals[offsets[:-1]]
    return characters


def split_row_groups(completions: Sequence[Completion]) -> Iterator[Sequence[Completion]]:
    """Consecutive runs of completions, each closed once it holds about ROW_GROUP_TOKENS generated tokens."""
    filling, start = RowGroupFilling(), 0
    for position, completion in enumerate(completions, 1):
        size = RowSize(
            tokens=len(completion.token_ids),
            ids=len(completion.mask_ids),
            characters=text_length(completion),
            expert_ids=expert_ids(completion),
            prompt_tokens=len(completion.prompt_token_ids),
        )
        if filling.is_closed_by(size):
            yield completions[start:position]
            start = position
    if start < len(completions):
        yield completions[start:]


def build_table(completions: Sequence[Completion], schema: pa.Schema) -> pa.Table:
    """One row a completion, in the order given. `schema` is `schema.shard_schema(...)`."""
    builders = _Columns(completions)
    return pa.Table.from_arrays([getattr(builders, name)() for name in schema.names], schema=schema)


class _Columns:
    """One method a column, named like it."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._rows = completions
        self._response_lengths = np.fromiter((len(c.token_ids) for c in completions), np.int32, len(completions))
        self._prompt_lengths = np.fromiter((len(c.prompt_token_ids) for c in completions), np.int32, len(completions))

    def _strings(self, values: Iterable[str | None]) -> pa.Array:
        return pa.array(values, pa.string(), size=len(self._rows))

    def _numbers(self, values: Iterable[Any], dtype: npt.DTypeLike) -> pa.Array:
        return pa.array(np.fromiter(values, dtype, len(self._rows)))

    def _masked_lists(self, values: npt.NDArray[Any], kind: pa.ListType) -> pa.Array:
        """CSR over tokens, lists of them over rows; an empty support becomes a null (the full vocabulary)."""
        sizes = np.concatenate([np.diff(c.mask_offsets) for c in self._rows])
        null = sizes == 0
        inner = pa.ListArray.from_arrays(
            pa.array(_offsets(sizes)), pa.array(values), kind.value_type, mask=pa.array(null) if null.any() else None
        )
        return pa.ListArray.from_arrays(pa.array(_offsets(self._response_lengths)), inner, kind)

    def run(self) -> pa.Array:
        return self._strings(c.run for c in self._rows)

    def prompt_id(self) -> pa.Array:
        return self._strings(c.prompt_id for c in self._rows)

    def sample_index(self) -> pa.Array:
        return self._numbers((c.sample_index for c in self._rows), np.int32)

    def generation(self) -> pa.Array:
        return self._numbers((c.generation for c in self._rows), np.int32)

    def prompt_index(self) -> pa.Array:
        return self._numbers((c.prompt_index for c in self._rows), np.int64)

    def prompt_length(self) -> pa.Array:
        return pa.array(self._prompt_lengths)

    def response_length(self) -> pa.Array:
        return pa.array(self._response_lengths)

    def prompt_token_ids(self) -> pa.Array:
        return _lists(self._prompt_lengths, np.concatenate([c.prompt_token_ids for c in self._rows]), TOKEN_LIST)

    def token_ids(self) -> pa.Array:
        return _lists(self._response_lengths, np.concatenate([c.token_ids for c in self._rows]), TOKEN_LIST)

    def logprobs(self) -> pa.Array:
        return _lists(self._response_lengths, np.concatenate([c.logprobs for c in self._rows]), LOGPROB_LIST)

    def sampling_mask(self) -> pa.Array:
        return self._masked_lists(np.concatenate([c.mask_ids for c in self._rows]), MASK_LIST)

    def support_logprobs(self) -> pa.Array:
        none = np.empty(0, np.float32)  # of an untruncated completion
        values = [none if c.support_logprobs is None else c.support_logprobs for c in self._rows]
        return self._masked_lists(np.concatenate(values), SUPPORT_LOGPROB_LIST)

    def weight_versions(self) -> pa.Array:
        versions = [told.versions for told in self._told()]
        return _lists(_sizes(versions), list(chain.from_iterable(versions)), VERSION_LIST)

    def weight_version_starts(self) -> pa.Array:
        starts = [told.starts for told in self._told()]
        return _lists(_sizes(starts), np.fromiter(chain.from_iterable(starts), np.int32), START_LIST)

    def _told(self) -> Iterator[WeightVersions]:
        for completion in self._rows:
            assert completion.weight_versions is not None  # of a dataset that stores them
            yield completion.weight_versions

    def routed_experts(self) -> pa.Array:
        flat = [c.routed_experts.reshape(-1) for c in self._rows if c.routed_experts is not None]
        return _lists(_sizes(flat), np.concatenate(flat), EXPERT_LIST)

    def finish_reason(self) -> pa.Array:
        return self._strings(c.finish_reason for c in self._rows)

    def stop_reason(self) -> pa.Array:
        return self._strings(c.stop_reason for c in self._rows)

    def temperature(self) -> pa.Array:
        return self._numbers((c.sampling.temperature for c in self._rows), np.float32)

    def top_p(self) -> pa.Array:
        return self._numbers((c.sampling.top_p for c in self._rows), np.float32)

    def min_p(self) -> pa.Array:
        return self._numbers((c.sampling.min_p for c in self._rows), np.float32)

    def top_k(self) -> pa.Array:
        return self._numbers((c.sampling.top_k for c in self._rows), np.int32)

    def max_tokens(self) -> pa.Array:
        return self._numbers((c.sampling.max_tokens for c in self._rows), np.int32)

    def seed(self) -> pa.Array:
        return self._numbers((c.seed for c in self._rows), np.int64)

    def replayable(self) -> pa.Array:
        return self._numbers((c.replayable for c in self._rows), np.bool_)

    def text(self) -> pa.Array:
        return self._strings(c.text for c in self._rows)

    def prompt(self) -> pa.Array:
        return self._strings(c.prompt for c in self._rows)

    def metadata(self) -> pa.Array:
        return self._strings(c.metadata for c in self._rows)


def _lists(lengths: npt.NDArray[np.int32], values: Any, kind: pa.ListType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(_offsets(lengths)), pa.array(values, kind.value_type), kind)


def _sizes(lists: Sequence[Sized]) -> npt.NDArray[np.int32]:
    return np.fromiter(map(len, lists), np.int32, len(lists))


def _offsets(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
