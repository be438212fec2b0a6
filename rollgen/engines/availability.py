"""Signs of life of a server: whether it takes requests, and how many tokens it has generated.

Whether it takes requests is found out, after trouble, by one task for everyone who waits.

A server that answers `/health` again within `BRIDGE_SECONDS` was never away: requests wait for it. One that stays away
longer gets no new requests; it counts as dead, for good, as soon as what is in flight there has come back or failed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rollgen.engines.address import Address
from rollgen.engines.wire import Oversized, Refused, Unreachable, Wire
from rollgen.errors import EngineError

HEALTH_PATH: Final = "/health"
METRICS_PATH: Final = "/metrics"
BRIDGE_SECONDS: Final = 10.0
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
"""Seconds between two looks at a server that is away: the first, doubled up to the longest."""
_GENERATED: Final = re.compile(rb"^vllm:generation_tokens_total(?:\{[^}\n]*\})? ([0-9.e+]+)$", re.MULTILINE)
"""One line for each engine of the server."""


async def generated_tokens(wire: Wire) -> int | None:
    """What the server has generated so far, for whomever; None when it does not say."""
    try:
        counts = _GENERATED.findall(await wire.get(METRICS_PATH))
    except (Unreachable, Refused, Oversized):
        return None
    return int(sum(map(float, counts))) if counts else None


async def health_problem(wire: Wire) -> str | None:
    """Why the server takes no requests, or None. A front that does not know `/health` answers, at least."""
    try:
        await wire.get(HEALTH_PATH)
    except Unreachable as error:
        return str(error)
    except Refused as refused:
        return f"it answers {HEALTH_PATH} with {refused}" if refused.status >= 500 else None
    except Oversized:
        return None
    return None


async def wait_until_healthy(wire: Wire, address: Address, seconds: float) -> None:
    """Raises EngineError after so many seconds."""
    started, pause = time.monotonic(), FIRST_PAUSE
    while (problem := await health_problem(wire)) is not None:
        if time.monotonic() - started > seconds:
            raise EngineError(f"{address}: the server has been away for {seconds:.0f} s: {problem}; start it")
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


class Availability:
    """Of one server, from a start of its engine to the end.

    `returned` is called when the server answers again after it did not: what it raises makes the server count as dead.
    """

    def __init__(self, wire: Wire, address: Address, returned: Callable[[], Awaitable[object]]) -> None:
        self._wire = wire
        self._address = address
        self._returned = returned
        self._in_flight = 0
        self._looking: asyncio.Task[None] | None = None
        self._death: EngineError | None = None

    async def wait(self) -> None:
        """Return when the server may be sent a request. Raises EngineError when it counts as dead."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        if self._death is not None:
            raise type(self._death)(str(self._death))

    @contextmanager
    def request(self) -> Iterator[None]:
        """While a request is with the server."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def doubt(self) -> None:
        """Something went wrong: look whether the server is still there."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _look(self) -> None:
        problem = await health_problem(self._wire)
        if problem is None:
            return
        since, pause = time.monotonic(), FIRST_PAUSE
        while problem is not None:
            if time.monotonic() - since > BRIDGE_SECONDS and not self._in_flight:
                self._death = EngineError(f"{self._address}: the server does not answer: {problem}")
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            problem = await health_problem(self._wire)
        try:
            await self._returned()
        except EngineError as error:
            self._death = error
