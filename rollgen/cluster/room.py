"""What a cluster has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollgen.cluster.waiting import POLL_SECONDS, Patience
from rollgen.config import RunConfig
from rollgen.errors import UsageError

REPLICA_CPUS: Final = 0.25
"""That a replica reserves. Ray Data needs some too, and hangs in silence when replicas have taken all."""
PATIENCE_SECONDS: Final = 10.0
"""For room on the cluster, after which the user is told."""


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


def silence_note(seconds: float, gpus: int) -> str:
    """What to say when no replica has been heard of for so long: there may be no room for one, or one just starts."""
    return (
        f"--ray: no sign of life of any replica for {seconds:.0f} s; waits until one starts: {_demand(gpus)} "
        "(not those of a replica whose process is starting)"
    )


def _demand(gpus: int) -> str:
    """What a replica takes, and what there is."""
    name, wanted = ("GPU", gpus) if gpus else ("CPU", REPLICA_CPUS)
    available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return (
        f"a replica takes {wanted:g} {name}s of one node, and of all {sum(_resource(name)):g} "
        f"{available.get(name, 0):g} are free now"
    )


@contextmanager
def reserved(gpus: int, given_up: Callable[[], bool]) -> Iterator[PlacementGroupSchedulingStrategy]:
    """Room for one replica, for as long as this is entered; what still runs there then is ended.

    Waits for it, and says so in the log, until `given_up` says that it is not wanted any more: raises EngineError then.
    """
    bundle = {"CPU": REPLICA_CPUS} | ({"GPU": float(gpus)} if gpus else {})
    room = placement_group([bundle])
    try:
        patience = Patience(
            PATIENCE_SECONDS, given_up, lambda: f"--ray: waits until the cluster has room: {_demand(gpus)}"
        )
        while not room.wait(POLL_SECONDS):
            patience.wait()
        yield PlacementGroupSchedulingStrategy(room)
    finally:
        remove_placement_group(room)


def _resource(name: str) -> list[float]:
    """How much of it each node has, taken or not."""
    return [float(node["Resources"].get(name, 0)) for node in _nodes()]


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]
