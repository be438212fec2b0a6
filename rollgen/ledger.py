"""What a `RolloutWriter` may store: each sample of its part once, and nothing that is not asked for.

With a plan, a request is known because it was handed out as owed. Without one, it is known by its prompt id: prompts
come one by one, from several processes and after restarts, so all that is derived for them derives from the id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollgen.engines.base import SampleRequest
from rollgen.errors import UsageError
from rollgen.format.commit import Part
from rollgen.format.done import Bools, Located, mark_all
from rollgen.format.reader import StoredKeys
from rollgen.format.recovery import Recovery
from rollgen.format.retries import RetryList
from rollgen.loop.owed import Owed
from rollgen.loop.parts import in_part
from rollgen.prompts.plan import Plan
from rollgen.prompts.planned import check_planless, first_problem
from rollgen.prompts.single import id_number


class PlannedLedger:
    """The samples of one part of a plan."""

    def __init__(self, plan: Plan, retries: tuple[RetryList, ...], recovery: Recovery, part: Part) -> None:
        done = np.concatenate([recovery.done, *recovery.retried])
        self._owed = Owed(plan, retries, done | ~in_part(part, plan, retries))
        self._asked: dict[tuple[int, int, int], tuple[str, int]] = {}
        """By prompt_index, sample_index and generation: prompt id and position of what is handed out, not stored."""
        self._outstanding: Counter[int] = Counter()
        """Samples handed out and not stored, by prompt."""

    def owed(self) -> Iterator[SampleRequest]:
        """What is not stored now, in plan order. A prompt's samples are handed out together."""
        requests = self._owed.requests()
        for request, position, size in requests:
            group = [(request, position), *((other, place) for other, place, _ in islice(requests, size - 1))]
            index = request.prompt.prompt_index
            self._outstanding[index] = len(group)
            for one, place in group:
                self._asked[index, one.sample_index, one.generation] = (one.prompt.prompt_id, place)
            yield from (one for one, _ in group)

    def check(self, request: SampleRequest) -> None:
        """Raise UsageError unless this sample may be stored now."""
        prompt = request.prompt
        asked = self._asked.get((prompt.prompt_index, request.sample_index, request.generation))
        if asked is None or asked[0] != prompt.prompt_id:
            raise UsageError(
                f"({prompt.prompt_id}, {request.sample_index}): this writer does not owe it: it is stored already, of "
                "another part or another dataset; add what owed() gave, once"
            )

    def settle(self, request: SampleRequest) -> bool:
        """The sample is stored, or about to be. Returns whether it was the last one owed of its prompt."""
        index = request.prompt.prompt_index
        _, position = self._asked.pop((index, request.sample_index, request.generation))
        self._owed.settle(position)
        self._outstanding[index] -= 1
        if self._outstanding[index]:
            return False
        del self._outstanding[index]
        return True


class OpenLedger:
    """The samples of a dataset without a plan: prompt ids and what is stored of each, in memory.

    It is `format.done.StoredSamples` too.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._stored: set[tuple[str, int]] = set()

    def problem(self, table: pa.Table) -> str | None:
        """See `format.done.StoredSamples`; so below."""
        return first_problem(check_planless(table))

    def locate(self, keys: StoredKeys, place: Path | str) -> Located:
        return _OpenRows([*zip(keys.prompt_id.to_pylist(), keys.sample_index.tolist(), strict=True)], self._stored)

    def mark(self, keys: StoredKeys, place: Path | str) -> None:
        mark_all(self.locate(keys, place), place)

    def owns(self, prompt_id: str) -> bool:
        """Whether the prompt is of this writer's part."""
        return id_number(prompt_id) % self._part.of == self._part.number

    def check(self, request: SampleRequest) -> None:
        """Raise UsageError unless this sample may be stored now."""
        prompt = request.prompt
        if not self.owns(prompt.prompt_id):
            raise UsageError(f"prompt {prompt.prompt_id!r} is not of part {self._part}; ask owns() first")
        if self.is_stored(prompt.prompt_id, request.sample_index):
            raise UsageError(f"({prompt.prompt_id}, {request.sample_index}) is stored already; ask is_stored() first")

    def settle(self, request: SampleRequest) -> bool:
        """The sample is stored, or about to be. False: more samples of a prompt may always come."""
        self._stored.add((request.prompt.prompt_id, request.sample_index))
        return False

    def is_stored(self, prompt_id: str, sample_index: int) -> bool:
        """Whether this sample is stored, or waits for its commit."""
        return (prompt_id, sample_index) in self._stored


@dataclass(frozen=True, slots=True)
class _OpenRows:
    """`format.done.Located`."""

    keys: list[tuple[str, int]]
    stored: set[tuple[str, int]]

    @property
    def new(self) -> Bools:
        first = {key: row for row, key in reversed([*enumerate(self.keys)])}
        return np.array([key not in self.stored and first[key] == row for row, key in enumerate(self.keys)], np.bool_)

    def mark(self, rows: Bools) -> None:
        self.stored.update(key for key, chosen in zip(self.keys, rows, strict=True) if chosen)


Ledger = PlannedLedger | OpenLedger
