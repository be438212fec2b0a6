"""Signals that are held back take effect afterwards; those that are ignored, and other threads, are left alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from rollgen.curate.uninterrupted import uninterrupted

Handler = Callable[[int, FrameType | None], object]


@pytest.fixture
def handle() -> Iterator[Callable[[signal.Signals, Handler | signal.Handlers], None]]:
    """`handle(number, handler)`, for one test."""
    before = {}

    def install(number: signal.Signals, handler: Handler | signal.Handlers) -> None:
        before[number] = signal.signal(number, handler)

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_counts_afterwards(handle: Callable[..., None], number: signal.Signals) -> None:
    """Once, by the handler that there was, which is there again."""
    handle(number, signal.default_int_handler)
    done = []

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(number) is signal.default_int_handler


def test_an_error_is_not_lost(handle: Callable[..., None]) -> None:
    """It is the context of what the signal raises."""
    handle(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            raise OSError("disk full")

    with pytest.raises(KeyboardInterrupt) as raised:
        work()
    assert isinstance(raised.value.__context__, OSError)


def test_what_is_ignored_stays_so(handle: Callable[..., None]) -> None:
    """As under `nohup`."""
    handle(signal.SIGHUP, signal.SIG_IGN)
    with uninterrupted():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGHUP)


def test_in_another_thread() -> None:
    """Handlers cannot be set there, and run in the main thread only."""
    done = []

    def work() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_every_signal_counts(handle: Callable[..., None]) -> None:
    """The second one too, though the handler of the first one raises; all handlers are there again."""
    heard = []
    handle(signal.SIGTERM, lambda number, frame: heard.append(number))
    handle(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
