"""Joining a cluster, and what it has room for: two cores and four GPUs here."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from rollgen.cluster.connect import connect, gpus_per_replica, reserved, room_note
from rollgen.config import RunConfig
from rollgen.errors import EngineError, UsageError

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"), pytest.mark.xdist_group("ray")]
"""One after the other: clusters of one machine would see each other."""


def test_a_client_is_told_to_come_to_the_cluster() -> None:
    """It would commit into its own file system."""
    with pytest.raises(UsageError, match=r"--ray ray://head:10001: .*ray job submit"):
        connect("ray://head:10001")


def test_no_cluster_here() -> None:
    """In a process of its own, where none has been joined. Ray looks for one among all processes of the machine."""
    if any(process.name() == "gcs_server" for process in psutil.process_iter()):
        pytest.skip("a Ray cluster runs here")
    program = "\n".join(
        (
            "from rollgen.cluster.connect import connect",
            "from rollgen.errors import UsageError",
            "try: connect('auto')",
            "except UsageError as error: print(error)",
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"RAY_TMPDIR": "/tmp/none"}, capture_output=True, text=True
    )
    assert "--ray auto: Could not find any running Ray instance" in ended.stdout, "and standard output is put back"
    assert "start a cluster with `ray start --head`" in ended.stdout


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no.such.host.invalid:6379", "127.0.0.1:port"])
def test_nobody_at_an_address(address: str) -> None:
    """Told within seconds: Ray itself would try for ever."""
    with pytest.raises(UsageError, match=f"^--ray {address}: no cluster answers there: "):
        connect(address)


def test_a_cluster_that_was_joined_before_is_not_left(local_ray: None) -> None:
    """It is its user's."""
    import ray

    connect("local").close()
    assert ray.is_initialized()


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        pytest.param({}, 1, id="one"),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4, id="product of the sizes"),
        pytest.param({"tensor_parallel_size": 2, "gpus_per_replica": 3}, 3, id="as told"),
        pytest.param({"gpus_per_replica": 0}, 0, id="none"),
    ],
)
def test_gpus_of_a_replica(local_ray: None, settings: dict[str, int], gpus: int) -> None:
    """What the parallel sizes need, unless told otherwise."""
    assert gpus_per_replica(RunConfig.model_validate(settings)) == gpus


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"tensor_parallel_size": 8}, "the parallel sizes ask for 8 GPUs a replica: no node", id="sizes"),
        pytest.param({"gpus_per_replica": 5}, "--gpus-per-replica 5: no node .* more than 4 GPUs", id="as told"),
    ],
)
def test_more_gpus_than_any_node_has(local_ray: None, settings: dict[str, int], message: str) -> None:
    """Ray would wait for ever."""
    with pytest.raises(UsageError, match=message):
        gpus_per_replica(RunConfig.model_validate(settings))


def test_room_for_one_is_waited_for(
    local_ray: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job has one of four GPUs: said once, and whoever waits can give up. Then there is room, and again."""
    import ray

    monkeypatch.setattr("rollgen.cluster.connect.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("rollgen.cluster.connect.POLL_SECONDS", 0.2)
    other = ray.remote(num_gpus=1)(Job).remote()
    ray.get(other.begin.remote())
    looks = iter([False, False, True])
    with pytest.raises(EngineError, match="interrupted"), reserved(4, lambda: next(looks)):
        pass
    [record] = caplog.records
    assert "a replica takes 4 GPUs of one node, and of all 4 3 are free now" in record.message
    ray.kill(other)
    for _ in range(2):
        with reserved(4, lambda: False) as room:
            ours = ray.remote(num_gpus=4, scheduling_strategy=room, num_cpus=0.25)(Job).remote()
            ray.get(ours.begin.remote())


class Job:
    """Of somebody else, or ours."""

    def begin(self) -> None:
        """It has its GPUs."""


def test_room(local_ray: None) -> None:
    """Four GPUs hold two replicas of two; two cores hold eight replicas, which take a quarter each."""
    assert room_note(2, 2) is None
    assert room_note(8, 0) is None
    assert "the cluster has 4 GPUs on 1 nodes, room for 2 replicas" in (room_note(3, 2) or "")
    assert "the cluster has 2 CPUs on 1 nodes, room for 8 replicas" in (room_note(9, 0) or "")
