"""What HTTP can do to a request, in words that do not name the host, and what is read of answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from threading import Thread

import numpy as np
import orjson
import pytest

from rollgen.engines.address import parse_address
from rollgen.engines.base import SampleRequest
from rollgen.engines.generate_route import largest_answer, read_choice
from rollgen.engines.wire import Refused, Unreachable, Wire, explanation
from rollgen.rollouts import Prompt, Sampling


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A socket on which nobody accepts by itself."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def post(url: str) -> bytes:
    """The answer to an empty request."""

    async def run() -> bytes:
        async with Wire(parse_address(url)) as wire:
            return await wire.post("/x", b"{}", most=100, request_id="1")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("scheme", "answer", "problem"),
    [
        ("http", b"", "it closed the connection"),
        ("http", b"hello\r\n\r\n", "no HTTP answer came"),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "its answer broke off"),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "its answer broke off"),
        ("https", b"HTTP/1.1 200 OK\r\n\r\n", "does not speak TLS"),
    ],
    ids=["nothing", "no HTTP", "short", "short chunk", "no TLS"],
)
def test_no_whole_answer(listening: socket.socket, scheme: str, answer: bytes, problem: str) -> None:
    """Each is Unreachable."""
    port = listening.getsockname()[1]

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            asked = connection.recv(1 << 16)
            while scheme == "http" and not asked.endswith(b"{}"):  # what is left unread would reset the connection
                asked += connection.recv(1 << 16)
            connection.sendall(answer)

    thread = Thread(target=serve)
    thread.start()
    with pytest.raises(Unreachable, match=problem) as caught:
        post(f"{scheme}://127.0.0.1:{port}")
    thread.join()
    assert "127.0.0.1" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://host.invalid", "its host name is not known"),
    ],
)
def test_no_connection(url: str, problem: str) -> None:
    """Nobody listens on port 9; `.invalid` is no domain."""
    with pytest.raises(Unreachable, match=problem) as caught:
        post(url)
    assert "host.invalid" not in str(caught.value)


def test_silence(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GET is not waited for: it needs no model."""
    monkeypatch.setattr("rollgen.engines.wire.GET_SECONDS", 0.1)

    async def get() -> None:
        async with Wire(parse_address(f"http://127.0.0.1:{listening.getsockname()[1]}")) as wire:
            await wire.get("/health")

    with pytest.raises(Unreachable, match=r"within 0.1 s"):
        asyncio.run(get())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "no\\n  such", "param": "top_k", "code": 400}}', ("no such", "top_k")),
        (b'{"error": "Unauthorized"}', ("Unauthorized", None)),
        (b'{"detail": "Not Found"}', ("Not Found", None)),
        (b'{"message": "slow down"}', ("slow down", None)),
        (b"<html><h1>502 Bad Gateway</h1></html>", ("502 Bad Gateway", None)),
        (b"[1]", ("[1]", None)),
        (b"", ("", None)),
        (b"\xff\x1b[31m", ("\ufffd\\x1b[31m", None)),
    ],
)
def test_explanation(body: bytes, expected: tuple[str, str | None]) -> None:
    """On one line, inert, with the field that vLLM names."""
    assert explanation(body) == expected


def test_refused() -> None:
    """Status and words, or the status alone."""
    assert str(Refused(500, "")) == "500"
    assert str(Refused(400, "no")) == "400: no"


def test_largest_answer() -> None:
    """A rollout of 32,768 tokens with 82 logprobs each may have half a gigabyte; 96 bytes a logprob are 264 MB."""
    prompt = Prompt("p", 0, np.zeros(1000, np.int32), Sampling(top_k=50, max_tokens=32_768), 1, 0)
    # 16 MiB + 33,768 x 4,096 + 32,768 x (96 x 84 + 12 x 164)
    assert largest_answer(SampleRequest(prompt, 0), 82) == 483_819_520


def test_clamped_logprobs_are_excluded_ids() -> None:
    """The sampled id is not doubled, and one that is missing among the candidates is put before them."""
    told = [{"token_id": 7, "logprob": -0.0}, {"token_id": 9, "logprob": -9999.0}]
    content = [told[0] | {"top_logprobs": told}, {"token_id": 8, "logprob": -1, "top_logprobs": told[1:]}]
    choice = {"finish_reason": "stop", "token_ids": [7, 8], "logprobs": {"content": content}}
    logprobs = read_choice(orjson.dumps({"choices": [choice]}))["logprobs"]
    assert logprobs["token_ids"] == [7, 9, 8, 9]
    assert logprobs["logprobs"] == [0.0, -np.inf, -1, -np.inf]
    assert logprobs["start_indices"].tolist() == [0, 2]
    assert logprobs["end_indices"].tolist() == [2, 4]
