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


def test_another_service(server: FakeServer) -> None:
    """A path below the server answers 404."""
    with pytest.raises(UsageError, match="is that the URL of a vLLM server"):
        describe([f"{server.url}/elsewhere"], None)
