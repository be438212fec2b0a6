"""`retry-<generation>.parquet`: which samples a retry makes again, and how they are chosen.

A retry makes samples that were cut at max_tokens again with a larger one: the same prompt, sample_index and seed, so
the same random stream cut later, and no choice among draws. Their rows have the retry's generation, earlier rows stay
where they are, and readers hand out the highest generation of each sample. The list is frozen like the plan, which it
continues: rows of it that are not stored in its generation are owed. The schema is `schema.RETRY_SCHEMA`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollgen.errors import DatasetError
from rollgen.format.files import new_file
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import Manifest
from rollgen.format.parquet import has_columns, open_parquet, translated
from rollgen.format.reader import StoredShard, read_columns
from rollgen.format.schema import RETRY_SCHEMA, retry_file, shard_schema

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array, Int64Array

_FIX: Final = "put the file back from a copy: the shards are untouched"
_NUMBERS: Final = ("prompt_index", "sample_index", "generation", "max_tokens", "prompt_length")
OUTCOME_COLUMNS: Final = (*_NUMBERS, "finish_reason")
"""What `read_outcomes` reads."""


@dataclass(frozen=True, slots=True, eq=False)
class RetryList:
    """The samples of one retry, R rows in strictly rising order of (prompt_index, sample_index)."""

    generation: int
    """1, 2, ..."""
    prompt_index: Int64Array
    """int64 [R]"""
    sample_index: Int32Array
    """int32 [R]"""
    max_tokens: Int32Array
    """int32 [R], effective: what was asked for, or else what the context leaves after the prompt."""

    def __len__(self) -> int:
        return len(self.prompt_index)

    def numbers(self, sample_offsets: npt.NDArray[np.int64]) -> Int64Array:
        """int64 [R], rising: `sample_offsets[prompt_index] + sample_index`, as in `Plan.offsets`.

        Raises DatasetError when a row names a sample that is not planned.
        """
        planned = self.prompt_index < len(sample_offsets) - 1
        planned[planned] &= self.sample_index[planned] < np.diff(sample_offsets)[self.prompt_index[planned]]
        if not planned.all():
            row = int(planned.argmin())
            key = f"prompt {self.prompt_index[row]}, sample {self.sample_index[row]}"
            raise DatasetError(f"{retry_file(self.generation)}: row {row}: {key} is not in the plan; {_FIX}")
        numbers: Int64Array = sample_offsets[self.prompt_index] + self.sample_index
        return numbers

    def write(self, path: Path) -> None:
        """Write to exactly `path`, with page checksums; on disk on return."""
        columns = [pa.array(getattr(self, field.name), field.type) for field in RETRY_SCHEMA]
        with new_file(path) as file:
            pq.write_table(
                pa.Table.from_arrays(columns, schema=RETRY_SCHEMA),
                file,
                compression="zstd",
                use_dictionary=["max_tokens"],
                data_page_version="1.0",
                write_page_checksum=True,
            )
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path, generation: int) -> Self:
        """The list of a dataset's retry. Raises DatasetError when it is missing, damaged or not such a list."""
        path = directory / retry_file(generation)
        with translated(str(path), "damaged", _FIX), open_parquet(path) as file:
            if not has_columns(file.schema, RETRY_SCHEMA):
                raise DatasetError(f"{path}: not a list of retries: its columns are not those of format 1; {_FIX}")
            groups = [file.read(index, RETRY_SCHEMA.names) for index in range(len(file.groups))]
        table = pa.concat_tables([RETRY_SCHEMA.empty_table(), *groups])
        retries = cls(generation, *(column.to_numpy() for column in table.columns))
        if not retries._is_valid():
            raise DatasetError(f"{path}: keys do not rise, or a value is out of range; {_FIX}")
        return retries

    def _is_valid(self) -> bool:
        prompt, sample = self.prompt_index, self.sample_index
        same_prompt = prompt[1:] == prompt[:-1]
        rising = (prompt[1:] > prompt[:-1]) | (same_prompt & (sample[1:] > sample[:-1]))
        return bool(rising.all() and (prompt >= 0).all() and (sample >= 0).all() and (self.max_tokens >= 1).all())


