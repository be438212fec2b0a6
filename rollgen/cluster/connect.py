"""Joining a Ray cluster, or starting a local one; and leaving it again."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, Final

import ray

from rollgen.cluster.address import AUTO, LOCAL, check, resolve
from rollgen.cluster.waiting import POLL_SECONDS, refuse_if
from rollgen.errors import UsageError

LOCAL_STORE_BYTES: Final = 128 << 20
"""Of shared memory for a Ray that is started here: it carries tasks, and shards for object storage, not for long. What
does not fit goes to the disk."""
LEAVE_SECONDS: Final = 5.0
"""For Ray to come to itself when it is not wanted any more before it is there. Then it is left to the end of this
process."""
_START: Final = "its logs may say why (/tmp/ray/session_latest/logs, unless RAY_TMPDIR says where)"
_JOIN: Final = f"run this on a node of a cluster (`ray start`), give the address of its head, or use --ray {LOCAL}"
"""What can be done where Ray cannot start, and where it cannot join."""
_LIBC: Final = ctypes.CDLL(None)
_SIGACTION_BYTES: Final = 256
"""More than a `struct sigaction` has on any Linux."""


def connect(address: str, given_up: Callable[[], bool] = lambda: False) -> ExitStack:
    """Join the cluster at `address`, or start one here; closing what this returns leaves it again.

    Where this process has joined one already, that is used, and not left. Raises UsageError with the fix when there is
    no cluster, and EngineError soon after `given_up` says so, whatever Ray does. Standard output is for data, and Ray
    tells there what its nodes tell: to standard error with it.
    """
    if ray.is_initialized():
        return ExitStack()
    found = resolve(address)
    if found is not None:
        check(found, given_up)
        settings: dict[str, Any] = {"address": address if address == AUTO else found.place}
    else:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # not Ray's 15: engines are no work for the background
        settings = {"address": LOCAL, "include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    with ExitStack() as on_error:
        on_error.enter_context(redirect_stdout(sys.stderr))
        stay = _Stay(settings)
        stay.start()
        on_error.callback(stay.leave)
        stay.wait(given_up)
        if (error := stay.error) is not None:
            raise UsageError(f"--ray {address}: {_told(error)}; {_START if found is None else _JOIN}") from error
        return on_error.pop_all()


class _Stay(threading.Thread):
    """Ray in this process, from joining to leaving.

    A thread of its own, which nobody has to wait for: Ray tries for long, in C++, where no signal reaches it. And one
    that lives as long as what it has started here, which the kernel ends with it.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(name="rollgen-ray-stay", daemon=True)
        self._settings = settings
        self._is_settled = threading.Event()
        self._is_over = threading.Event()
        self.error: Exception | None = None
        """What Ray has raised: of any class, `Exception` itself too."""

    def run(self) -> None:
        """Until `leave`."""
        try:
            with _kept_signals():
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **self._settings)
        except Exception as error:  # noqa: BLE001  whatever it is, it is told where it is waited for
            self.error = error
        self._is_settled.set()
        self._is_over.wait()
        ray.shutdown()

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Until it has joined, or there is an `error`. Raises EngineError when it is not wanted any more."""
        while not self._is_settled.wait(POLL_SECONDS):
            refuse_if(given_up)

    def leave(self) -> None:
        """Safe to call at any time. Where it has not even joined, Ray may be left trying."""
        self._is_over.set()
        self.join(None if self._is_settled.is_set() else LEAVE_SECONDS)


def _told(error: Exception) -> str:
    """One line: what Ray says, and what it says was the cause."""
    told = " ".join(str(error).split())
    cause = str(error.__cause__ or "").strip().partition("\n")[0]
    return f"{told}: {cause}" if cause else told


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Ray ends the process on SIGTERM, at once, beneath Python, as for a crash: that is not for Ray to decide."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _LIBC.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        _LIBC.sigaction(signal.SIGTERM, action, None)
