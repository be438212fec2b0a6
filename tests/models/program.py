"""Runs the program of `replayed.py` in processes of its own, forked from one that has imported everything: 0.2 s."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from models import replayed

from rollgen.cli.app import main as rollgen

_PRELOADED = (
    "rollgen.cli.app",
    "rollgen.cli.summary",
    "rollgen.curate.compact",
    "rollgen.inspect.card",
    "rollgen.loop.run",
)
"""What the commands import after they have parsed. Nothing of it has started a thread by then."""
_SECONDS = 300.0
"""Which no command takes: only one that hangs."""


class Finished(NamedTuple):
    """How a process ended."""

    code: int
    """Negative: the number of the signal that ended it."""
    stdout: str
    stderr: str


class Running:
    """A process that was started, the leader of a session."""

    def __init__(self, process: ForkServerProcess, output: tuple[Path, Path]) -> None:
        self._process = process
        self._output = output
        assert process.pid is not None
        self.pid = process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, as a terminal does; nothing when it has ended."""
        with suppress(ProcessLookupError):
            while self.alive and os.getpgid(self.pid) != self.pid:  # it is only just becoming the leader
                time.sleep(0.001)
            os.killpg(self.pid, number)

    def kill(self) -> Finished:
        """End it at once, with all its processes."""
        self.signal_group(signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = _SECONDS) -> Finished:
        """Until it has ended, within this time."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self.signal_group(signal.SIGKILL)
            raise TimeoutError(f"still running after {seconds} s: {self.output}")
        return Finished(self._process.exitcode, *self.output)

    @property
    def output(self) -> tuple[str, str]:
        """stdout and stderr so far."""
        stdout, stderr = (path.read_text() if path.exists() else "" for path in self._output)
        return stdout, stderr


class Program:
    """`program("generate", ...)` runs the command to its end; `start` returns while it runs."""

    def __init__(self, scratch: Path) -> None:
        """Everything temporary goes to `scratch`."""
        self._scratch = scratch
        self._numbers = itertools.count()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOADED))

    def __call__(self, *arguments: object, code: int = 0, **faults: object) -> Finished:
        """Run to the end and check the exit code. `faults` are fields of `replayed.Faults`."""
        finished = self.start(*arguments, **faults).wait()
        assert finished.code == code, f"exit {finished.code}, not {code}\n{finished.stdout}\n{finished.stderr}"
        assert "Traceback" not in finished.stderr, finished.stderr
        return finished

    def start(self, *arguments: object, entry: Callable[[], None] = rollgen, **faults: object) -> Running:
        """Start in a session of its own: `rollgen`, or another program with these arguments."""
        number = next(self._numbers)
        output = (self._scratch / f"{number}.stdout", self._scratch / f"{number}.stderr")
        process = self._context.Process(
            target=replayed.main,
            args=(entry, [*map(str, arguments)], output, self._scratch, replayed.Faults(**faults)),
            daemon=True,
        )
        process.start()
        return Running(process, output)
