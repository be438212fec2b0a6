"""Ports of 127.0.0.1 for servers that go and come back, or are long in coming."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def listening() -> socket.socket:
    """On a port that nobody is given by the system, nor by Ray, while its server is away."""
    while True:
        with suppress(OSError):  # somebody has it
            return socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000)))


def free_port() -> int:
    """A port for a server that cannot be given a socket."""
    with listening() as free:
        return int(free.getsockname()[1])


@contextmanager
def kept_port() -> Iterator[int]:
    """A port for servers that come and go, which is given to nobody else meanwhile."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]
