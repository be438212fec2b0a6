"""SIGINT, SIGTERM, SIGHUP: the work is cancelled, what is finished is committed, and the run ends as `Interrupted`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from types import FrameType
from typing import Any, Self, TypeVar

from rollgen.errors import EngineError, RollgenError

SIGNAL_GRACE_SECONDS = 1.0
"""A terminal's Ctrl-C reaches the engine process too, which may die before our own signal is seen."""

Result = TypeVar("Result")

_CURRENT: ContextVar[Stop | None] = ContextVar("stop", default=None)


class Interrupted(RollgenError):
    """SIGINT, SIGTERM or SIGHUP arrived; what was finished is committed, unless there was a `problem`."""

    def __init__(self, signal_number: int, stored: int | None = None, problem: BaseException | None = None) -> None:
        """`stored`: samples that this attempt has committed, where that is known and nothing went wrong."""
        name = signal.Signals(signal_number).name
        super().__init__(f"interrupted by {name}; {_committed(stored, problem)}, --resume continues")
        self.signal_number = signal_number
        self.problem = problem


def _committed(stored: int | None, problem: BaseException | None) -> str:
    if problem is not None:
        return f"the samples that were finished last could not be committed: {problem}"
    if stored is None:
        return "finished samples are committed"
    if stored == 0:
        return "no sample was finished, and nothing new is stored"
    return f"{stored:,} finished sample{' is' if stored == 1 else 's are'} committed"


def is_stopping() -> bool:
    """Whether the run that this is called for is to stop: for what waits in a thread, which nobody can cancel."""
    current = _CURRENT.get()
    return current is not None and current.signal_number != 0


class Stop:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a flag; a second one ends the process at once, but for SIGHUP,
    which a terminal that goes sends twice. SIGHUP that is ignored (`nohup`) stays so. Use as a context manager.

    Python delivers signals to the main thread only: a run in another thread is left to the program around it. The
    handlers are Python's, not the event loop's, so that the second signal counts also while the loop waits for
    something that blocks. So are the calls of those who are `told`, and may be what it waits for.
    """

    def __init__(self, told: Sequence[Callable[[], None]] = ()) -> None:
        self._told = told
        self._event = asyncio.Event()
        self._before: dict[int, Any] = {}
        self._wakes = ExitStack()
        self.signal_number = 0

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        if threading.current_thread() is threading.main_thread():
            self._loop = asyncio.get_running_loop()
            hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])):
                self._before[number] = signal.signal(number, self._arrived)
            self._wakes = self._wake_on_signals()
        return self

    def __exit__(self, *exc: object) -> None:
        _CURRENT.reset(self._token)
        self._wakes.close()
        for number, handler in self._before.items():
            if handler is not None:  # None: not installed from Python, so that Python cannot put it back
                signal.signal(number, handler)

    def _wake_on_signals(self) -> ExitStack:
        """Have each signal wake the loop until this is closed, whichever thread it interrupts: the loop may just be
        falling asleep, which no handler of Python's can know."""
        read, write = socket.socketpair()
        with ExitStack() as on_error:
            for end in (read, write):
                end.setblocking(False)
                on_error.callback(end.close)
            self._loop.add_reader(read, read.recv, 4096)
            on_error.callback(self._loop.remove_reader, read)
            before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
            on_error.callback(signal.set_wakeup_fd, before)
            return on_error.pop_all()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGHUP:
            return
        if self.signal_number:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + number)
        self.signal_number = number
        for tell in self._told:
            tell()
        self._loop.call_soon_threadsafe(self._event.set)

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` until it ends, or cancel it when a signal arrives. Raises Interrupted then."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), EngineError):
                await asyncio.wait({stopped}, timeout=SIGNAL_GRACE_SECONDS)
            if self.signal_number:
                task.cancel()
                await asyncio.wait({task})
                raise Interrupted(self.signal_number, problem=_problem(task)) from None
            return task.result()
        finally:
            stopped.cancel()

    async def in_thread(self, call: Callable[[], Result]) -> Result:
        """Run `call` in a thread to its end: nobody can cancel it, so it has to ask `is_stopping` wherever it waits.

        Raises Interrupted when a signal has arrived meanwhile, whatever came of it.
        """
        running = asyncio.ensure_future(asyncio.to_thread(call))
        await asyncio.wait({running})
        if self.signal_number:
            running.exception()  # mostly that it has given up
            raise Interrupted(self.signal_number)
        return running.result()


def _problem(task: asyncio.Task[Any]) -> BaseException | None:
    """What went wrong at the end of a task that was cancelled, but for engines: a terminal's Ctrl-C ends them too."""
    problem = None if task.cancelled() else task.exception()
    return None if isinstance(problem, EngineError) else problem
