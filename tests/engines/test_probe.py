"""What the probe finds, and that each wrong flag of a server is one error that names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from aiohttp import web
from models.fake_server import VOCAB_SIZE, FakeServer, answers, hangs

from rollgen.config import RunConfig
from rollgen.engines.base import Extras
from rollgen.engines.http import HttpEngine, check_alike, connect
from rollgen.engines.probe import parameters_of
from rollgen.errors import EngineError, UsageError

MakeEngine = Callable[..., HttpEngine]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "capture_wanted": "auto",
    "untruncated": "none",
    "replayable": True,
    "decode": str,
    "encode": str.encode,
    "dtype": "bfloat16",
}
"""Of the engines of one run."""


def make_config(servers: list[FakeServer]) -> RunConfig:
    """Of a run with these."""
    return RunConfig(top_k=6, max_tokens=8, server=tuple(server.url for server in servers))


@pytest.mark.parametrize(
    ("masks", "wanted", "untruncated", "capture"),
    [
        (True, "auto", "none", "native"),
        (True, "native", "none", "native"),
        (True, "logprobs", "none", "logprobs"),
        (False, "auto", "none", "logprobs"),
        (False, "auto", "some", "logprobs"),
        (False, "none", "some", "none"),
    ],
)
def test_capture(
    server: FakeServer, make_engine: MakeEngine, masks: bool, wanted: str, untruncated: str, capture: str
) -> None:
    """Native where masks come back and every prompt is truncated."""
    server.masks, server.max_logprobs = masks, -1
    engine = make_engine(wanted, untruncated=untruncated)
    assert engine.capture == capture
    assert len(engine.notes) == (wanted == "auto" and capture == "logprobs")
    assert engine.record.name == "vllm"
    assert engine.record.version == "0.32.0"
    assert engine.dtype == "bfloat16"
    assert engine.extras == Extras(weight_versions=True)


def test_everything_is_sent(server: FakeServer, make_engine: MakeEngine) -> None:
    """The run's own sampling, and neutral values for what a server could have defaults for."""
    server.max_logprobs = -1
    make_engine("logprobs", stop=["x"], stop_token_ids=[5], sampling_arg={"min_tokens": 3})
    params = server.seen[-1]["sampling_params"]
    expected = {"temperature": 0.75, "top_k": 6, "top_p": 0.9, "min_p": 0.01, "max_tokens": 3, "min_tokens": 3, "n": 1}
    expected |= {"stop": ["x"], "stop_token_ids": [5], "detokenize": True, "watermarking": False, "logit_bias": None}
    expected |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: params[name] for name in expected} == expected
    assert params["logprobs"] == 6 + 32
    assert server.seen[-1]["model"] == "fake"


@pytest.mark.parametrize(
    ("field", "how", "problem"),
    [
        ({"scale_out": False}, {}, "start the server with --enable-scale-out"),
        ({"has_route": False}, {}, "it takes a vLLM that has --enable-scale-out"),
        ({"masks": False}, {"capture": "native"}, "--capture native: .* start it with --return-sampling-mask"),
        ({"masks": False, "mode": "raw_logprobs"}, {}, "--logprobs-mode processed_logprobs"),
        ({"masks": True, "mode": "raw_logprobs"}, {}, "--logprobs-mode processed_logprobs"),
        ({"masks": False}, {"capture": "logprobs"}, "start it with --max-logprobs 38 at least; -1"),
        ({"masks": True}, {"support_logprobs": True}, "start it with --max-logprobs 38 at least; -1"),
        ({"masks": True}, {"capture": "none", "untruncated": "some"}, "top_k 0.*set a top_k that never binds"),
        ({"api_key": "other"}, {}, "--api-key-env"),
        ({}, {"max_model_len": 999}, "--max-model-len: 999 tokens, but the context .* is 256"),
        ({}, {"sampling_arg": {"thinking_token_budget": 3}}, "--sampling-arg thinking_token_budget: .*no such"),
        ({"parameters": None}, {"sampling_arg": {"typo": 3}}, "--sampling-arg typo: .*no such"),
    ],
    ids=str,
)
def test_misconfigured(
    server: FakeServer, make_engine: MakeEngine, field: dict[str, Any], how: dict[str, Any], problem: str
) -> None:
    """One line, with the URL and what to do."""
    for name, value in field.items():
        setattr(server, name, value)
    with pytest.raises(UsageError, match=problem) as caught:
        make_engine(**how)
    assert "\n" not in str(caught.value)


def test_known_parameters(server: FakeServer, make_engine: MakeEngine) -> None:
    """By the server's schema, or by rollgen's list where a server has none."""
    make_engine(sampling_arg={"min_tokens": 3})
    server.parameters = None
    make_engine(sampling_arg={"thinking_token_budget": 3})
    assert parameters_of(b"[]") == parameters_of(b"no JSON") == frozenset()


