"""What Ray does to an actor whose process stands still, and what it knows of one that was let go."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import ray

from rollgen.cluster.actors import end_process, is_gone

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
"""One after the other: clusters of one machine would see each other."""


class Worker:
    """Of Ray, as Ray Data has its replicas."""

    def process(self) -> int:
        """Its number."""
        return os.getpid()


def test_the_end_of_a_process_and_of_an_actor(local_ray: None) -> None:
    """Stopped, its process is ended, and another one answers. Without a handle there is no other one."""
    remote: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Worker)
    actor = remote.remote()
    name, process = actor._actor_id.hex(), ray.get(actor.process.remote())
    os.kill(process, signal.SIGSTOP)
    assert not is_gone(name)
    end_process(name)
    assert ray.get(actor.process.remote(), timeout=180) != process
    assert not is_gone(name)
    del actor
    deadline = time.monotonic() + 180
    while not is_gone(name):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    end_process(name)
