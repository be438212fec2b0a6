"""Ports of 127.0.0.1 for servers that go and come back, or are long in coming."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def listening() -> socket.socket:
    """On a port that nobody is given by the system, nor by Ray, while its server is away."""
    while True:
        with suppress(OSError):  # somebody has it
            return socket.create_server(("127.0.0.1", random.randrange(20_000, 32_000)))


def free_port() -> int:
    """A port for a server that cannot be given a socket."""
    with listening() as free:
        return int(free.getsockname()[1])