def test_server_fails(server: FakeServer, make_engine: MakeEngine) -> None:
    """Not the user's fault, so no UsageError."""
    server.faults = [answers(500, {"error": {"message": "CUDA out of memory"}})]
    with pytest.raises(EngineError, match="500: CUDA out of memory"):
        make_engine()


def test_refused_sampling(server: FakeServer, make_engine: MakeEngine) -> None:
    """In the server's words: of the fourth request, the first with the run's sampling."""
    refusal = answers(400, {"error": {"message": "bad_words are not for this model", "param": "bad_words"}})
    server.faults = [_passes, _passes, _passes, refusal]
    with pytest.raises(UsageError, match="refuses how this run samples: bad_words are not for this model"):
        make_engine()


async def _passes(request: object) -> None:
    """No fault."""


def test_another_service(server: FakeServer, make_engine: MakeEngine) -> None:
    """Any JSON, a redirect, or no JSON at all."""
    server.faults = [answers(200, {"choices": []})]
    with pytest.raises(UsageError, match="lacks its one choice"):
        make_engine()
    server.faults = [answers(307, Location="http://me:secret@elsewhere/x?token=secret")]
    with pytest.raises(UsageError, match="it redirects to http://elsewhere/x, which is not followed"):
        make_engine()
    server.faults = [answers(200, "<html>")]
    with pytest.raises(EngineError, match="its answer is not JSON"):
        make_engine()


@pytest.mark.parametrize("experts", ["", "%", "UEsDBA==", "k05VTVBZAQB2AHsn"])
def test_unreadable_experts(server: FakeServer, make_engine: MakeEngine, experts: str) -> None:
    """Nothing, no base64, the beginning of a zip file and of a .npy file."""
    server.experts = lambda positions: experts
    with pytest.raises(UsageError, match=f"{server.url}: routed experts are no .npy file"):
        make_engine()


HOSTILE = {
    "NaN": '{"choices": [{"finish_reason": "stop", "token_ids": [1], "logprobs": NaN}]}',
    "nested": '{"choices": ' + "[" * 1020 + "]" * 1020 + "}",
    "a nested reason": '{"choices": [{"finish_reason": ' + "[" * 1000 + "]" * 1000 + "}]}",
    "a nested stop reason": '{"choices": [{"finish_reason": "stop", "token_ids": [1], "logprobs": {"content": []}, '
    '"stop_reason": ' + "[" * 1000 + "]" * 1000 + "}]}",
    "nested masks": '{"choices": [{"finish_reason": "stop", "token_ids": [1], "logprobs": {"content": []}, '
    '"sampling_mask": ' + "[" * 1000 + "]" * 1000 + "}]}",
    "huge numbers": '{"choices": [{"finish_reason": "stop", "token_ids": [1e999, 1'
    + "0" * 400
    + '], "logprobs": {}}]}',
    "a name twice": '{"choices": [{"finish_reason": "stop", "finish_reason": {}, "token_ids": [1]}]}',
    "half a surrogate pair": '{"choices": [{"finish_reason": "stop", "stop_reason": "\\ud800", "token_ids": [1]}]}',
    "no UTF-8": '{"choices": [{"finish_reason": "\udcff"}]}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("status", [200, 400])
def test_hostile_answers(server: FakeServer, make_engine: MakeEngine, text: str, status: int) -> None:
    """Are one line, and never a traceback."""

    async def fault(request: object) -> web.Response:
        return web.Response(status=status, body=text.encode(errors="surrogateescape"), content_type="application/json")

    server.faults = [fault]
    with pytest.raises((UsageError, EngineError)) as caught:
        make_engine()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_openai_logprobs(server: FakeServer, make_engine: MakeEngine) -> None:
    """Those of an older version have texts in place of ids."""
    logprobs = {"content": [{"token": "token_id:5", "logprob": -1.0, "top_logprobs": []}]}
    choice = {"token_ids": [5], "finish_reason": "stop", "logprobs": logprobs}
    server.faults = [answers(200, {"choices": [choice]})]
    with pytest.raises(UsageError, match="too old"):
        make_engine()


def test_no_meter(server: FakeServer, make_engine: MakeEngine) -> None:
    """The user should know what a stall is judged by."""
    server.is_metered = False
    assert "--stall-timeout" in make_engine().notes[0]


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"shift": 1}, "--model: its tokenizer is not that of"),
        ({"vocab_size": VOCAB_SIZE - 1}, "--model: has a vocabulary of 64 ids, and what .* serves has fewer"),
        ({"vocab_size": VOCAB_SIZE + 1}, "--model: has a vocabulary of 64 ids, and what .* serves has more"),
    ],
    ids=str,
)
def test_another_model(server: FakeServer, make_engine: MakeEngine, field: dict[str, Any], problem: str) -> None:
    """A tokenizer or a vocabulary that is not the server's would make a dataset of nonsense."""
    for name, value in field.items():
        setattr(server, name, value)
    with pytest.raises(UsageError, match=problem):
        make_engine()


