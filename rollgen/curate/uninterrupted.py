"""Signals that end a process, held back while what is on disk is neither what was there nor what will be."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

_SIGNALS: Final[tuple[int, ...]] = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP that arrive meanwhile take effect afterwards: for what takes but an instant.

    Those that are ignored stay so. Python has handlers in the main thread only: in others this does nothing, and
    nothing but the default action of a signal can end them.
    """
    arrived: list[int] = []
    with ExitStack() as after:
        after.callback(_raise, arrived)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: not installed from Python, which cannot put it back
                    after.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, frame: arrived.append(number))
        yield


def _raise(numbers: list[int]) -> None:
    """Each once, whatever the handler of another one raises."""
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise([number for number in numbers if number != numbers[0]])
