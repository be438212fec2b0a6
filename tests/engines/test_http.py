"""A server as an engine: what is sampled, what is tried again and what is not."""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import fake_server
from models.driven import check, drive, sample
from models.fake_server import FakeServer, answers, breaks_off, disconnects, error, hangs

from rollgen.engines.base import Extras, RequestError, SampleRequest
from rollgen.engines.http import MAX_TRIES, HttpEngine
from rollgen.errors import CaptureError, EngineError, UnfitEngine
from rollgen.format.manifest import RoutedExperts
from rollgen.rollouts import Completion

MakeEngine = Callable[..., HttpEngine]
MakeRequest = Callable[..., SampleRequest]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("capture", ["native", "logprobs"])
def test_samples(
    server: FakeServer,
    make_engine: MakeEngine,
    make_request: MakeRequest,
    capture: str,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both captures read the same; large answers are read elsewhere, but alike."""
    if large:
        monkeypatch.setattr("rollgen.engines.http.LARGE_ANSWER", 0)
    server.max_logprobs = -1
    engine = make_engine(capture)
    requests = [make_request(number) for number in range(4)]

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*map(engine.sample, requests))

    for request, completion in zip(requests, drive(engine, all_of_them), strict=True):
        check(completion, request)
        assert completion.weight_versions is not None


def test_untruncated(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Null masks, and logprobs of the sampled ids alone."""
    server.masks = False
    request = make_request(top_k=0, top_p=1.0, min_p=0.0)
    completion = sample(make_engine("none", untruncated="some", top_k=0, top_p=1.0, min_p=0.0), request)
    check(completion, request)
    assert not completion.mask_offsets.any()
    assert server.asked[-1]["sampling_params"]["logprobs"] == 0


def test_support_logprobs(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Of every id of a native mask: their probabilities sum to 1. Clamped ones are never among them."""
    server.max_logprobs = -1
    completion = sample(make_engine("native", support_logprobs=True), make_request())
    assert completion.support_logprobs is not None
    sums = np.add.reduceat(np.exp(completion.support_logprobs), completion.mask_offsets[:-1])
    np.testing.assert_allclose(sums, 1, atol=1e-5)
    assert completion.support_logprobs.min() > -100


TRANSIENT = {
    "500": answers(500, {"error": {"message": "Internal Server Error"}}),
    "502": answers(502, "<html><h1>Bad Gateway</h1></html>"),
    "404": answers(404, {"detail": "Not Found"}),
    "503": answers(503, Retry_After="0"),
    "504": answers(504, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
    "429": answers(429, {"error": {"message": "queue is full"}}, Retry_After="0.01"),
    "disconnect": disconnects,
    "breaks off": breaks_off,
    "no JSON": answers(200, '{"choices": [{"token_ids": [1, 2'),
    "aborted": answers(200, {"choices": [{"finish_reason": "abort", "token_ids": [3]}]}),
}


@pytest.mark.parametrize("fault", TRANSIENT.values(), ids=TRANSIENT)
def test_tried_again(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, fault: fake_server.Fault
) -> None:
    """Twice, with the same body, so with the same seed, under a name of its own each time."""
    engine = make_engine()
    server.asked.clear()
    server.ids.clear()
    server.run_faults = [fault, fault]
    request = make_request()
    check(sample(engine, request), request)
    assert len(server.asked) == 3
    assert server.asked[0] == server.asked[1] == server.asked[2]
    assert server.asked[0]["sampling_params"]["seed"] == request.seed >= 2**32
    assert len(set(server.ids)) == 3


@pytest.mark.parametrize("name", ["500", "disconnect", "no JSON"])
def test_not_for_ever(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, name: str) -> None:
    """A request that fails again and again while the server is well fails alone."""
    engine = make_engine()
    server.asked.clear()
    server.run_faults = [TRANSIENT[name]] * MAX_TRIES

    async def one_fails() -> Completion:
        with pytest.raises(RequestError, match=f"failed it {MAX_TRIES} times, the last time: "):
            await engine.sample(make_request())
        return await engine.sample(make_request())

    check(drive(engine, one_fails), make_request())
    assert len(server.asked) == MAX_TRIES + 1


@pytest.mark.parametrize(
    ("status", "exception"),
    [
        (400, RequestError),
        (413, RequestError),
        (422, RequestError),
        (501, RequestError),
        (307, UnfitEngine),
        (401, UnfitEngine),
        (403, UnfitEngine),
    ],
)
def test_not_tried_again(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, status: int, exception: type[Exception]
) -> None:
    """What would be answered in the same way: to this request, or to all."""
    engine = make_engine()
    server.asked.clear()
    server.run_faults = [answers(status, {"error": {"message": "the reason"}})]
    with pytest.raises(exception, match=f"{status}: the reason"):
        sample(engine, make_request())
    assert len(server.asked) == 1


def changed(change: Callable[[dict[str, Any]], None]) -> fake_server.Fault:
    """A fault: a choice that is changed."""

    async def fault(request: Any) -> Any:
        choice = fake_server.sample((await request.json())["sampling_params"], masks=True)
        change(choice)
        told = f"generate-tokens-{request.headers['X-Request-Id']}"
        return fake_server.web.json_response({"request_id": told, "choices": [choice]})

    return fault


def clamp(choice: dict[str, Any]) -> None:
    """Of the sampled id of the last token: what NaN becomes."""
    token = choice["logprobs"]["content"][-1]
    token["logprob"] = token["top_logprobs"][0]["logprob"] = fake_server.CLAMPED


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "clamped": (clamp, CaptureError, "of the sampled id is none of a sampled token"),
    "a token too many": (lambda c: c["token_ids"].append(3), CaptureError, "logprobs of"),
    "a mask too few": (lambda c: c["sampling_mask"].pop(), CaptureError, "sampling masks of"),
    "an empty mask": (lambda c: c["sampling_mask"][0].clear(), CaptureError, "empty sampling mask"),
    "no mask": (lambda c: c.update(sampling_mask=None), UnfitEngine, "no sampling mask"),
    "a negative token": (
        lambda c: c["token_ids"].__setitem__(0, -1),
        CaptureError,
        "a sampled id is outside the model's",
    ),
    "an unknown token": (
        lambda c: c["token_ids"].__setitem__(0, 64),
        CaptureError,
        "a sampled id is outside the model's",
    ),
    "an unknown id": (lambda c: c["sampling_mask"][0].append(64), CaptureError, "outside the model's vocabulary of 64"),
    "no logprobs": (lambda c: c.update(logprobs=None), UnfitEngine, "no logprobs"),
    "other logprobs": (lambda c: c["logprobs"]["content"][0].pop("token_id"), CaptureError, "too old"),
    "no token": (lambda c: c.pop("token_ids"), CaptureError, "cannot be read"),
    "unfinished": (lambda c: c.update(finish_reason="error"), RequestError, "finish reason 'error'"),
    "no versions": (lambda c: c.update(weight_versions=None), CaptureError, "weight versions"),
}


@pytest.mark.parametrize(("change", "exception", "problem"), WRONG.values(), ids=WRONG)
def test_wrong_answers(
    server: FakeServer,
    make_engine: MakeEngine,
    make_request: MakeRequest,
    change: Callable[[dict[str, Any]], None],
    exception: type[Exception],
    problem: str,
) -> None:
    """Nothing is mended, and nothing asked for again: it would be sampled the same."""
    engine = make_engine()
    server.asked.clear()
    server.run_faults = [changed(change)]
    with pytest.raises(exception, match=problem):
        sample(engine, make_request())
    assert len(server.asked) == 1


def test_too_long_an_answer(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is not read to its end."""
    engine = make_engine()
    monkeypatch.setattr("rollgen.engines.http.largest_answer", lambda request, num_logprobs: 100)
    with pytest.raises(RequestError, match="more than the 100 bytes that it may need"):
        sample(engine, make_request())


def test_ties(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """50 tied ids go past the 38 logprobs asked for at first: asked for again with the whole vocabulary of 64."""
    server.masks, server.max_logprobs = False, -1
    engine = make_engine()
    server.tied = 50
    completion = sample(engine, make_request(top_p=1.0, min_p=0.0))
    assert engine.resampled == 1
    assert np.unique(np.diff(completion.mask_offsets)).tolist() == [50]
    np.testing.assert_allclose(completion.logprobs, -math.log(50), rtol=1e-5)
    asked = [body["sampling_params"] for body in server.asked[-2:]]
    assert [params.pop("logprobs") for params in asked] == [38, 64]
    assert asked[0] == asked[1]


def test_ties_beyond_the_server(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """The fix is the server's flag."""
    server.masks, server.max_logprobs = False, 40
    engine = make_engine()
    server.tied = 50
    with pytest.raises(RequestError, match="start it with --max-logprobs -1"):
        sample(engine, make_request(top_p=1.0, min_p=0.0))


def test_window(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """1.5 requests for each of 8 places: all 12 are with the server at once, and signs of life get through."""
    engine = make_engine(max_num_seqs=8)
    assert engine.window == 12
    assert make_engine().window == 384

    async def until_all_are_there(request: Any) -> None:
        while server.most_in_flight < 12:
            await asyncio.sleep(0.01)

    server.run_faults = [until_all_are_there] * 12

    async def full() -> None:
        await asyncio.gather(*(engine.sample(make_request(number)) for number in range(12)))

    drive(engine, full)
    assert server.most_in_flight == 12


def test_cancelled(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """The server sees the connection close, and aborts the request."""
    engine = make_engine()
    server.run_faults = [hangs]

    async def cancel() -> None:
        sampling = asyncio.create_task(engine.sample(make_request()))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        sampling.cancel()
        while server.in_flight:
            await asyncio.sleep(0.01)

    drive(engine, cancel)
    assert server.aborted == 1


def test_not_started(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Nor after it was closed, which may be done twice."""
    engine = make_engine()
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(engine.sample(make_request()))

    async def close() -> None:
        engine.close()
        engine.close()
        await engine.sample(make_request())

    with pytest.raises(EngineError, match="not started"):
        drive(engine, close)


async def meter_read(server: FakeServer) -> None:
    """Until what the server counts now is known: two more looks, as the first of them is over when the second comes."""
    wanted = server.looks["/metrics"] + 2
    while server.looks["/metrics"] < wanted:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("metered", [True, False])
def test_tokens(
    server: FakeServer,
    make_engine: MakeEngine,
    make_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    metered: bool,
) -> None:
    """Those of unfinished samples where the server counts, through its restarts; else those of finished ones."""
    monkeypatch.setattr("rollgen.engines.http.METER_SECONDS", 0.02)
    server.is_metered, server.tells_requests = metered, False  # a request that is on its way would seem lost
    engine = make_engine()

    async def tokens() -> int:
        await (meter_read(server) if metered else asyncio.sleep(0.1))
        return engine.tokens

    async def count() -> list[int]:
        seen = [await tokens()]
        server.generated += 1000
        seen.append(await tokens())
        server.generated = 50
        seen.append(await tokens())
        completion = await engine.sample(make_request())
        return [*seen, await tokens() - len(completion.token_ids)]

    assert drive(engine, count) == ([0, 1000, 1050, 1050] if metered else [0, 0, 0, 0])


def test_a_meter_that_turns_odd(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is none: finished samples count then, and nothing fails."""
    monkeypatch.setattr("rollgen.engines.http.METER_SECONDS", 0.02)
    engine = make_engine()

    async def odd() -> int:
        server.pages["/metrics"] = (200, "vllm:generation_tokens_total 1e400\n")
        await meter_read(server)
        before, completion = engine.tokens, await engine.sample(make_request())
        return engine.tokens - before - len(completion.token_ids)

    assert drive(engine, odd) == 0


def test_a_meter_that_fails_is_heard_of(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next request."""
    engine = make_engine()

    async def broken(wire: object) -> None:
        raise ZeroDivisionError

    async def later() -> None:
        await asyncio.sleep(0)
        await engine.sample(make_request())

    monkeypatch.setattr("rollgen.engines.http.read_load", broken)
    with pytest.raises(ZeroDivisionError):
        drive(engine, later)


def test_lost_requests(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server works on, but no more for us: that is no sign of life."""
    monkeypatch.setattr("rollgen.engines.http.METER_SECONDS", 0.02)
    engine = make_engine()

    async def lose() -> list[int]:
        server.run_faults = [hangs]
        sampling = asyncio.create_task(engine.sample(make_request()))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        await meter_read(server)
        seen = [engine.tokens]
        for lost in (0, 1):
            server.lost = lost
            await meter_read(server)
            server.generated += 100
            await meter_read(server)
            seen.append(engine.tokens)
        sampling.cancel()
        return seen

    assert drive(engine, lose) == [0, 100, 100]


def test_key_is_sent_and_never_told(
    server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the server repeats it, or a redirect would take it elsewhere."""
    monkeypatch.setenv("SOME_VARIABLE", "correct-horse")
    server.api_key = "correct-horse"
    engine = make_engine(api_key_env="SOME_VARIABLE")

    async def echo(request: Any) -> Any:
        return error(400, f"you sent {request.headers['Authorization']}")

    async def refused(elsewhere: FakeServer) -> None:
        server.run_faults = [echo, answers(308, Location=f"{elsewhere.url}/inference/v1/generate")]
        with pytest.raises(RequestError, match=r"400: you sent Bearer \(secret\)"):
            await engine.sample(make_request())
        with pytest.raises(UnfitEngine, match="308"):
            await engine.sample(make_request())

    with FakeServer() as elsewhere:
        drive(engine, lambda: refused(elsewhere))
        assert not elsewhere.seen
    told = f"{engine.address!r} {engine.record} {engine.notes}"
    assert "horse" not in told


def test_login_in_the_url(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Is sent as such, and not told."""
    headers: list[str] = []

    async def remember(request: Any) -> None:
        headers.append(request.headers["Authorization"])

    engine = make_engine(url=server.url.replace("http://", "http://me:secret@"))
    server.run_faults = [remember]
    sample(engine, make_request())
    assert headers == ["Basic bWU6c2VjcmV0"]
    assert str(engine.address) == server.url


def test_only_what_is_stored_is_read(server: FakeServer, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Experts that could not be stored (of other tokens, or none recorded) harm no sample of a dataset without."""

    def zeros(positions: int) -> str:
        file = io.BytesIO()
        np.save(file, np.zeros((positions, 2, 2), np.uint8))
        return base64.b64encode(file.getvalue()).decode()

    server.experts = zeros
    engine = make_engine()
    assert engine.extras == Extras(True, RoutedExperts(layers=2, top_k=2, experts=None))
    engine.extras = Extras()
    server.experts = lambda positions: zeros(positions + 1)
    completion = sample(engine, make_request())
    check(completion, make_request())
    assert (completion.weight_versions, completion.routed_experts) == (None, None)
    server.experts = zeros
    check(sample(engine, make_request()), make_request())  # it is probed again, and offers what it did at first
