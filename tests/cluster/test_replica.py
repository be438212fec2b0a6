"""One replica in this process, with a board on a local Ray: what it does when its work is taken from it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rollgen.cluster.board import Alive, Board, Loaded, Reader, Refused, Rested
from rollgen.cluster.engine import EngineSpec
from rollgen.cluster.replica import Orders, Replica
from rollgen.cluster.slot import Employer, TaskSlot
from rollgen.cluster.tasks import Task
from rollgen.config import RunConfig
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards
from rollgen.format.manifest import read_manifest
from rollgen.format.writer import ShardWriter
from rollgen.preflight import Preflight, plan_run
from rollgen.prompts.model import load_model_info

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")

TASK = Task.of(np.arange(10), "attempt")
"""Everything: five prompts, two samples each."""


@pytest.fixture
def preflight(runs: Any, tmp_path: Path) -> Callable[..., Preflight]:
    """`preflight(...)`: of a run with these settings, which may start."""

    def passed(**settings: Any) -> Preflight:
        config = RunConfig.model_validate({"model": str(runs.model), "max_tokens": 8, "top_k": 8, "n": 2} | settings)
        return plan_run([runs.prompts], config, tmp_path / "plan.parquet")

    return passed


@pytest.fixture
def driver(runs: Any) -> Iterator[WriterSlot]:
    """Whoever has tasks made, in a directory with plan and manifest."""
    runs()
    with WriterSlot(runs.out, "w0") as slot:
        yield slot


@pytest.fixture
def board(local_ray: None) -> Iterator[Any]:
    """That of the driver."""
    remote: Any = ray.remote(Board)
    board = remote.options(name="board", num_cpus=0).remote({})
    yield board
    ray.kill(board)


@pytest.fixture
def make_replica(driver: WriterSlot, board: Any, preflight: Callable[..., Preflight]) -> Callable[[str], Replica]:
    """`make_replica(engine)`: with this one of `models.cluster_engines`, which makes eight samples at a time."""

    def make(engine: str) -> Replica:
        spec = EngineSpec.of(preflight(), f"models.cluster_engines:{engine}")
        return Replica(Orders(spec, Employer(driver.directory, driver.writer, driver.attempt), board="board"))

    return make


@pytest.fixture
def replica(make_replica: Callable[[str], Replica]) -> Replica:
    """A slow one."""
    return make_replica("slow")


async def make(replica: Replica) -> None:
    """Hand it TASK, and wait until it gives it back."""
    assert [batch async for batch in replica(TASK.to_table())]


async def news(board: Any, wanted: type) -> Any:
    """Wait for news of this kind."""
    reader = Reader(board)
    while True:
        for _, each in await reader.news():
            if isinstance(each, wanted):
                return each
        await asyncio.sleep(0.02)


def test_a_stop_counts_also_where_another_process_was_faster(
    make_replica: Callable[[str], Replica], board: Any, driver: WriterSlot, make_completion: Callable[..., Any]
) -> None:
    """What is finished cannot be committed then: it is dropped, and the rest is not made."""
    before = list_shards(driver.directory)

    async def scene() -> None:
        making = asyncio.create_task(make(make_replica("stuck")))
        await news(board, Loaded)
        await asyncio.sleep(0.4)  # eight samples are finished and wait for their commit
        employer = Employer(driver.directory, driver.writer, driver.attempt)
        place = TaskSlot(employer, TASK.name, lambda path, line: None)
        with ShardWriter(place, read_manifest(driver.directory), commit_interval=60) as writer:
            writer.add(make_completion(0, 0))
        await board.stop.remote()
        await asyncio.wait_for(making, 180)

    asyncio.run(scene())
    [added] = set(list_shards(driver.directory)) - set(before)
    assert added.name == f"part-{TASK.name}-000000.parquet"


def test_signs_of_life_while_the_engine_loads(make_replica: Callable[[str], Replica], board: Any) -> None:
    """For ever: one sign after the other, and a stop counts."""

    async def scene() -> list[Any]:
        making = asyncio.create_task(make(make_replica("loading")))
        reader = Reader(board)
        told: list[Any] = []
        while told.count(Alive()) < 3:
            told += [each for _, each in await reader.news()]
            await asyncio.sleep(0.02)
        await board.stop.remote()
        await asyncio.wait_for(making, 180)
        await news(board, Rested)
        return told

    assert Loaded() not in asyncio.run(asyncio.wait_for(scene(), 180))


def test_locks_that_do_not_reach_this_node_are_named(replica: Replica, board: Any, driver: WriterSlot) -> None:
    """The driver is there, but its lock is not held as far as can be seen here: another file stands for that."""
    path = driver.directory / "journal" / "w0.lock"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)

    async def scene() -> Refused:
        await asyncio.wait_for(make(replica), 180)
        return await news(board, Refused)

    refused = asyncio.run(scene())
    assert "the lock of the run's writer is not seen" in str(refused.error)
    assert "(flock) of its file system do not reach other nodes" in str(refused.error)


def test_what_a_node_cannot_write_is_told_with_its_name(replica: Replica, board: Any, driver: WriterSlot) -> None:
    """A file where the shards should go stands for a full disk: the same path is another one on each node."""
    data = driver.directory / "data"
    data.rename(driver.directory / "elsewhere")
    data.touch()

    async def scene() -> Refused:
        await asyncio.wait_for(make(replica), 180)
        return await news(board, Refused)

    refused = asyncio.run(scene())
    assert str(refused.error).startswith(f"{data}/.tmp-")
    assert str(refused.error).endswith(f": cannot be written: Not a directory (on {socket.gethostname()})")


def test_a_replica_needs_nothing_of_how_prompts_were_read(preflight: Callable[..., Preflight], tmp_path: Path) -> None:
    """Another node has no such template file."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    asked = preflight(chat_template=str(template), chat=True, system_prompt="Be brief", limit=3)
    spec = EngineSpec.of(asked, "models.cluster_engines:healthy")
    template.unlink()
    assert load_model_info(spec.config, spec.model).fingerprint == spec.fingerprint
    assert (spec.config.chat, spec.config.system_prompt, spec.config.limit) == (False, None, None)
    assert (spec.config.n, spec.config.top_k) == (2, 8)


def test_replicas_start_without_what_a_preflight_takes() -> None:
    """Seconds, each time Ray starts one."""
    program = "import sys, rollgen.cluster.replica; print({'transformers', 'torch', 'vllm'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
