"""Whether a server takes requests, and is the one that it was: found out by one task for everyone who waits.

    doubt    after trouble: nothing new is sent until the server is found well
    confirm  after an answer: it counts once the server has said, later than that, that it is what it was

A server that is well again within `BRIDGE_SECONDS` was never away: requests wait for it. One that stays away longer
gets no new requests; it counts as dead, for good, as soon as what is in flight there has come back or failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rollgen.engines.address import Address
from rollgen.engines.inspection import Inspection
from rollgen.engines.wire import Wire
from rollgen.errors import EngineError, UnfitEngine

BRIDGE_SECONDS: Final = 10.0
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
"""Seconds between two looks at a server that is away: the first, doubled up to the longest."""
CONFIRM_SECONDS: Final = 0.1
"""Between two confirmations: all answers of the time between share one."""
BUSY_SECONDS: Final = 10.0
"""For a probe while requests are in flight, behind which it may have to wait in the server's queue."""
SICK_AFTER: Final = 3
"""Requests in a row that run out of tries: then it is the server that fails."""


async def wait_until_well(
    wire: Wire, address: Address, inspection: Inspection, seconds: float, *, probed: bool
) -> None:
    """Raises EngineError after so many seconds, UnfitEngine when it is another server now. `probed`: it just was."""
    started, pause = time.monotonic(), FIRST_PAUSE
    began = started
    while (problem := await inspection.problem(wire, thorough=not probed)) is not None:
        probed = False  # it is not known what comes back
        if began - started > seconds:  # a look in which this program was stopped is followed by another
            raise EngineError(f"{address}: the server has been away for {seconds:.0f} s: {problem}; start it")
        await asyncio.sleep(pause)
        began, pause = time.monotonic(), min(2 * pause, LONGEST_PAUSE)


class Availability:
    """Of one server, from a start of its engine to the end."""

    def __init__(self, wire: Wire, address: Address, inspection: Inspection) -> None:
        self._wire = wire
        self._address = address
        self._inspection = inspection
        self.in_flight = 0
        self._failures = 0
        """Requests that ran out of tries since the last answer."""
        self._is_suspect = False
        """Whether the next look is to be a thorough one."""
        self._death: EngineError | None = None
        self._tasks: set[asyncio.Task[bool]] = set()
        self._looking: asyncio.Task[bool] | None = None
        self._confirming: asyncio.Task[bool] | None = None
        """The latest."""
        self._has_begun = True
        """Whether the latest confirmation has: then it proves nothing of later answers."""
        self._confirmed_at = -math.inf

    async def wait(self) -> None:
        """Return when the server may be sent a request. Raises EngineError when it counts as dead."""
        if self._looking is not None:
            await self._end_of(self._looking)
        if self._death is not None:
            raise type(self._death)(str(self._death))

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is with the server."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def doubt(self, *, thorough: bool = False) -> None:
        """Something went wrong: look whether the server is still there, and thoroughly if it may have been replaced."""
        self._is_suspect |= thorough
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look())

    async def confirm(self) -> None:
        """Return when the server has said, after this was called, that it is what it was. Raises EngineError."""
        if self._has_begun:
            self._has_begun = False
            self._confirming = self._spawn(self._confirm(self._confirming))
        assert self._confirming is not None
        if not await self._end_of(self._confirming):
            await self.wait()

    def answered(self) -> None:
        """A request was, as it should."""
        self._failures = 0

    async def failed(self) -> None:
        """A request ran out of tries: return if it, and not the server, is to blame. Raises EngineError otherwise."""
        self._failures += 1
        self.doubt(thorough=True)
        await self.wait()

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        """A task that lives as long as this, for an event loop does not keep its tasks."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_of(self, task: asyncio.Task[bool]) -> bool:
        await asyncio.wait({task})
        if task.cancelled():
            raise EngineError(f"{self._address}: the engine was closed")
        return task.result()

    async def _look(self) -> bool:
        """Whether the server is well, once it is or is dead."""
        since, pause = time.monotonic(), FIRST_PAUSE
        began = since
        while (problem := await self._problem()) is not None and self._death is None:
            if began - since > BRIDGE_SECONDS and not self.in_flight:
                self._death = EngineError(f"{self._address}: the server does not work: {problem}")
                break
            await asyncio.sleep(pause)
            began, pause = time.monotonic(), min(2 * pause, LONGEST_PAUSE)
        return self._death is None

    async def _problem(self) -> str | None:
        """What is wrong, after as thorough a look as was asked for, also meanwhile."""
        while True:
            thorough, self._is_suspect = self._is_suspect, False
            problem = await self._inspect(thorough=thorough)
            if problem is not None:
                self._is_suspect = True  # it is not known what comes back
                return problem
            if not self._is_suspect:
                break
        if self._failures >= SICK_AFTER:
            return f"it failed {self._failures} requests in a row, though it answers /health and short prompts"
        return None

    async def _inspect(self, *, thorough: bool) -> str | None:
        try:
            async with asyncio.timeout(BUSY_SECONDS if thorough and self.in_flight else None):
                return await self._inspection.problem(self._wire, thorough=thorough)
        except TimeoutError:  # what is in flight shows that it was not started anew
            return await self._inspect(thorough=False)
        except UnfitEngine as error:
            self._death = error
            return str(error)

    async def _confirm(self, before: asyncio.Task[bool] | None) -> bool:
        """Whether the server says that it is what it was. One look after the other, with a pause between them."""
        if before is not None:
            await asyncio.wait({before})
        await asyncio.sleep(max(0.0, self._confirmed_at + CONFIRM_SECONDS - time.monotonic()))
        self._has_begun = True
        try:
            problem = await self._inspection.changed(self._wire)
        except UnfitEngine as error:
            self._death = error
            return False
        self._confirmed_at = time.monotonic()
        if problem is not None:
            self.doubt(thorough=True)
        return problem is None
