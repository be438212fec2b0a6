"""What engines told of their weights and experts, row by row, against `schema/SPEC.md`, section 2.4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollgen.format.ragged import ragged
from rollgen.format.schema import MAX_EXPERTS
from rollgen.verify.rows import Violation

if TYPE_CHECKING:
    import numpy.typing as npt

    from rollgen.format.manifest import Manifest, RoutedExperts
    from rollgen.rollouts import Int64Array

    Bools = npt.NDArray[np.bool_]


def check_extras(table: pa.Table, manifest: Manifest) -> Iterator[Violation]:
    """All violations in a table of format v1, as far as it has these columns."""
    if "weight_versions" in table.column_names:
        yield from _check_versions(table)
    if "routed_experts" in table.column_names and manifest.routed_experts is not None:
        yield from _check_experts(table, manifest.routed_experts)


def _check_versions(table: pa.Table) -> Iterator[Violation]:
    (versions, offsets), (starts, start_offsets) = (
        ragged(table[name]) for name in ("weight_versions", "weight_version_starts")
    )
    differ = np.diff(offsets) != np.diff(start_offsets)
    if differ.any():
        yield Violation.of_rows("lengths", differ, "weight_version_starts has another length than weight_versions")
    bad = _rows_with(versions == "", offsets)
    if bad.any():
        yield Violation.of_rows("extras", bad, "a weight version is empty")
    tokens = table["response_length"].to_numpy()
    bad = np.diff(start_offsets) == 0
    first = start_offsets[:-1][~bad]
    bad[~bad] = starts[first] != 0
    bad |= _rows_with(starts >= np.repeat(tokens, np.diff(start_offsets)), start_offsets)
    falling = np.append(False, starts[1:] <= starts[:-1])
    falling[first] = False  # of another row than the one before
    bad |= _rows_with(falling, start_offsets)
    if bad.any():
        yield Violation.of_rows("extras", bad, "the weight versions do not start at 0 and rise below the tokens")


def _check_experts(table: pa.Table, layout: RoutedExperts) -> Iterator[Violation]:
    numbers, offsets = ragged(table["routed_experts"])
    positions = pc.list_value_length(table["prompt_token_ids"]).to_numpy().astype(np.int64)
    positions += pc.list_value_length(table["token_ids"]).to_numpy() - 1
    differ = np.diff(offsets) != positions * layout.ids
    if differ.any():
        problem = f"routed_experts are not {layout.ids} for each token of prompt and response but the last one"
        yield Violation.of_rows("lengths", differ, problem)
    experts = layout.experts or MAX_EXPERTS
    if numbers.size and (numbers.min() < 0 or numbers.max() >= experts):
        bad = _rows_with((numbers < 0) | (numbers >= experts), offsets)
        yield Violation.of_rows("extras", bad, f"a number of an expert is not below {experts}, or negative")
    if layout.top_k > 1 and not differ.any():
        unknown = np.count_nonzero(numbers.reshape(-1, layout.ids), axis=1) == 0
        if unknown.any():
            bad = _rows_with(unknown, offsets // layout.ids)
            yield Violation.of_rows("extras", bad, "expert 0 alone in all layers at some token: none was recorded")


def _rows_with(bad: Bools, offsets: Int64Array) -> Bools:
    """bool [N]: rows that have one of the values that are `bad` [K]."""
    counts = np.append(0, np.cumsum(bad))
    found: Bools = counts[offsets[1:]] > counts[offsets[:-1]]
    return found
