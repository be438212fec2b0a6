"""Fixtures of the engines' tests: a server that speaks vLLM's wire, and engines on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from models.fake_server import VOCAB_SIZE, FakeServer

from rollgen.config import RunConfig
from rollgen.engines.base import SampleRequest
from rollgen.engines.http import HttpEngine
from rollgen.rollouts import Prompt, Sampling

SETTINGS = {"temperature": 0.75, "top_k": 6, "top_p": 0.9, "min_p": 0.01, "max_tokens": 8}


def encode(text: str) -> list[int]:
    """The ids that the server makes of a text."""
    return list(text.encode())


def decode(token_ids: np.ndarray) -> str:
    """Like tokenizers, which raise OverflowError for a negative id."""
    return " ".join(str(int.from_bytes(int(token).to_bytes(4))) for token in token_ids)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is there may take its time, or the machine."""
    for name in ("CONNECT_SECONDS", "GET_SECONDS"):
        monkeypatch.setattr(f"rollgen.engines.wire.{name}", 180.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server with masks, on a port of its own."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def make_engine(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., HttpEngine]:
    """`make_engine(capture="auto", untruncated="none", url=server.url, **settings)`: impatient ones."""
    monkeypatch.setattr("rollgen.engines.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("rollgen.engines.availability.BRIDGE_SECONDS", 1.0)
    monkeypatch.setattr("rollgen.engines.availability.LONGEST_PAUSE", 0.1)
    monkeypatch.setattr("rollgen.engines.availability.CONFIRM_SECONDS", 0.01)

    def make(
        capture: str = "auto",
        *,
        untruncated: str = "none",
        url: str | None = None,
        given_up: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> HttpEngine:
        config = RunConfig.model_validate(SETTINGS | settings)
        return HttpEngine(
            config,
            url or server.url,
            vocab_size=VOCAB_SIZE,
            capture_wanted=capture,  # type: ignore[arg-type]
            untruncated=untruncated,  # type: ignore[arg-type]
            replayable=True,
            decode=decode,
            encode=encode,
            dtype="bfloat16",
            given_up=given_up,
        )

    return make


@pytest.fixture
def make_request() -> Callable[..., SampleRequest]:
    """`make_request(number, **changes)`: of a prompt of its own, sampled as SETTINGS say."""

    def make(number: int = 0, **changes: Any) -> SampleRequest:
        sampling = Sampling(**(SETTINGS | changes))
        token_ids = np.arange(3 + number, dtype=np.int32)
        return SampleRequest(Prompt(f"p{number}", number, token_ids, sampling, n=1, seed=0), 0)

    return make
