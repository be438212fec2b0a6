"""Several engines that share one run, fake ones: exact cover, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from models.clocks import WatchdogClock
from models.fake_engine import FakeEngine
from models.runs import Runs, keys

from rollgen.engines.base import SampleRequest
from rollgen.errors import EngineError, UnfitEngine


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deaths are seen to in a fraction of a second."""
    monkeypatch.setattr("rollgen.loop.engines.SIGNAL_GRACE_SECONDS", 0.01)
    monkeypatch.setattr("rollgen.loop.sampling.TICK_SECONDS", 0.01)
    return iter(())


async def dead(request: SampleRequest) -> None:
    """Every request is its end."""
    await asyncio.sleep(0)
    raise EngineError("the device fell off the bus")


def test_the_faster_one_makes_more(runs: Runs) -> None:
    """Every sample once; who takes as long for one as the other for twenty makes a fraction of them."""

    async def slow_one(request: SampleRequest) -> None:
        slow, fast = (engine.asked for engine in runs.engines)
        until = len(fast) + 20
        while len(fast) < until and len(slow) + len(fast) < 80:
            await asyncio.sleep(0)

    runs.write_prompts(40)
    stats = runs([FakeEngine(before=slow_one, window=2), FakeEngine(window=2)])
    assert sorted(runs.stored()) == keys(40, 2)
    assert (stats.stored, stats.owed, stats.restarts) == (80, 0, 0)
    slow, fast = (len(engine.asked) for engine in runs.engines)
    assert slow + fast == 80
    assert 1 <= slow < fast / 3
    assert [engine.closed for engine in runs.engines] == [1, 1]


def test_few_requests_are_spread(runs: Runs) -> None:
    """Ten samples, two engines with room for 64: five in flight at each."""
    runs([FakeEngine(window=64), FakeEngine(window=64)])
    assert [engine.most_in_flight for engine in runs.engines] == [5, 5]


def test_what_a_dead_one_had_is_made_by_the_other(runs: Runs) -> None:
    """It is started again until that is hopeless; then the other goes on alone, and the run is complete."""

    async def once_that_is_hopeless(request: SampleRequest) -> None:
        while runs.engines[0].closed < 3:
            await asyncio.sleep(0.001)

    runs.write_prompts(20)
    stats = runs([FakeEngine(before=dead, window=3), FakeEngine(before=once_that_is_hopeless, window=3)])
    assert sorted(runs.stored()) == keys(20, 2)
    assert (stats.owed, stats.failed, stats.restarts, stats.exit_code) == (0, 0, 2, 0)
    assert runs.engines[1].started == 1
    assert runs.reporter.notes[-1] == "the device fell off the bus after 2 restarts; 1 of 2 engines go on without it"


def test_the_last_one_ends_the_run(runs: Runs) -> None:
    """Both are hopeless: the run fails, with the error of an engine."""
    with pytest.raises(EngineError, match="fell off the bus after 2 restarts; finished samples are stored"):
        runs([FakeEngine(before=dead), FakeEngine(before=dead)])
    assert runs.stored() == []
    assert all(engine.closed for engine in runs.engines)


def test_nobody_waits_for_a_load_that_is_not_needed(runs: Runs) -> None:
    """One dies at once and would take for ever to load again; the other makes everything, and that is the end."""

    class DoesNotReturn(FakeEngine):
        async def start(self) -> None:
            await super().start()
            if self.started > 1:
                await asyncio.Event().wait()

    async def meanwhile(request: SampleRequest) -> None:
        while runs.engines[0].started < 2:
            await asyncio.sleep(0.001)

    stats = runs([DoesNotReturn(before=dead), FakeEngine(before=meanwhile)])
    assert sorted(runs.stored()) == keys(5, 2)
    assert (stats.owed, stats.restarts) == (0, 1)


def test_an_unfit_one_ends_the_run(runs: Runs) -> None:
    """It would be unfit again: the error is the user's to see, though the other one is well."""

    async def unfit(request: SampleRequest) -> None:
        raise UnfitEngine("no masks")

    with pytest.raises(UnfitEngine, match="no masks"):
        runs([FakeEngine(before=unfit), FakeEngine()])
    assert runs.engines[1].closed


def test_one_that_cannot_start_ends_the_run(runs: Runs) -> None:
    """At the first start a configuration is wrong; both are closed."""
    with pytest.raises(EngineError, match="no such device"):
        runs([FakeEngine(), FakeEngine(start_error=EngineError("no such device"))])
    assert [engine.closed for engine in runs.engines] == [1, 1]
    assert not runs.out.exists()


def test_one_stalls_and_the_other_goes_on(runs: Runs, clock: WatchdogClock) -> None:
    """The watchdog is each engine's own: a silent one is restarted though tokens come from the other."""

    async def hangs_once(request: SampleRequest) -> None:
        if runs.engines[0].started == 1:
            await asyncio.Event().wait()

    async def makes_one_in_time(request: SampleRequest) -> None:
        if runs.engines[0].started == 1:
            await clock.passes(0.1)

    runs.write_prompts(100)
    stats = runs(
        [FakeEngine(before=hangs_once, window=2), FakeEngine(before=makes_one_in_time, window=2)], stall_timeout=1.0
    )
    assert sorted(runs.stored()) == keys(100, 2)
    assert stats.restarts == 1
    assert len(runs.engines[0].asked) > 2


def test_one_that_waits_for_the_other_has_not_stalled(runs: Runs, clock: WatchdogClock) -> None:
    """The last sample of one takes three times the timeout, token by token; the other has nothing to do meanwhile."""

    async def makes_long(request: SampleRequest) -> None:
        for _ in range(12):
            runs.engines[1].tokens += 1
            await clock.passes(0.25)

    runs.write_prompts(2)
    stats = runs([FakeEngine(window=1), FakeEngine(before=makes_long, window=1)], n=1, stall_timeout=1.0)
    assert [len(engine.asked) for engine in runs.engines] == [1, 1]
    assert (stats.stored, stats.restarts, [engine.started for engine in runs.engines]) == (2, 0, [1, 1])
    assert not [note for note in runs.reporter.notes if "no token" in note]
