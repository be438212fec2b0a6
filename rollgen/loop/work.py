"""The owed requests of one attempt, as the workers of all its engines share them.

Workers take one request after the other, so that whoever is least loaded gets the next. What an engine had in flight
when it died is given back, and handed out again after everything else: it may be what killed the engine, and must not
keep the rest from being made. A worker that finds nothing waits while others have requests in flight, since these may
come back.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from rollgen.engines.base import SampleRequest
from rollgen.loop.owed import Owed


class Taken(NamedTuple):
    """A request that a worker is at."""

    request: SampleRequest
    position: int
    """Of its sample: see `owed.py`."""


class Work:
    """Hands out what is owed. `close_group` is told of each prompt of which no more samples will come."""

    def __init__(self, owed: Owed, close_group: Callable[[int], None]) -> None:
        self._owed = owed
        self._close_group = close_group
        self._stream = owed.requests()
        self._is_exhausted = False
        self._returned: deque[Taken] = deque()
        self._in_flight = 0
        self._outstanding: Counter[int] = Counter()
        """Requests not settled, by prompt."""
        self._changed = asyncio.Event()

    async def take(self) -> Taken | None:
        """The next request, or None once nothing is owed any more. What is taken is settled or given back."""
        while True:
            taken = self._next()
            if taken is not None or self._in_flight == 0:
                return taken
            await self._changed.wait()

    def settle(self, taken: Taken) -> None:
        """The sample is stored, or has failed."""
        self._owed.settle(taken.position)
        prompt_index = taken.request.prompt.prompt_index
        self._outstanding[prompt_index] -= 1
        if not self._outstanding[prompt_index]:
            del self._outstanding[prompt_index]
            self._close_group(prompt_index)
        self._land()

    def give_back(self, taken: Taken) -> None:
        """It was not made: another worker is to make it."""
        self._returned.append(taken)
        self._land()

    async def over(self) -> None:
        """Wait until nothing is owed any more."""
        while self._in_flight or self._returned or not self._is_exhausted:
            await self._changed.wait()

    def _next(self) -> Taken | None:
        for request, position, group_size in self._stream:
            self._outstanding[request.prompt.prompt_index] += group_size
            self._in_flight += 1
            return Taken(request, position)
        self._is_exhausted = True
        if not self._returned:
            return None
        self._in_flight += 1
        return self._returned.popleft()

    def _land(self) -> None:
        self._in_flight -= 1
        self._changed.set()
        self._changed = asyncio.Event()
