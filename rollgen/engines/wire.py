"""One server's HTTP: a request out, an answer back, and every way in which that fails as one of three exceptions.

    Unreachable   no whole answer came: refused, reset, closed, broken off, timed out
    Refused       an answer that is not 200, with what the server says of it
    Oversized     an answer longer than was allowed for

A connection that has been idle for `KEEP_ALIVE_SECONDS` is not used again, because vLLM closes idle ones after five. A
long one stays open however long its answer takes: there is no bound on that, and the kernel's probes keep routers from
forgetting it. Redirects are not followed, proxies of the environment not used: what the API key is sent to is the
server that was named. No message holds the key, or names the server.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp
import orjson

from rollgen.engines.address import Address, redacted
from rollgen.errors import EngineError
from rollgen.inert import brief

KEEP_ALIVE_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 10.0
GET_SECONDS: Final = 10.0
"""For an answer that needs no model."""
MAX_PAGE: Final = 16 << 20
"""Bytes of an answer to a GET: the metrics and the schema of vLLM's API have some 100 KB."""
MAX_EXPLANATION: Final = 1 << 16
"""Bytes read of what comes with an error."""
MAX_RETRY_AFTER: Final = 60.0
POLL_SECONDS: Final = 0.2
"""Between two looks whether an answer is still wanted."""
_KEEP_ALIVE_PROBES: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""Seconds until the first, between them, and how many may stay unanswered."""

T = TypeVar("T")


class Unreachable(Exception):
    """No whole answer came."""


class Oversized(Exception):
    """The answer is longer than it may be."""


class Refused(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: float = 0.0) -> None:
        super().__init__(f"{status}: {message}" if message else str(status))
        self.status = status
        self.message = message
        """What the server says, on one line."""
        self.param = param
        """The field of the request that vLLM does not like, if it names one."""
        self.retry_after = retry_after
        """Seconds that the server asks to be left alone."""


class Wire:
    """A pool of connections to one server. Made, used and closed in one event loop."""

    def __init__(self, address: Address, *, connections: int = 4) -> None:
        self._address = address
        headers = {} if address.authorization is None else {"Authorization": address.authorization}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(
                limit=connections, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_patient_socket
            ),
        )

    async def get(self, path: str) -> bytes:
        """The answer's body. Raises Unreachable after GET_SECONDS at the latest, Refused and Oversized."""
        try:
            async with asyncio.timeout(GET_SECONDS):
                return await self._request("GET", path, MAX_PAGE)
        except TimeoutError:
            raise Unreachable(f"it did not answer within {GET_SECONDS:g} s") from None

    async def post(self, path: str, body: bytes, *, most: int, request_id: str) -> bytes:
        """The answer's body of at most `most` bytes, however long it takes. Cancelling it closes the connection."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        return await self._request("POST", path, most, data=body, headers=headers)

    async def close(self) -> None:
        """Close all connections. Requests in flight fail as Unreachable."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _request(self, method: str, path: str, most: int, **content: Any) -> bytes:
        url = self._address.base + path
        try:
            async with self._session.request(method, url, allow_redirects=False, **content) as response:
                if response.status == 200:
                    return await _read(response, most)
                raise await self._refusal(response)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise Unreachable(_reason(error)) from None

    async def _refusal(self, response: aiohttp.ClientResponse) -> Refused:
        if "Location" in response.headers:
            target = self._address.conceal(brief(redacted(response.headers["Location"])))
            return Refused(response.status, f"it redirects to {target}, which is not followed")
        message, param = explanation(await response.content.read(MAX_EXPLANATION))
        message = self._address.conceal(message)
        return Refused(response.status, message, param=param, retry_after=_retry_after(response))


def run_apart(coroutine: Coroutine[Any, Any, T], given_up: Callable[[], bool] = lambda: False) -> T:
    """Run it to the end in an event loop of its own: in this thread, or in another where this one has a loop.

    Raises EngineError, and cancels it, as soon as `given_up` says that it is not wanted any more.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_until(given_up, coroutine))
    left = threading.Event()
    watched = _until(lambda: left.is_set() or given_up(), coroutine)
    with ThreadPoolExecutor(1) as threads:
        try:
            return threads.submit(copy_context().run, asyncio.run, watched).result()
        finally:
            left.set()


async def _until(given_up: Callable[[], bool], coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, unless it is given up before it ends."""
    task = asyncio.ensure_future(coroutine)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_SECONDS)
            if not task.done() and given_up():
                raise EngineError("interrupted while a server was waited for")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def explanation(body: bytes) -> tuple[str, str | None]:
    """What a body says of an error, on one line, and the field that is wrong: vLLM's, FastAPI's, or any text."""
    text = body.decode(errors="replace")
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _one_line(re.sub(r"<[^>]*>", " ", text)), None  # a proxy's page
    if not isinstance(told, dict):
        return _one_line(text), None
    error = told.get("error", told.get("detail", told.get("message")))
    if isinstance(error, str):
        return _one_line(error), None
    message = error.get("message") if isinstance(error, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    return _one_line(message if isinstance(message, str) else text), param if isinstance(param, str) else None


def _one_line(text: str) -> str:
    return brief(" ".join(text.split()))


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, decompressed; no more of it than `most` bytes and a little is ever in memory."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            raise Oversized(f"the answer has more than the {most} bytes that it may need")
    return bytes(body)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds; a date counts as none."""
    try:
        seconds = float(response.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER) if math.isfinite(seconds) else 0.0


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Why no answer came. Not the exception's own words, which name the host."""
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return "its certificate is not valid here, or it does not speak TLS"
        case aiohttp.ClientConnectorDNSError():
            return "its host name is not known"
        case TimeoutError():
            return "it could not be connected to in time"
        case aiohttp.ClientPayloadError():
            return "its answer broke off"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection"
        case OSError() if error.errno:  # not its strerror: asyncio puts the address there
            return os.strerror(error.errno).lower()
        case aiohttp.ClientConnectorError():  # to each of several addresses
            return "it could not be connected to"
        case _:
            return f"no HTTP answer came ({type(error).__name__})"


def _patient_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose connection is probed while nothing is sent for minutes."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE_PROBES:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
