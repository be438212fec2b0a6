"""Runs inside vLLM's child processes before anything else: they never outlive rollgen.

The kernel kills each child when the process that started it dies, whatever it died of: otherwise a `kill -9` of rollgen
leaves the engine on the GPU. And each child has a process group of its own, so that signals to rollgen's, like a
terminal's Ctrl-C, are left to rollgen, which commits what is finished and then ends the engine in order.

And what vLLM logs while it is imported, before it has read its own settings, is of the level that they ask for.

Called twice, because neither is always called, or in time: when a spawned child imports rollgen (as it does with the
main module, long before it can wait for a parent that is dead), and as a `vllm.general_plugins` entry point. vLLM loads
the plugin wherever rollgen is installed; it does nothing in processes that rollgen did not start.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

PARENT_VARIABLE = "_ROLLGEN_ENGINE_PARENT"
"""Process id of the process that sets it, inherited by the processes that it starts."""
_PR_SET_PDEATHSIG = 1
"""`prctl(2)`: the signal to receive when the parent dies."""


def register() -> None:
    """Called in each process of vLLM, the starting one included, and in others that inherit its environment."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or int(parent) == os.getpid():
        return
    quiet_imports(os.environ.get("VLLM_LOGGING_LEVEL", ""))
    os.setpgid(0, 0)
    is_spawned = "--multiprocessing-fork" in sys.orig_argv  # else there may be others between it and us
    end_with(int(parent) if is_spawned else os.getppid())
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the processes that this one starts


def end_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies, the process that started it; now, if it has."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before this: no signal will come
        os._exit(1)


def quiet_imports(level: str) -> str:
    """Before vLLM is imported: its loggers drop what is below `level`, which is returned, if that is one."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is not None:
        logging.getLogger("vllm").setLevel(number)
    return level
