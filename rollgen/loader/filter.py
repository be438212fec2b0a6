"""Which rows a pyarrow expression keeps, and which columns it cannot be evaluated without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.errors import UsageError
from rollgen.format.reader import StoredDataset
from rollgen.format.schema import shard_schema


def columns_of_filter(filter: pc.Expression | None, datasets: Sequence[StoredDataset]) -> list[str]:
    """The columns that an expression reads: those it cannot be evaluated without."""
    if filter is None:
        return []
    if _names_a_place(filter):
        raise UsageError(f"filter: {filter} names a column by its place: places differ between datasets; use its name")
    columns = [dataset.manifest.optional_columns for dataset in datasets]
    stored = {name: all(each[name] for each in columns) for name in columns[0]}
    nothing = shard_schema(**stored).empty_table()
    try:
        nothing.filter(filter)
    except (pa.ArrowException, TypeError) as error:
        reason, unknown, _ = _one_line(error).partition(f" in {nothing.column_names[0]}: ")  # then Arrow's whole schema
        there = f"; there are: {', '.join(nothing.column_names)}" if unknown else ""
        raise UsageError(f"filter: {filter} cannot be evaluated on the columns of a dataset: {reason}{there}") from None
    return [name for name in nothing.column_names if not _can_filter(nothing.drop_columns([name]), filter)]


def passing(table: pa.Table, filter: pc.Expression) -> npt.NDArray[np.bool_]:
    """bool [rows]: which rows the filter keeps. Raises UsageError when it fails on a value."""
    passing = np.zeros(len(table), np.bool_)
    numbered = table.append_column("__row", pa.array(np.arange(len(table))))
    try:
        passing[numbered.filter(filter)["__row"].to_numpy()] = True
    except pa.ArrowException as error:
        raise UsageError(f"filter: {filter} fails on a value: {_one_line(error)}") from None
    return passing


def _names_a_place(filter: pc.Expression) -> bool:
    """Whether a column is named by its number. A text that looks like one does not count: it can be serialised."""
    if "FieldPath(" not in str(filter):
        return False
    try:
        filter.__reduce__()
    except pa.ArrowNotImplementedError:
        return True
    return False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _can_filter(table: pa.Table, filter: pc.Expression) -> bool:
    try:
        table.filter(filter)
    except pa.ArrowException:
        return False
    return True
