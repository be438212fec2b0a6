"""What the probe finds, and that each wrong flag of a server is one error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from models.fake_server import FakeServer, answers

from rollgen.engines.base import Extras
from rollgen.engines.http import HttpEngine, check_alike
from rollgen.engines.probe import parameters_of
from rollgen.errors import EngineError, UsageError

MakeEngine = Callable[..., HttpEngine]


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
    """In the server's words: of the second request, the first with the run's sampling."""
    refusal = answers(400, {"error": {"message": "bad_words are not for this model", "param": "bad_words"}})
    server.faults = [_passes, refusal]
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


def test_alike(server: FakeServer, make_engine: MakeEngine) -> None:
    """Servers of one run must return the same."""
    with FakeServer(masks=False, max_logprobs=-1) as other:
        first, second = make_engine(), make_engine(url=other.url)
        check_alike([first, first])
        with pytest.raises(UsageError, match=f"{server.url} and {other.url} return different things"):
            check_alike([first, second])
