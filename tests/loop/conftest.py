"""The clock of the watchdogs of engines."""

from __future__ import annotations

import pytest
from models.clocks import WatchdogClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WatchdogClock:
    """Time in which an engine may stall passes only where the test says so."""
    clock = WatchdogClock()
    monkeypatch.setattr("rollgen.loop.sampling.time", clock)
    return clock
