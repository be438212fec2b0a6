"""Waiting in a thread, which nobody can cancel, for as long as it is wanted; and for what has to come to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Final

from rollgen.errors import EngineError

POLL_SECONDS: Final = 1.0
"""Between two looks at whether a wait is still wanted."""
_LOG: Final = logging.getLogger("rollgen")


def refuse_if(given_up: Callable[[], bool]) -> None:
    """Raise EngineError when what is waited for is not wanted any more: whoever did has gone on."""
    if given_up():
        raise EngineError("interrupted while the cluster was waited for")


class Patience:
    """Of a user who waits for something: after so many seconds a warning of the log says, once, what it is."""

    def __init__(self, seconds: float, given_up: Callable[[], bool], reason: Callable[[], str]) -> None:
        self._deadline = time.monotonic() + seconds
        self._given_up = given_up
        self._reason = reason

    def wait(self) -> None:
        """Go on with waiting. Raises EngineError as `refuse_if`."""
        refuse_if(self._given_up)
        if time.monotonic() >= self._deadline:
            self._deadline = math.inf
            _LOG.warning(self._reason())


async def to_the_end(running: asyncio.Future[None]) -> None:
    """Wait until it is over, also when this is cancelled. Raises what it raises, or else CancelledError then."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    running.result()
    if cancelled is not None:
        raise cancelled
