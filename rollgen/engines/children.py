"""Runs inside vLLM's child processes, as a `vllm.general_plugins` entry point: they never outlive rollgen.

The kernel kills each child when the process that started it dies, whatever it died of: otherwise a `kill -9` of rollgen
leaves the engine on the GPU. And each child has a process group of its own, so that signals to rollgen's, like a
terminal's Ctrl-C, are left to rollgen, which commits what is finished and then ends the engine in order.

vLLM loads the plugin wherever rollgen is installed; it does nothing in processes that rollgen did not start.
"""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "_ROLLGEN_ENGINE_PARENT"
"""Process id of the rollgen that starts an engine, inherited by all of the engine's processes."""
_PR_SET_PDEATHSIG = 1
"""`prctl(2)`: the signal to receive when the parent dies."""


def register() -> None:
    """Called by vLLM in each of its processes, the starting one included."""
    rollgen = os.environ.get(PARENT_VARIABLE)
    if rollgen is None or int(rollgen) == os.getpid():
        return
    os.setpgid(0, 0)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
