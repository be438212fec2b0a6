"""What a committed shard settles and adds to the totals, read from the shard: the same whoever reads it, and when.

So a shard that was made by a replica which died a moment later gives the receipt that it would have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from rollgen.engines.base import SampleRequest
from rollgen.format.adoption import line_of
from rollgen.format.journal import JournalLine
from rollgen.format.reader import open_shard, read_columns, verify_shard
from rollgen.rollouts import TRUNCATING, truncates

if TYPE_CHECKING:
    import numpy.typing as npt

    from rollgen.format.retries import RetryList
    from rollgen.rollouts import Int64Array

_KEY: Final = ("prompt_index", "sample_index", "generation")
_TALLIED: Final = ("response_length", "finish_reason", *TRUNCATING)


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """One committed shard."""

    line: JournalLine
    positions: Int64Array
    """int64 [rows], as in `loop/owed.py`."""
    masked_tokens: int
    """See `loop.report.RunStats`; so below."""
    length_finishes: int


class Positions:
    """Where the samples of a run stand: `loop/owed.py` says which numbers they have."""

    def __init__(self, offsets: npt.NDArray[np.int64], retries: Sequence[RetryList]) -> None:
        self._offsets = offsets
        self._numbers = [retry.numbers(offsets) for retry in retries]
        self._starts = np.cumsum([offsets[-1], *map(len, self._numbers)])
        self.count = int(self._starts[-1])
        """Of all samples."""

    def of(
        self,
        prompt_index: npt.NDArray[np.int64],
        sample_index: npt.NDArray[np.int32],
        generation: npt.NDArray[np.int32],
    ) -> Int64Array:
        """int64 [S]: the positions of samples that are planned, in the order given."""
        positions = self._offsets[prompt_index] + sample_index
        for number, (start, numbers) in enumerate(zip(self._starts, self._numbers, strict=False), 1):
            rows = generation == number
            positions[rows] = start + np.searchsorted(numbers, positions[rows])
        return positions

    def of_request(self, request: SampleRequest) -> int:
        """The position of one sample."""
        key = (request.prompt.prompt_index, request.sample_index, request.generation)
        return int(self.of(*(np.array([value]) for value in key))[0])


def read_receipt(path: Path, line: JournalLine | None, config_digest: str, positions: Positions) -> Receipt:
    """The receipt of a shard. Without a line it is verified first, and its line read back.

    Raises DatasetError for a damaged one.
    """
    if line is None:
        verify_shard(path, config_digest=config_digest)
    with open_shard(path, line=line, config_digest=config_digest) as shard:
        table = read_columns(shard, [*_KEY, *_TALLIED])
        line = line or line_of(path, shard)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return Receipt(
        line,
        positions.of(*(columns[name] for name in _KEY)),
        masked_tokens=int(columns["response_length"][truncates(*(columns[name] for name in TRUNCATING))].sum()),
        length_finishes=int((columns["finish_reason"] == "length").sum()),
    )
