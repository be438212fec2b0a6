"""Arrow list columns as numpy values and offsets (CSR), with no Python object per token.

Works on what pyarrow hands out in practice: one chunk or many, slices (whose `.values` ignores the slice), `list` and
`large_list`, null lists. Where a column is one chunk of non-null values, `values` is a view of the Arrow buffer.
Measured on 57k tokens: 0.2 ms, where `to_pylist` takes 20 ms and a tensor per token 300 ms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


class Ragged(NamedTuple):
    """A list per row: row r is `values[offsets[r]:offsets[r + 1]]`. A null list is an empty range."""

    values: npt.NDArray[Any]
    """[K], read-only where it views an Arrow buffer."""
    offsets: npt.NDArray[np.int64]
    """int64 [N + 1], from 0 to K."""


class NestedRagged(NamedTuple):
    """A list of lists per row: row r holds the lists `row_offsets[r] .. row_offsets[r + 1] - 1` of `offsets`."""

    values: npt.NDArray[Any]
    """[K]"""
    offsets: npt.NDArray[np.int64]
    """int64 [T + 1], the inner lists in row-major order."""
    row_offsets: npt.NDArray[np.int64]
    """int64 [N + 1], from 0 to T."""


def ragged(column: pa.Array | pa.ChunkedArray) -> Ragged:
    """Decompose `list<number>`. No value inside a list may be null."""
    values, offsets = _unnest(column)
    return Ragged(values.to_numpy(), offsets)


def nested_ragged(column: pa.Array | pa.ChunkedArray) -> NestedRagged:
    """Decompose `list<list<number>>`. Inner lists may be null, numbers may not."""
    inner, row_offsets = _unnest(column)
    values, offsets = _unnest(inner)
    return NestedRagged(values.to_numpy(), offsets, row_offsets)


def _unnest(column: pa.Array | pa.ChunkedArray) -> tuple[pa.ChunkedArray, npt.NDArray[np.int64]]:
    """Take one list level off: the elements of all rows, and where each row starts."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    # flatten() respects slices and drops what null slots may hide, .values does neither.
    values = pa.chunked_array([chunk.flatten() for chunk in chunks], type=column.type.value_type)
    offsets = np.zeros(len(column) + 1, dtype=np.int64)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    np.cumsum(lengths, out=offsets[1:])
    return values, offsets
