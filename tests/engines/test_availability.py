"""A server that goes away, comes back as another one, fails everything, or gives answers that are not ours."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from models import fake_server
from models.clocks import SleepersClock
from models.driven import check, drive, sample
from models.fake_server import FakeServer, answers, disconnects, hangs, waits

from rollgen.engines.address import Address
from rollgen.engines.availability import Availability, wait_until_well
from rollgen.engines.base import RequestError, SampleRequest
from rollgen.engines.http import MAX_TRIES, HttpEngine
from rollgen.errors import EngineError, UnfitEngine
from rollgen.rollouts import Completion

MakeEngine = Callable[..., HttpEngine]
MakeRequest = Callable[..., SampleRequest]


def test_blip(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is soon back: everyone waits, nobody hears of it."""
    monkeypatch.setattr("rollgen.engines.availability.BRIDGE_SECONDS", 600.0)
    engine = make_engine()
    requests = [make_request(number) for number in range(3)]
    server.run_faults = [hangs] * 3

    async def restart() -> list[Completion]:
        sampling = [asyncio.create_task(engine.sample(request)) for request in requests]
        while server.in_flight < 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)
        return await asyncio.gather(*sampling)

    for request, completion in zip(requests, drive(engine, restart), strict=True):
        check(completion, request)


def test_away_and_back(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Dead for everyone at once, and for who comes later; started again it waits for the server, and probes it."""
    engine = make_engine()
    server.run_faults = [hangs] * 3

    async def away() -> Completion:
        sampling = [asyncio.create_task(engine.sample(make_request(number))) for number in range(3)]
        while server.in_flight < 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.stop)
        results = await asyncio.gather(*sampling, return_exceptions=True)
        assert [type(result) for result in results] == [EngineError] * 3
        assert str(results[0]) == f"{server.url}: the server does not work: connection refused"
        with pytest.raises(EngineError):
            await engine.sample(make_request())
        engine.close()
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.3)
        assert not starting.done()
        await asyncio.to_thread(server.start)
        server.run_faults.clear()
        await starting
        return await engine.sample(make_request())

    check(drive(engine, away), make_request())


def test_start_gives_up(server: FakeServer, make_engine: MakeEngine) -> None:
    """After --stall-timeout."""
    engine = make_engine(stall_timeout=0.5)
    server.healthy = False
    with pytest.raises(EngineError, match="away for 0 s: it answers /health with 503; start it"):
        asyncio.run(engine.start())


@pytest.mark.parametrize("change", [{"model": "other"}, {"masks": False}, {"version": "0.99"}], ids=str)
def test_back_as_another(
    server: FakeServer,
    make_engine: MakeEngine,
    make_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    """Whether it was gone for long or not: no restart of the engine would help."""
    monkeypatch.setattr("rollgen.engines.availability.BRIDGE_SECONDS", 600.0)
    engine = make_engine()

    async def replace(seconds: float) -> None:
        server.run_faults = [disconnects]
        await asyncio.to_thread(server.stop)
        sampling = asyncio.create_task(engine.sample(make_request()))
        await asyncio.sleep(seconds)
        for name, value in change.items():
            setattr(server, name, value)
        await asyncio.to_thread(server.start)
        server.run_faults.clear()
        await sampling

    with pytest.raises(UnfitEngine):
        drive(engine, lambda: replace(0.3))
    with pytest.raises(UnfitEngine):
        asyncio.run(engine.start())


def test_drained(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """A server that says it is not well gets nothing new, but what it is at is waited for."""
    engine, gate = make_engine(), threading.Event()

    async def drain() -> list[Completion | BaseException]:
        server.run_faults = [waits(gate), answers(503)]
        first = asyncio.create_task(engine.sample(make_request(0)))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        server.healthy = False
        seen, looks = len(server.asked), server.looks["/health"]
        others = [asyncio.create_task(engine.sample(make_request(1)))]
        while server.looks["/health"] == looks:  # which it is asked for when it has refused that
            await asyncio.sleep(0.01)
        others.append(asyncio.create_task(engine.sample(make_request(2))))
        await asyncio.sleep(1.5)  # longer than the second after which it would have been given up
        assert not any(other.done() for other in others)
        gate.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert len(server.asked) == seen + 1
        return results

    completion, *others = drive(engine, drain)
    check(completion, make_request(0))
    assert [type(result) for result in others] == [EngineError] * 2


@pytest.mark.parametrize("change", [{"root": "/models/other"}, {"max_model_len": 128}, {"version": "0.99"}], ids=str)
def test_replaced_in_silence(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, change: dict[str, Any]
) -> None:
    """No connection breaks and /health is fine: no answer of the new one becomes a sample, also not the first."""
    engine, gate = make_engine(), threading.Event()

    async def replace() -> None:
        check(await engine.sample(make_request(0)), make_request(0))
        server.run_faults = [waits(gate)]
        sampling = asyncio.create_task(engine.sample(make_request(1)))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        for name, value in change.items():
            setattr(server, name, value)
        gate.set()
        await sampling

    with pytest.raises(UnfitEngine, match="is back with another model, context or version"):
        drive(engine, replace)


def test_refusals_of_another_one(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """A prompt that does not fit into the new one's context is no failure of the prompt's."""
    engine = make_engine()

    async def replace() -> None:
        server.max_model_len, server.run_faults = 8, [answers(400, {"error": {"message": "too long"}})]
        await engine.sample(make_request())

    with pytest.raises(UnfitEngine):
        drive(engine, replace)


def test_restarted_with_other_flags(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Which a server does not tell: it is probed again as soon as a connection breaks."""
    engine = make_engine()

    async def restart() -> None:
        server.run_faults, server.masks = [disconnects], False
        await engine.sample(make_request())

    with pytest.raises(UnfitEngine, match="--return-sampling-mask"):
        drive(engine, restart)


def test_a_blip_while_others_are_in_flight(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that waits behind them in the queue is not waited for: they show that the server is the same."""
    monkeypatch.setattr("rollgen.engines.availability.BUSY_SECONDS", 0.2)
    engine, gate = make_engine(), threading.Event()

    async def blip() -> None:
        server.faults = [waits(gate), disconnects, hangs]  # the third request is that of a probe
        first = asyncio.create_task(engine.sample(make_request(0)))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        check(await engine.sample(make_request(1)), make_request(1))
        assert not first.done()
        gate.set()
        check(await first, make_request(0))

    drive(engine, blip)


def test_answers_share_a_look(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 answers: no more than one look each 0.1 s, however long they take, and one when it starts."""
    monkeypatch.setattr("rollgen.engines.availability.CONFIRM_SECONDS", 0.1)
    engine = make_engine()

    async def many() -> None:
        server.looks.clear()
        await asyncio.gather(*(engine.sample(make_request(number)) for number in range(40)))

    started = time.monotonic()
    drive(engine, many)
    assert 1 <= server.looks["/v1/models"] <= 2 + (time.monotonic() - started) / 0.1


def test_a_look_that_fails_is_heard_of(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: the server does not count as well."""
    engine = make_engine()

    async def broken(*args: object, **how: object) -> None:
        raise ZeroDivisionError

    async def look() -> None:
        monkeypatch.setattr("rollgen.engines.inspection.Inspection.problem", broken)
        server.run_faults = [disconnects]
        await engine.sample(make_request())

    with pytest.raises(ZeroDivisionError):
        drive(engine, look)


def test_sick(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """It answers /health, and 500 to every POST: its fault, and no request has failed."""
    engine = make_engine()

    async def sicken() -> list[Completion | BaseException]:
        server.faults = [answers(500, {"error": {"message": "CUDA error"}})] * 1000
        sampling = [engine.sample(make_request(number)) for number in range(20)]
        return await asyncio.gather(*sampling, return_exceptions=True)

    results = drive(engine, sicken)
    assert {type(result) for result in results} == {EngineError}
    assert "the server does not work: " in str(results[0])
    assert "500: CUDA error" in str(results[0])


def test_sick_but_for_probes(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """The third request in a row that runs out of tries shows that it is the server; an answer between starts anew."""
    engine = make_engine()

    async def sicken() -> None:
        fails = [answers(500)] * MAX_TRIES
        for faults in (fails, fails, [], fails, fails):
            server.run_faults = [*faults]
            if faults:
                with pytest.raises(RequestError, match=f"failed it {MAX_TRIES} times, the last time: 500"):
                    await engine.sample(make_request())
            else:
                await engine.sample(make_request())
        server.always = answers(500)
        await engine.sample(make_request())

    with pytest.raises(EngineError, match="does not work: it failed 3 requests in a row"):
        drive(engine, sicken)


def test_a_gateway_without_a_server(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it answers itself is no other server's word: away for a while, dead after that, and waited for."""
    engine = make_engine()
    nothing = {"/health": (404, ""), "/v1/models": (502, "<h1>Bad Gateway</h1>"), "/version": (404, "")}
    no_route = answers(404, {"detail": "Not Found"})
    monkeypatch.setattr("rollgen.engines.availability.BRIDGE_SECONDS", 600.0)

    async def away() -> Completion:
        server.always, server.pages = no_route, dict(nothing)
        sampling = asyncio.create_task(engine.sample(make_request()))
        await asyncio.sleep(0.5)
        server.always, server.pages = None, {"/version": (404, "")}
        await asyncio.sleep(0.3)
        assert not sampling.done()
        server.pages = {}
        check(await sampling, make_request())
        monkeypatch.setattr("rollgen.engines.availability.BRIDGE_SECONDS", 0.2)
        server.always, server.pages = no_route, nothing
        with pytest.raises(EngineError, match="does not work: it answers /health with 404") as caught:
            await engine.sample(make_request())
        assert type(caught.value) is EngineError
        engine.close()
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.3)
        assert not starting.done()
        server.always, server.pages = None, {}
        await starting
        return await engine.sample(make_request())

    check(drive(engine, away), make_request())


def test_the_answer_to_another_request(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Is asked for again; where a server names none, a note says that nobody looks."""

    async def mixed_up(request: Any) -> Any:
        choice = fake_server.sample(make_request(7).sampling_params | {"logprobs": 0}, masks=True)
        return fake_server.web.json_response({"request_id": "generate-tokens-x", "choices": [choice]})

    engine = make_engine()
    assert engine.notes == ()
    server.run_faults = [mixed_up]
    check(sample(engine, make_request()), make_request())
    assert len(server.asked) == 2
    server.repeats_id = False
    engine = make_engine()
    assert [note.partition(" ")[2].partition(":")[0] for note in engine.notes] == ["does not repeat X-Request-Id"]
    check(sample(engine, make_request()), make_request())


def test_a_probe_that_nobody_waits_for(server: FakeServer, make_engine: MakeEngine) -> None:
    """Ends, though the server hangs."""
    server.faults = [hangs]
    with pytest.raises(EngineError, match="interrupted while a server was waited for"):
        make_engine(given_up=lambda: server.in_flight > 0)


class StoppedLooks:
    """Looks, in each of which this program is stopped for long: so many fail, the next finds the server well."""

    def __init__(self, clock: SleepersClock, failing: int) -> None:
        self.clock = clock
        self.failing = failing

    async def problem(self, wire: Any, *, thorough: bool) -> str | None:
        self.clock.sleep(1000)
        self.failing -= 1
        return "no answer" if self.failing >= 0 else None


@pytest.mark.parametrize("at_start", [False, True], ids=["between requests", "at start"])
def test_stopped_in_a_look(monkeypatch: pytest.MonkeyPatch, at_start: bool) -> None:
    """Another look shows whether the server is away, or this program was; a second one that fails is its death."""
    clock: Any = SleepersClock()
    monkeypatch.setattr("rollgen.engines.availability.time", clock)

    async def wait(failing: int) -> None:
        looks: Any = StoppedLooks(clock, failing)
        wire: Any = None
        if at_start:
            await wait_until_well(wire, Address("http://x", None), looks, 10.0, probed=False)
            return
        availability = Availability(wire, Address("http://x", None), looks)
        availability.doubt()
        await availability.wait()

    asyncio.run(wait(1))
    with pytest.raises(EngineError, match="no answer"):
        asyncio.run(wait(2))
