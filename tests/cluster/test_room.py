"""What a cluster has room for: two cores and four GPUs here."""

from __future__ import annotations

import pytest
import ray

from rollgen.cluster.room import gpus_per_replica, reserved, room_note, silence_note
from rollgen.config import RunConfig
from rollgen.errors import EngineError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
"""One after the other: clusters of one machine would see each other."""


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
    monkeypatch.setattr("rollgen.cluster.room.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("rollgen.cluster.room.POLL_SECONDS", 0.2)
    other = ray.remote(num_gpus=1)(Job).remote()
    ray.get(other.begin.remote())
    looks = iter([False, False, True])
    with pytest.raises(EngineError, match="interrupted"), reserved(4, lambda: next(looks)):
        pass
    [record] = caplog.records
    room = "a replica takes 4 GPUs of one node, and of all 4 3 are free now"
    assert record.message == f"--ray: waits until the cluster has room: {room}"
    assert silence_note(60, 4) == (
        f"--ray: no sign of life of any replica for 60 s; waits until one starts: {room} (not those of a replica whose "
        "process is starting)"
    )
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
