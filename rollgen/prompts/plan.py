"""`plan.parquet`: the frozen result of planning, one row per prompt row, in input order.

What is to be generated is read from here and nowhere else: by the generation loop, by resume ("what is owed") and by
verify. The schema is `format.schema.PLAN_SCHEMA`. Row `prompt_index` is row number `prompt_index` of the file. A
tombstone (a bad row that was skipped) has `error` set and no token ids; it keeps its place and its n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.files import new_file
from rollgen.format.parquet import CheckedParquet, has_columns, open_parquet, translated
from rollgen.format.schema import PLAN_SCHEMA, TOKEN_LIST
from rollgen.rollouts import Prompt, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from rollgen.rollouts import Int64Array

_SAMPLING_COLUMNS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids")
_REPEATING_COLUMNS = ["n", "seed", "temperature", "top_p", "min_p", "top_k", "max_tokens"]
_FIX = "--resume with the very command of the last start makes it again; else restore it from a copy"


class PlanWriter:
    """Writes a plan row group by row group to exactly `path`. Use as a context manager.

    Page checksums are written, and verified by `Plan`. Left by an exception, the file has no valid content.
    """

    def __init__(self, path: Path) -> None:
        new_file(path).close()  # what pyarrow opens next
        self._writer = pq.ParquetWriter(
            path,
            PLAN_SCHEMA,
            compression="zstd",
            use_dictionary=_REPEATING_COLUMNS,
            data_page_version="1.0",
            write_page_checksum=True,
            write_statistics=["prompt_index"],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()

    def write(self, prompts: Sequence[Prompt]) -> None:
        """Write `prompts`, the next rows of the plan, as one row group."""
        self._writer.write_batch(_to_batch(prompts), row_group_size=len(prompts))


class Plan:
    """A plan on disk. Holds 13 bytes a prompt; rows are read on demand, one row group at a time.

    Raises DatasetError, on creation or while reading, when the file is missing, damaged or not a plan.
    """

    n: npt.NDArray[np.int32]
    """int32 [prompts]: samples planned of each prompt, tombstones included."""
    tombstone: npt.NDArray[np.bool_]
    """bool [prompts]: rows of which no sample can be made."""
    offsets: Int64Array
    """int64 [prompts + 1]: sample k of prompt i is number `offsets[i] + k` of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _open(path) as file:
            groups = range(len(file.groups))
            batches = [_read_group(path, file, group, ["prompt_index", "n", "error"]) for group in groups]
        if not any(batch.num_rows for batch in batches):
            raise DatasetError(f"{path}: not a valid plan: it has no rows; {_FIX}")
        indices, self.n = (_concatenate(batches, name) for name in ("prompt_index", "n"))
        self.tombstone = _concatenate(batches, "error", pa.Array.is_valid)
        if not np.array_equal(indices, np.arange(indices.size)) or (self.n < 1).any():
            raise DatasetError(f"{path}: not a valid plan: prompt_index must count from 0 and n be at least 1; {_FIX}")
        self.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.n, dtype=np.int64)])

    @property
    def prompts(self) -> int:
        """Rows, tombstones included."""
        return self.n.size

    @property
    def samples(self) -> int:
        """Samples planned, those of tombstones included."""
        return int(self.offsets[-1])

    def __iter__(self) -> Iterator[Prompt]:
        return self.rows()

    def rows(self, start: int = 0) -> Iterator[Prompt]:
        """The prompts from number `start` on, in order."""
        first = 0
        with _open(self.path) as file:
            for group, rows in enumerate(file.row_counts):
                if first + rows > start:
                    batch = _read_group(self.path, file, group)
                    yield from _to_prompts(batch.slice(max(start - first, 0)))
                first += rows

    def prompt_ids(self, indices: npt.NDArray[np.int64]) -> pa.Array:
        """large_string [N], the ids of the prompts with these numbers; reads only the row groups that hold them."""
        needed, places = np.unique(indices, return_inverse=True)
        ids, first = [pa.array([], pa.large_string())], 0
        with _open(self.path) as file:
            for group, rows in enumerate(file.row_counts):
                start, end = np.searchsorted(needed, [first, first + rows])
                if start != end:
                    column = _read_group(self.path, file, group, ["prompt_id"]).column("prompt_id")
                    ids.append(column.take(pa.array(needed[start:end] - first)).cast(pa.large_string()))
                first += rows
        return pa.concat_arrays(ids).take(pa.array(places))

    def group_starts(self) -> npt.NDArray[np.int64]:
        """int64 [row groups + 1]: the number of the first prompt of each, and that of all prompts."""
        with _open(self.path) as file:
            return np.concatenate([np.zeros(1, np.int64), np.cumsum(file.row_counts, dtype=np.int64)])

    def group(self, number: int) -> pa.Table:
        """One row group."""
        with _open(self.path) as file:
            return pa.Table.from_batches([_read_group(self.path, file, number)])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The row groups, as they are."""
        with _open(self.path) as file:
            for group in range(len(file.groups)):
                yield _read_group(self.path, file, group)


def check_growth(stored: Plan, new: Plan) -> None:
    """Raise ResumeRefused unless `new` extends `stored`: the same rows first, n never smaller, more rows only after.

    Compares column by column in batches, so a million rows take about a second and little memory.
    """
    if new.prompts < stored.prompts:
        raise ResumeRefused(
            f"prompts: the run was planned with {stored.prompts} prompts, now there are {new.prompts}; "
            "give the same files and at least the same --limit, or write to another --out"
        )
    for start, before, after in _aligned(stored, new):
        for name in PLAN_SCHEMA.names:
            if name != "n" and not _same(name, before.column(name), after.column(name)):
                _refuse_change(name, start, before, after)
    smaller = np.flatnonzero(new.n[: stored.prompts] < stored.n)
    if smaller.size:
        index = int(smaller[0])
        raise ResumeRefused(
            f"n: prompt {next(stored.rows(index)).prompt_id!r} (row {index} of the plan) was planned with "
            f"{stored.n[index]} samples, now with {new.n[index]}; give at least as many, or write to another --out"
        )


def _aligned(stored: Plan, new: Plan) -> Iterator[tuple[int, pa.RecordBatch, pa.RecordBatch]]:
    """(first row, rows of `stored`, the same rows of `new`) over all of `stored`; row groups may be cut differently."""
    befores, afters = stored.batches(), new.batches()
    before = after = pa.RecordBatch.from_pylist([], schema=PLAN_SCHEMA)
    start = 0
    while start < stored.prompts:
        before = before if before.num_rows else next(befores)
        after = after if after.num_rows else next(afters)
        rows = min(before.num_rows, after.num_rows)
        yield start, before.slice(0, rows), after.slice(0, rows)
        before, after, start = before.slice(rows), after.slice(rows), start + rows


def _same(name: str, old: pa.Array, new: pa.Array) -> bool:
    """Whether a planned column is unchanged. The text of an error names a file and line, which may move."""
    return bool(old.is_null().equals(new.is_null()) if name == "error" else old.equals(new))


def _refuse_change(name: str, start: int, before: pa.RecordBatch, after: pa.RecordBatch) -> NoReturn:
    old, new = before.column(name), after.column(name)
    row = next(row for row in range(len(old)) if not _same(name, old.slice(row, 1), new.slice(row, 1)))
    raise ResumeRefused(
        f"prompts: row {start + row} of the plan (id {before.column('prompt_id')[row].as_py()!r}) has another {name} "
        "now; keep the planned rows as they are, in order, and add new ones after them, or write to another --out"
    )


def _open(path: Path) -> CheckedParquet:
    """A checked handle: Parquet, with the columns of a plan. Others, of a later MINOR, are left alone."""
    with translated(str(path), "not readable as Parquet", _FIX):
        file = open_parquet(path)
    if not has_columns(file.schema, PLAN_SCHEMA):
        file.close()
        raise DatasetError(f"{path}: not a plan: its columns are not those of format 1; {_FIX}")
    return file


def _read_group(
    path: Path, file: CheckedParquet, group: int, columns: Sequence[str] = PLAN_SCHEMA.names
) -> pa.RecordBatch:
    with translated(f"{path}: row group {group}", "damaged", _FIX):
        table = file.read(group, columns)
    return pa.record_batch([column.combine_chunks() for column in table.columns], schema=table.schema)


def _concatenate(
    batches: Sequence[pa.RecordBatch], name: str, convert: Callable[[pa.Array], pa.Array] = lambda column: column
) -> npt.NDArray[Any]:
    """One column of all batches as numpy, each first put through `convert`."""
    return np.concatenate([convert(batch.column(name)).to_numpy(zero_copy_only=False) for batch in batches])


def _to_batch(prompts: Sequence[Prompt]) -> pa.RecordBatch:
    lengths = [prompt.token_ids.size for prompt in prompts]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    token_ids = pa.array(np.concatenate([prompt.token_ids for prompt in prompts]), pa.int32())
    arrays = []
    for field in PLAN_SCHEMA:
        if field.name == "prompt_token_ids":
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), token_ids, type=TOKEN_LIST))
        elif field.name in _SAMPLING_COLUMNS:
            arrays.append(pa.array([getattr(prompt.sampling, field.name) for prompt in prompts], field.type))
        else:
            arrays.append(pa.array([getattr(prompt, field.name) for prompt in prompts], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=PLAN_SCHEMA)


def _to_prompts(batch: pa.RecordBatch) -> Iterator[Prompt]:
    """The prompts of a batch; their token ids are read-only views of it."""
    token_lists = batch.column("prompt_token_ids")
    offsets, token_ids = token_lists.offsets.to_numpy(), token_lists.values.to_numpy()
    columns = {name: batch.column(name).to_pylist() for name in PLAN_SCHEMA.names if name != "prompt_token_ids"}
    for row in range(batch.num_rows):
        values = {name: column[row] for name, column in columns.items()}
        sampling: dict[str, Any] = {name: values.pop(name) for name in _SAMPLING_COLUMNS}
        sampling |= {"stop": tuple(sampling["stop"]), "stop_token_ids": tuple(sampling["stop_token_ids"])}
        yield Prompt(token_ids=token_ids[offsets[row] : offsets[row + 1]], sampling=Sampling(**sampling), **values)
