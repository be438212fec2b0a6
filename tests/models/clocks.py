"""Clocks that stand still but where a test lets time pass: what is expected after a while does not depend on how fast
the machine is."""

from __future__ import annotations

import asyncio
import time


class WatchdogClock:
    """That of `rollgen.loop.sampling`, which is asked whenever an engine is looked at: put it there as `time`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return self._now

    async def passes(self, seconds: float) -> None:
        """Return when all, of two engines at most, have been looked at since."""
        self._now += seconds
        seen = self._looks
        while self._looks < seen + 4:
            await asyncio.sleep(0.001)


class SleepersClock:
    """For a module's `time`: who sleeps until some moment finds that it has come."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        time.sleep(0)  # others may run, and time passes for them too
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, clock: int) -> float:
        return self.now
