"""Joining a Ray cluster, or starting a local one, and what it has room for."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, Final

# Read by Ray when it is imported, and when it starts: after a lost connection it must not start a cluster of its own,
# and it writes to our standard error what it takes for an error.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollgen.config import RunConfig
from rollgen.errors import EngineError, UsageError

LOCAL: Final = "local"
LOCAL_STORE_BYTES: Final = 128 << 20
"""Of shared memory for a Ray that is started here: it carries tasks, and shards for object storage, not for long. What
does not fit goes to the disk."""
REPLICA_CPUS: Final = 0.25
"""That a replica reserves. Ray Data needs some too, and hangs in silence when replicas have taken all."""
POLL_SECONDS: Final = 1.0
"""Between two looks at whether a wait is still wanted."""
PATIENCE_SECONDS: Final = 10.0
"""For room on the cluster, after which the user is told."""
CONNECT_SECONDS: Final = 10.0
_LIBC: Final = ctypes.CDLL(None)
_SIGACTION_BYTES: Final = 256
"""More than a `struct sigaction` has on any Linux."""
_LOG: Final = logging.getLogger("rollgen")


def _check_address(address: str) -> None:
    """Raise UsageError for one at which nobody answers: Ray would try again for ever."""
    host, colon, port = address.rpartition(":")
    if not colon:  # auto, local
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--ray {address}: no cluster answers there: {error}; give host:port of its head, auto, or local"
        ) from None


def connect(address: str) -> ExitStack:
    """Join the cluster at `address`, or start one here; closing what this returns leaves it again.

    Where this process has joined one already, that is used, and not left. Raises UsageError with the fix when there is
    no cluster. Standard output is for data, and Ray tells there what its nodes tell: to standard error with it.
    """
    if address.startswith("ray://"):
        raise UsageError(
            f"--ray {address}: a client cannot commit shards; start rollgen on a node of the cluster, for example with "
            "`ray job submit`"
        )
    if ray.is_initialized():
        return ExitStack()
    _check_address(address)
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started: dict[str, Any] = {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    with ExitStack() as on_error:
        on_error.enter_context(redirect_stdout(sys.stderr))
        on_error.callback(ray.shutdown)
        try:
            with _kept_signals():
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **(started if address == LOCAL else {}),
                )
        except (ConnectionError, ValueError, RuntimeError, OSError, RayError) as error:
            raise UsageError(
                f"--ray {address}: {' '.join(str(error).split())}; start a cluster with `ray start --head`, give its "
                f"address, or use --ray {LOCAL}"
            ) from error
        return on_error.pop_all()


def gpus_per_replica(config: RunConfig) -> int:
    """GPUs that each replica is to have. Raises UsageError when no node has so many."""
    largest = int(max(_resource("GPU"), default=0))
    if config.gpus_per_replica is not None:
        wanted, whose = config.gpus_per_replica, f"--gpus-per-replica {config.gpus_per_replica}"
    else:
        sizes = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
        wanted, whose = (sizes if largest else 0), f"the parallel sizes ask for {sizes} GPUs a replica"
    if wanted > largest:
        raise UsageError(f"{whose}: no node of the cluster has more than {largest} GPUs")
    return wanted


def room_note(replicas: int, gpus: int) -> str | None:
    """What to say when the cluster has no room for so many replicas now."""
    room = int(sum(free // gpus for free in _resource("GPU")) if gpus else sum(_resource("CPU")) // REPLICA_CPUS)
    if room >= replicas:
        return None
    what = f"{sum(_resource('GPU')):g} GPUs" if gpus else f"{sum(_resource('CPU')):g} CPUs"
    return (
        f"--replicas {replicas}: the cluster has {what} on {len(_nodes())} nodes, room for {room} replicas; the others "
        "start when there is room"
    )


def waiting_note(gpus: int) -> str:
    """What to say when there is no room for even one replica."""
    name, wanted = ("GPU", gpus) if gpus else ("CPU", REPLICA_CPUS)
    available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return (
        f"--ray: waits until the cluster has room: a replica takes {wanted:g} {name}s of one node, and of all "
        f"{sum(_resource(name)):g} {available.get(name, 0):g} are free now"
    )


@contextmanager
def reserved(gpus: int, given_up: Callable[[], bool]) -> Iterator[PlacementGroupSchedulingStrategy]:
    """Room for one replica, for as long as this is entered; what still runs there then is ended.

    Waits for it, and says so in the log, until `given_up` says that it is not wanted any more: raises EngineError then.
    """
    bundle = {"CPU": REPLICA_CPUS} | ({"GPU": float(gpus)} if gpus else {})
    room = placement_group([bundle])
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not room.wait(POLL_SECONDS):
            refuse_if(given_up)
            if time.monotonic() >= deadline:
                deadline = math.inf
                _LOG.warning(waiting_note(gpus))
        yield PlacementGroupSchedulingStrategy(room)
    finally:
        remove_placement_group(room)


def refuse_if(given_up: Callable[[], bool]) -> None:
    """Raise EngineError when what is waited for is not wanted any more: whoever did has gone on."""
    if given_up():
        raise EngineError("interrupted while the cluster was waited for")


def _resource(name: str) -> list[float]:
    """How much of it each node has, taken or not."""
    return [float(node["Resources"].get(name, 0)) for node in _nodes()]


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Ray ends the process on SIGTERM, at once: that is not for Ray to decide.

    It does so in Python where it is started in the main thread, and beneath Python, as for a crash, everywhere.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _LIBC.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        if in_main and before is not None:  # None: not installed from Python, so that Python cannot put it back
            signal.signal(signal.SIGTERM, before)
        _LIBC.sigaction(signal.SIGTERM, action, None)
