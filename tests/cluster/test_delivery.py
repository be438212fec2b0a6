"""Shards that replicas send to the driver: each sample is committed once, whatever is sent, and however often."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray
from models.jobs import some_job

from rollgen.cluster.board import Board, Committed, News, Refused
from rollgen.cluster.delivery import Parcels, delivery_of
from rollgen.cluster.receipts import Positions
from rollgen.cluster.slot import Abandoned, Overtaken
from rollgen.cluster.tasks import Task
from rollgen.cluster.workplace import OwnDirectory
from rollgen.config import RunConfig
from rollgen.errors import DatasetError
from rollgen.format.commit import WHOLE, WriterSlot
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.loop.crew import Job
from rollgen.preflight import plan_run
from rollgen.prompts.plan import Plan
from rollgen.remote import workspace
from rollgen.remote.objects import ObjectStore
from rollgen.remote.workspace import Workspace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")

TASK = Task.of(np.arange(10), "attempt")
"""Everything: five prompts, two samples each."""
Send = Callable[..., Any]


@pytest.fixture
def store() -> ObjectStore:
    """Which this process alone can reach."""
    return ObjectStore(f"memory://parcels/{uuid4().hex}")


@pytest.fixture
def job(
    runs: Any,
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_manifest: Callable[..., Manifest],
) -> Iterator[Job]:
    """Of a run into object storage, of which nothing is made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(workspace, "OUTAGE_SECONDS", 0)
    config, manifest = RunConfig.model_validate({"model": str(runs.model), "n": 2}), make_manifest()
    with (
        Workspace(store.url, "w0", note=print, problem_in=lambda directory: lambda table: None) as remote,
        WriterSlot(remote.directory, "w0", WHOLE, remote=remote) as slot,
    ):
        preflight = plan_run([runs.prompts], config, slot.directory / PLAN_FILE)
        with slot.section():
            assert create_manifest(slot.directory, manifest)
        plan = Plan(slot.directory / PLAN_FILE)
        yield some_job(slot, preflight, manifest, plan)


@pytest.fixture
def exchange(job: Job, local_ray: None) -> Iterator[Exchange]:
    """Driver and replicas of the job, and a board between them."""
    exchange = Exchange(job)
    yield exchange
    ray.kill(exchange.board)


class Exchange:
    """`run` a scene of replicas, while the driver commits what they send."""

    def __init__(self, job: Job) -> None:
        delivery = delivery_of(job, Positions(job.owed.plan.offsets, []))
        assert isinstance(delivery, Parcels)
        self.delivery = delivery
        remote: Any = ray.remote(Board)
        self.board = remote.options(num_cpus=0, max_concurrency=100).remote(delivery.materials)
        self.news: list[News] = []

    def run(self, *scene: Callable[[], None]) -> None:
        """Each step in a thread, one after the other; what the driver says of them is in `news` then."""

        def enter(news: Iterable[tuple[str, News]]) -> None:
            self.news += [each for _, each in news]

        async def play() -> None:
            receiving = asyncio.create_task(self.delivery.receive(self.board, enter))
            for step in scene:
                await asyncio.to_thread(step)
            await self.board.close.remote()
            await receiving

        asyncio.run(play())


@pytest.fixture
def write(job: Job, make_completion: Callable[..., Any]) -> Callable[..., None]:
    """`write(place, (prompt_index, sample_index), ...)`: as one shard."""

    def commit(place: Any, *keys: tuple[int, int]) -> None:
        with ShardWriter(place, job.manifest, commit_interval=math.inf) as writer:
            for key in keys:
                writer.add(make_completion(*key))

    return commit


def test_a_sample_that_is_sent_twice_is_stored_once(
    exchange: Exchange, job: Job, store: ObjectStore, write: Any
) -> None:
    """Two replicas make one task. The slower one's shard is dropped whole, and it is told what is there."""

    def scene() -> None:
        first, second = OwnDirectory(exchange.board, "first"), OwnDirectory(exchange.board, "second")
        (one, nothing), (other, _) = first.take_up(TASK), second.take_up(TASK)
        assert len(nothing) == 0
        write(one, (0, 0), (0, 1))
        with pytest.raises(Overtaken):
            write(other, (0, 1), (1, 0))
        again, stored = second.take_up(TASK)
        assert stored.tolist() == [0, 1]
        write(again, (1, 0))
        first.close()
        second.close()

    exchange.run(scene)
    receipts = [news.receipt for news in exchange.news if isinstance(news, Committed)]
    assert len(exchange.news) == len(receipts), "being overtaken is nothing that ends a job"
    assert [receipt.positions.tolist() for receipt in receipts] == [[0, 1], [2]]
    names = ["part-w0-000000.parquet", "part-w0-000001.parquet"]
    assert [receipt.line.file for receipt in receipts] == names == sorted(read_journal(job.slot.directory).committed)
    assert list(store.list("data")) == [f"data/{name}" for name in names]
    assert not list((job.slot.directory / "data").iterdir()), "and nothing waits here"


def test_a_storage_that_fails_for_a_while(exchange: Exchange, job: Job, store: ObjectStore, write: Any) -> None:
    """The name of the first shard is another object's for some time: it waits, and goes before the next one.

    Both who sent then are told, and so is the driver, whose problem ends the run.
    """
    name = "data/part-w0-000000.parquet"

    def scene() -> None:
        place = OwnDirectory(exchange.board, "replica")
        assert store.create(name, b"in the way")
        for keys in ([(0, 0)], [(3, 0)]):
            with pytest.raises(DatasetError, match="is there already and is another file"):
                write(place.take_up(TASK)[0], *keys)
        assert [path.name for path in list_shards(job.slot.directory)] == ["part-w0-000000.parquet"]
        store.delete(name)
        write(place.take_up(TASK)[0], (3, 0))
        place.close()

    exchange.run(scene)
    assert {type(news) for news in exchange.news} == {Refused, Committed}
    receipts = [news.receipt for news in exchange.news if isinstance(news, Committed)]
    assert [receipt.positions.tolist() for receipt in receipts] == [[0], [6]]
    assert len(store.list("data")) == 2
    assert list_shards(job.slot.directory) == []


def test_a_shard_that_arrives_damaged_is_not_stored(exchange: Exchange, store: ObjectStore, write: Any) -> None:
    """One bit of it has another value than when it was sent."""

    class Line:
        """To the driver, with a flaw."""

        def __init__(self, board: Any) -> None:
            self.materials, self.stored = board.materials, board.stored
            self.send = self
            self._board = board

        def remote(self, *arguments: Any) -> Any:
            *before, content = arguments
            return self._board.send.remote(*before, content[:100] + bytes([content[100] ^ 1]) + content[101:])

    def scene() -> None:
        place = OwnDirectory(Line(exchange.board), "replica")
        with pytest.raises(DatasetError, match="arrived damaged"):
            write(place.take_up(TASK)[0], (0, 0))
        place.close()

    exchange.run(scene)
    assert store.list("data") == {}


def test_without_its_driver_nobody_stores_anything(exchange: Exchange, store: ObjectStore, write: Any) -> None:
    """The board ends with the driver; who has sent something, or does so later, is told."""

    def scene() -> None:
        place = OwnDirectory(exchange.board, "replica")
        slot, _ = place.take_up(TASK)
        ray.kill(exchange.board)
        with pytest.raises(Abandoned):
            write(slot, (0, 0))
        place.close()

    scene()
    assert store.list("data") == {}
