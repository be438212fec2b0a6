"""Engines that die or stall, with a fake one: exact cover whatever happens, and an end when it is hopeless."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest
from models.clocks import WatchdogClock
from models.fake_engine import FakeEngine
from models.runs import Runs, keys

from rollgen.engines.base import RequestError, SampleRequest
from rollgen.errors import EngineError, TooManyFailures, UnfitEngine
from rollgen.format.failures import read_failures
from rollgen.loop.sampling import _Watchdog


@pytest.fixture(autouse=True)
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalls are found in a fraction of a second."""
    monkeypatch.setattr("rollgen.loop.sampling.TICK_SECONDS", 0.02)


def dying(at: Collection[int], *, window: int = 3, error: Callable[[str], EngineError] = EngineError) -> FakeEngine:
    """An engine that dies at its requests with these numbers, counted from 0 over its whole life."""
    count = 0

    async def before(request: SampleRequest) -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(0)
        if count - 1 in at:
            raise error("the device fell off the bus")

    return FakeEngine(before=before, window=window)


def test_three_deaths_are_survived(runs: Runs) -> None:
    """Every sample once, exit 0, each restart told with what it owes again."""
    stats = runs(dying({3, 8, 12}))
    assert sorted(runs.stored()) == keys(5, 2)
    assert (stats.restarts, stats.owed, stats.exit_code) == (3, 0, 0)
    assert (runs.engine.started, runs.engine.closed) == (4, 4)
    told = [note for note in runs.reporter.notes if "starting it again" in note]
    assert [note.split("(")[1].split(")")[0] for note in told] == ["1 of 5", "2 of 5", "3 of 5"]
    assert "the device fell off the bus; starting it again (1 of 5), 3 samples are owed again" in told
    assert list(read_failures(runs.out)) == []


def test_what_was_in_flight_is_asked_last(runs: Runs) -> None:
    """A request that kills every engine costs only itself: all others are stored when the run gives up."""

    async def poison(request: SampleRequest) -> None:
        await asyncio.sleep(0)
        if (request.prompt.prompt_index, request.sample_index) == (1, 0):
            raise EngineError("CUDA error")

    with pytest.raises(EngineError, match=r"^CUDA error after \d restarts; finished samples are stored, continue with"):
        runs(FakeEngine(before=poison, window=2))
    assert sorted(runs.stored()) == [key for key in keys(5, 2) if key != (1, 0)]


def test_restarts_are_bounded(runs: Runs) -> None:
    """One is allowed, two are needed: the error says so, what is finished is stored, --resume makes the rest."""
    with pytest.raises(EngineError, match="the device fell off the bus after 1 restarts"):
        runs(dying({2, 7}, window=1), max_restarts=1)
    stored = runs.stored()
    assert 0 < len(stored) < 10
    stats = runs(resume=True)
    assert (stats.stored_before, stats.owed) == (len(stored), 0)
    assert sorted(runs.stored()) == keys(5, 2)


def test_no_restart_when_none_is_allowed(runs: Runs) -> None:
    """As `--max-restarts 0` says: the first death is the end."""
    with pytest.raises(EngineError, match="fell off the bus; finished samples are stored"):
        runs(dying({6}, window=1), max_restarts=0)
    assert runs.stored() == keys(3, 2)
    assert (runs.engine.started, runs.engine.closed) == (1, 1)


def test_an_engine_that_makes_nothing_is_given_up(runs: Runs) -> None:
    """Three deaths in a row without a sample, however many restarts are allowed."""
    with pytest.raises(EngineError, match="after 2 restarts"):
        runs(dying(range(1000)), max_restarts=100)
    assert runs.engine.started == 3


def test_an_unfit_engine_is_not_started_again(runs: Runs, clock: WatchdogClock) -> None:
    """It would be as unfit then."""
    with pytest.raises(UnfitEngine, match="fell off"):
        runs(dying({4}, error=UnfitEngine))
    assert runs.engine.started == 1
    assert runs.stored()


def test_a_restart_that_fails_counts_as_a_death(runs: Runs) -> None:
    """The engine cannot be loaded a second time."""
    engine = dying({3})
    start = engine.start

    async def once() -> None:
        if engine.started:
            raise EngineError("no such device")
        await start()

    engine.start = once  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no such device after 3 restarts"):
        runs(engine)


def test_a_stalled_engine_is_reported_and_started_again(runs: Runs, clock: WatchdogClock) -> None:
    """Every request hangs from the fourth on, once: no token for a while, a warning, a restart, exact cover."""
    asked = 0

    async def hangs(request: SampleRequest) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        while 4 <= asked < 7:
            await clock.passes(0.1)

    stats = runs(FakeEngine(before=hangs, window=3), stall_timeout=2.0)
    assert sorted(runs.stored()) == keys(5, 2)
    assert stats.restarts == 1
    assert any("the engine counts as stalled after 2 s" in note for note in runs.reporter.notes)
    assert any("the engine has stalled: no token for" in note for note in runs.reporter.notes)


def test_a_slow_engine_is_not_stalled(runs: Runs, clock: WatchdogClock) -> None:
    """It takes far longer than the timeout for all, and never that long for one."""

    async def slow(request: SampleRequest) -> None:
        await clock.passes(0.5)

    assert runs(FakeEngine(before=slow, window=1), stall_timeout=0.9).restarts == 0


@pytest.mark.parametrize(("setting", "allowed"), [({}, 20), ({"max_failures": 3}, 3), ({"max_failures": 0}, 0)])
def test_too_many_failures_stop_the_run(runs: Runs, setting: dict[str, int], allowed: int) -> None:
    """One more than allowed; 1 % of 200 owed samples is less than the least default of 20."""
    runs.write_prompts(100)

    async def fails(request: SampleRequest) -> None:
        if request.prompt.prompt_index:
            raise RequestError("bad grammar")
        await asyncio.sleep(0)

    with pytest.raises(TooManyFailures, match=f"{allowed + 1} samples failed, .*--max-failures.*bad grammar"):
        runs(FakeEngine(before=fails, window=1), **setting)
    assert runs.stored() == keys(1, 2)
    assert len(list(read_failures(runs.out))) == allowed + 1


def test_a_few_failures_do_not(runs: Runs) -> None:
    """Exit 3: three of ten, as many as allowed."""

    async def fails(request: SampleRequest) -> None:
        if request.prompt.prompt_index < 3 and request.sample_index == 1:
            raise RequestError("bad grammar")

    stats = runs(FakeEngine(before=fails), max_failures=3)
    assert (stats.stored, stats.failed, stats.exit_code) == (7, 3, 3)


def test_time_in_which_nobody_looked_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was stopped for hours finds its engines as they were: they have some time to go on."""
    now = 1000.0
    monkeypatch.setattr("rollgen.loop.sampling.time", SimpleNamespace(monotonic=lambda: now))
    watchdog = _Watchdog(10.0)
    watchdog.look(5, is_idle=False)
    now += 10_000.0
    watchdog.look(5, is_idle=False)
    for _ in range(15):
        now += 0.5
        watchdog.look(5, is_idle=False)
    now += 0.5
    with pytest.raises(EngineError, match="no token for 10 s"):
        watchdog.look(5, is_idle=False)