def read_retries(directory: Path, manifest: Manifest) -> tuple[RetryList, ...]:
    """All lists of a dataset, oldest first. Raises DatasetError for one that is not as the manifest says."""
    lists = []
    for retry in manifest.retries:
        path = directory / retry_file(retry.generation)
        retries = RetryList.read(directory, retry.generation)
        if retry.sha256 is not None and file_sha256(path) != retry.sha256:
            raise DatasetError(f"{path}: not the file that the manifest vouches for: changed or damaged; {_FIX}")
        if len(retries) != retry.samples:
            raise DatasetError(f"{path}: {len(retries)} rows, the manifest says {retry.samples}; {_FIX}")
        lists.append(retries)
    return tuple(lists)


class Outcomes(NamedTuple):
    """How the stored samples ended: one entry a row, of all generations, in no order."""

    prompt_index: Int64Array
    sample_index: Int32Array
    generation: Int32Array
    cut: npt.NDArray[np.bool_]
    """Whether it was cut at max_tokens."""
    max_tokens: Int32Array
    prompt_length: Int32Array


def read_outcomes(shards: Iterable[StoredShard]) -> Outcomes:
    """Read these columns alone, 25 bytes a row in memory. Raises DatasetError for damage in one of them."""
    parts = [_outcomes(shard_schema(support_logprobs=False).empty_table())]
    for stored in shards:
        with stored.open() as shard:
            parts.append(_outcomes(read_columns(shard, OUTCOME_COLUMNS)))
    return Outcomes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _outcomes(table: pa.Table) -> Outcomes:
    cut = pc.equal(table["finish_reason"], "length").to_numpy()
    return Outcomes(cut=cut, **{name: table[name].to_numpy() for name in _NUMBERS})


class Selection(NamedTuple):
    """What a new retry would make again, and what it would not, though it was cut before `max_tokens`."""

    retries: RetryList
    context_full: int
    """Samples that cannot become longer: prompt and response fill the model's context."""
    pending: int
    """Samples that an earlier retry has yet to make: they are owed already, and how they end is not known."""


def select_retries(
    outcomes: Outcomes, earlier: Sequence[RetryList], *, max_tokens: int, context_length: int
) -> Selection:
    """The current samples that were cut at max_tokens and may become longer, as the list of the next generation.

    `earlier` are all lists of the dataset; `max_tokens` and `context_length` are in tokens. The cost is a sort of all
    rows. Asking twice is harmless: what the first time has listed is pending, and once it is made no longer too short.
    """
    listed = sum(map(len, earlier))
    rows = Outcomes(*map(np.concatenate, zip(*map(_as_outcomes, earlier), outcomes, strict=True)))
    order = np.lexsort((rows.generation, rows.sample_index, rows.prompt_index))  # stable: what is listed, then stored
    prompt, sample = rows.prompt_index[order], rows.sample_index[order]
    current = np.ones(len(order), np.bool_)
    current[:-1] = (prompt[1:] != prompt[:-1]) | (sample[1:] != sample[:-1])
    before, room = rows.max_tokens[order], context_length - rows.prompt_length[order]
    wanted = current & rows.cut[order] & (before < max_tokens)
    chosen = wanted & (before < room)
    retries = RetryList(
        len(earlier) + 1,
        prompt_index=prompt[chosen],
        sample_index=sample[chosen],
        max_tokens=np.minimum(room[chosen], max_tokens).astype(np.int32),
    )
    return Selection(retries, int((wanted & ~chosen).sum()), int((current & (order < listed)).sum()))


def _as_outcomes(retries: RetryList) -> Outcomes:
    """Rows that stand for those to come: in order they precede the stored ones of the same key, which so count."""
    nothing = np.zeros(len(retries), np.int32)
    return Outcomes(
        retries.prompt_index,
        retries.sample_index,
        generation=np.full(len(retries), retries.generation, np.int32),
        cut=nothing.astype(np.bool_),
        max_tokens=retries.max_tokens,
        prompt_length=nothing,
    )
