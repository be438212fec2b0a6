"""What Ray itself knows of a replica, and does to it. Its name is the id of its actor.

By that id: a handle of our own would keep alive those whom Ray Data lets go.
"""

from __future__ import annotations

from typing import Final

import ray
from ray._private import state
from ray._private.worker import global_worker

_RUNS: Final = "ALIVE"
_GONE: Final = "DEAD"


def is_gone(replica: str) -> bool:
    """Whether it is never started again: Ray Data lets go of those for whom it has no task left."""
    return _state(replica) == _GONE


def end_process(replica: str) -> None:
    """End its process, which need not answer, and have it started again. Nothing where it waits for that already."""
    if _state(replica) == _RUNS:
        global_worker.core_worker.kill_actor(ray.ActorID.from_hex(replica), False)  # type: ignore[attr-defined]


def _state(replica: str) -> str:
    """In Ray's words. It may forget who is gone."""
    found: dict[str, str] = state.actors(replica)
    return found.get("State", _GONE)