@pytest.mark.parametrize(
    ("field", "note"),
    [({"shift": None}, "does not answer /tokenize"), ({"checks_ids": False}, "does not check ids")],
    ids=str,
)
def test_a_model_that_cannot_be_checked(
    server: FakeServer, make_engine: MakeEngine, field: dict[str, Any], note: str
) -> None:
    """The user should know, and no more."""
    for name, value in field.items():
        setattr(server, name, value)
    (found,) = make_engine().notes
    assert found.startswith(f"{server.url} {note}")


@pytest.mark.parametrize("page", ["", "{}", "[]", '{"tokens": null}', "<html>"])
def test_an_answer_that_is_no_tokens(server: FakeServer, make_engine: MakeEngine, page: str) -> None:
    """Is none of a tokenizer."""
    server.pages["/tokenize"] = (200, page)
    assert "/tokenize" in make_engine().notes[0]


def test_given_up_together(server: FakeServer) -> None:
    """Whether the probes of several servers are wanted may depend on the context that they were asked for in."""
    stopping = ContextVar("stopping", default=False)
    token = stopping.set(True)
    with FakeServer() as second:
        for each in (server, second):
            each.faults = [hangs]
        with pytest.raises(EngineError, match="interrupted while a server was waited for"):
            connect(make_config([server, second]), **COMMON, given_up=stopping.get)
    stopping.reset(token)


@pytest.mark.parametrize("where", ["reason", "redirect"])
def test_a_key_that_is_repeated(
    server: FakeServer, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In a redirect, in a finish reason, percent-encoded: it is in no message."""
    monkeypatch.setenv("VLLM_API_KEY", "correct/horse")
    choice = {"finish_reason": "correct/horse", "token_ids": [1]}
    server.faults = [
        answers(200, {"choices": [choice]})
        if where == "reason"
        else answers(307, Location="http://elsewhere/correct/horse/correct%2Fhorse")
    ]
    with pytest.raises((UsageError, EngineError)) as caught:
        make_engine()
    assert "horse" not in str(caught.value)
    assert "(secret)" in str(caught.value)


def test_alike(server: FakeServer, make_engine: MakeEngine) -> None:
    """Servers of one run must return the same."""
    with FakeServer(masks=False, max_logprobs=-1) as other:
        first, second = make_engine(), make_engine(url=other.url)
        check_alike([first, first])
        with pytest.raises(UsageError, match=f"{server.url} and {other.url} return different things"):
            check_alike([first, second])


def test_probed_at_the_same_time(server: FakeServer) -> None:
    """Three servers none of which answers before all are asked; they keep their order."""
    with FakeServer() as second, FakeServer() as third:
        servers = [server, second, third]

        async def until_all_are_asked(request: object) -> None:
            while not all(each.seen for each in servers):
                await asyncio.sleep(0.01)

        for each in servers:
            each.faults = [until_all_are_asked]
        engines = connect(make_config(servers), **COMMON)
        assert [str(engine.address) for engine in engines] == [each.url for each in servers]
        third.scale_out = False
        with pytest.raises(UsageError, match=f"{third.url}: .*--enable-scale-out"):
            connect(make_config(servers), **COMMON)
        third.scale_out, third.masks, third.max_logprobs = True, False, -1
        with pytest.raises(UsageError, match=f"{server.url} and {third.url} return different things"):
            connect(make_config(servers), **COMMON)


@pytest.mark.parametrize(
    ("affordable", "window"), [pytest.param(776, 384, id="all"), pytest.param(100, 46, id="few"), (1, 1)]
)
def test_windows_that_the_system_allows(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, affordable: int, window: int
) -> None:
    """Two servers have 384 + 4 connections each: of 100 in all 46 + 4 are left to each, and a note says so."""
    asked: list[int] = []
    monkeypatch.setattr("rollgen.engines.http.afford", lambda wanted: asked.append(wanted) or affordable)
    engines = connect(make_config([server, server]), **COMMON)
    assert asked == [776]
    assert [engine.window for engine in engines] == [window] * 2
    notes = [note for engine in engines for note in engine.notes]
    assert len(notes) == (window < 384)
    assert all(f"384 requests in flight at each of 2 servers: it is {window} at each" in note for note in notes)
