"""What servers say of themselves, and that several must say the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from models.fake_server import FakeServer

from rollgen.engines.server import ServerModel, describe
from rollgen.errors import EngineError, UsageError


def test_description(server: FakeServer) -> None:
    """All that is told, and a fingerprint of what tells the model."""
    found = describe([server.url], None)
    assert found == ServerModel("fake", "/models/fake", 256, "0.32.0")
    assert found.fingerprint.startswith("server:")
    assert len(found.fingerprint) == len("server:") + 64
    server.max_model_len = 128
    assert describe([server.url], None).fingerprint != found.fingerprint


def test_within_a_loop(server: FakeServer) -> None:
    """It may be called where an event loop is running, as in a notebook."""

    async def inside() -> ServerModel:
        return describe([server.url], None)

    assert asyncio.run(inside()).name == "fake"


@pytest.mark.parametrize("field", [{"model": "other"}, {"max_model_len": 128}, {"version": "0.31.0"}], ids=str)
def test_servers_that_differ(server: FakeServer, field: dict[str, Any]) -> None:
    """Both are named, and what differs."""
    with FakeServer(**field) as other, FakeServer() as same:
        assert describe([server.url, same.url], None).name == "fake"
        with pytest.raises(UsageError, match=f"{server.url} and {other.url} do not serve the same") as caught:
            describe([server.url, same.url, other.url], None)
    assert str(next(iter(field.values()))) in str(caught.value)


def test_key(server: FakeServer) -> None:
    """Refused without the right one, which no message repeats."""
    server.api_key = "correct-horse"
    assert describe([server.url], "correct-horse").name == "fake"
    for key in (None, "battery-staple"):
        with pytest.raises(UsageError, match="--api-key-env") as caught:
            describe([server.url], key)
        assert "battery" not in str(caught.value)


def test_nobody_there(server: FakeServer) -> None:
    """Is it up?"""
    server.stop()
    try:
        with pytest.raises(EngineError, match=f"{server.url}: no server answers: connection refused"):
            describe([server.url], None)
    finally:
        server.start()


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
def test_an_endless_page(server: FakeServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Is not read to its end: no vLLM, or one of which no version is known."""
    monkeypatch.setattr("rollgen.engines.wire.MAX_PAGE", 200)
    server.long_page = path
    if path == "/version":
        assert describe([server.url], None).version == "unspecified"
    else:
        with pytest.raises(UsageError, match=f"{server.url}: /v1/models does not answer as vLLM's does"):
            describe([server.url], None)


@pytest.mark.parametrize("context", [0, -1, 2**31, 10**30])
def test_impossible_contexts(server: FakeServer, context: int) -> None:
    """Lengths that no prompt could have."""
    server.max_model_len = context
    with pytest.raises(UsageError, match="does not answer as vLLM's does"):
        describe([server.url], None)


@pytest.mark.parametrize("field", ["model", "root"])
@pytest.mark.parametrize("name", ["a\nrollgen: error: b", "\x1b[31mred", "x" * 1001, "\u202etxt"], ids=ascii)
def test_names_that_act(server: FakeServer, field: str, name: str) -> None:
    """What would forge a line, colour a terminal or fill it is no name; the message has nothing of it."""
    setattr(server, field, name)
    with pytest.raises(UsageError, match="no readable id, root and max_model_len") as caught:
        describe([server.url], None)
    assert "\n" not in str(caught.value)
    server.model, server.root, server.version = "fake", None, name
    assert describe([server.url], None).version == "unspecified"


def test_a_key_that_is_repeated(server: FakeServer) -> None:
    """In whatever a server says of itself."""
    server.api_key, server.version = "correct-horse", "correct-horse"
    with FakeServer(api_key="correct-horse", version="0.31.0") as other, pytest.raises(UsageError) as caught:
        describe([server.url, other.url], "correct-horse")
    assert "horse" not in str(caught.value)


def test_named_twice(server: FakeServer) -> None:
    """With and without `/v1`."""
    with pytest.raises(UsageError, match=f"--server: {server.url} is named twice"):
        describe([server.url, f"{server.url}/v1"], None)


def test_another_service(server: FakeServer) -> None:
    """A path below the server answers 404."""
    with pytest.raises(UsageError, match="is that the URL of a vLLM server"):
        describe([f"{server.url}/elsewhere"], None)
