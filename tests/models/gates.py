"""A way to a server that is closed behind the first client, without a word."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def gate(server: str) -> Iterator[str]:
    """host:port that leads to this server until the first client that has said something has gone.

    From then on connections are accepted, and nothing is answered.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, server), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, server: str) -> None:
    host, _, port = server.rpartition(":")
    is_closed, kept = threading.Event(), []
    with suppress(OSError):  # the listener is closed
        while True:
            client, _ = listener.accept()
            if is_closed.is_set():
                kept.append(client)
                continue
            upstream = socket.create_connection((host, int(port)))
            threading.Thread(target=_pump, args=(upstream, client), daemon=True).start()
            threading.Thread(target=_pump, args=(client, upstream, is_closed), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, said_and_gone: threading.Event | None = None) -> None:
    """Pass on what comes, until it ends."""
    is_used = False
    with suppress(OSError), source, sink:
        while content := source.recv(1 << 16):
            is_used = True
            sink.sendall(content)
    if is_used and said_and_gone is not None:
        said_and_gone.set()
