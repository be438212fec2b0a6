"""The Ray Data actor: one engine, several tasks at once, whose shards go where its workplace says.

A replica lets no error out, which Ray would take for one of the job: what a sample, an engine or a configuration did
wrong is news (`board.py`). When its engine is dead it commits everything that is finished and ends itself, so that Ray
starts it again, elsewhere if need be. Where its driver is gone, or goes on without it, it just ends itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayError

from rollgen.cluster.board import (
    Died,
    Failed,
    Loaded,
    News,
    Refused,
    Resampled,
    Rested,
    Started,
    Warned,
)
from rollgen.cluster.engine import EngineSpec, make_engine
from rollgen.cluster.slot import Abandoned, Employer, Overtaken
from rollgen.cluster.tasks import Task
from rollgen.cluster.waiting import to_the_end
from rollgen.cluster.workplace import Workplace, open_workplace
from rollgen.engines.base import Engine, SampleRequest
from rollgen.errors import DatasetError, EngineError, RollgenError, UnfitEngine
from rollgen.format.failures import Stage
from rollgen.format.writer import ShardWriter
from rollgen.loop.owed import Owed
from rollgen.loop.report import RunStats
from rollgen.loop.sampling import TICK_SECONDS, Sampler
from rollgen.loop.work import Work

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array


@dataclass(frozen=True, slots=True)
class Orders:
    """What a replica is told when it is made."""

    engine: EngineSpec
    employer: Employer | None
    """Whom to ask before it commits anything; None where the driver does that."""
    board: str
    """Name of the Ray actor."""


class Replica:
    """What Ray Data makes an actor of. Called with a table of one task; gives it back when that is over."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._name = str(ray.get_runtime_context().get_actor_id())
        self._board: Any = ray.get_actor(orders.board)
        self._engine: Engine | None = None
        self._workplace: Workplace | None = None
        self._loading: asyncio.Task[tuple[Engine, Workplace]] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._making: set[asyncio.Task[None]] = set()
        self._is_dying = False
        self._resampled = 0

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        """Make one task, or find that there is nothing to be done for it."""
        task = Task.from_table(batch)
        try:
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
                await self._post(Started(f"{socket.gethostname()}, process {os.getpid()}"))
            if await self._board.begin.remote(task.name):
                await self._outlast(asyncio.create_task(self._make(task)))
        except RayError:  # the board is gone, and with it the driver
            self._end()
        yield batch

    def __del__(self) -> None:
        """Ray lets go of the replica of a job that is over before it ends the process."""
        if self._engine is not None:
            self._engine.close()
        if self._workplace is not None:
            self._workplace.close()

    async def _outlast(self, making: asyncio.Task[None]) -> None:
        """Wait until it is over. Never returns where this process is about to end: nothing must seem done by that."""
        self._making.add(making)
        try:
            await asyncio.wait({making})
        finally:
            self._making.discard(making)
        if self._is_dying:
            await asyncio.Event().wait()
        if not making.cancelled():
            making.result()

    async def _watch(self) -> None:
        """Stop when the driver says so: what is finished is committed. Asking for that is the sign of life."""
        try:
            while not await self._board.is_stopping.remote(self._name):
                pass
            await self._cancel(set(self._making))
            await self._post(Rested())
        except RayError:
            self._end()

    async def _make(self, task: Task) -> None:
        """Make what is not stored of a task, whoever else makes it. What goes wrong is news."""
        try:
            engine, workplace = await self._started()
            while await self._is_overtaken(task, engine, workplace):
                pass
        except Abandoned:
            self._end()
        except UnfitEngine as error:
            await self._post(Refused(error))
        except EngineError as error:
            await self._die(error)
        except DatasetError as error:  # which names a file: of this node, for one
            await self._post(Refused(DatasetError(f"{error} (on {socket.gethostname()})")))
        except RollgenError as error:
            await self._post(Refused(error))

    async def _is_overtaken(self, task: Task, engine: Engine, workplace: Workplace) -> bool:
        """Make what is not stored of a task, unless another process stores some of it meanwhile. Raises as below."""
        try:
            await self._make_rest(task, engine, workplace)
        except Overtaken:
            making = asyncio.current_task()
            assert making is not None
            if making.cancelling():  # and what was finished could not be committed
                raise asyncio.CancelledError from None
            return True
        return False

    async def _started(self) -> tuple[Engine, Workplace]:
        """Raises UsageError, DatasetError and EngineError."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        return await asyncio.shield(self._loading)

    async def _load(self) -> tuple[Engine, Workplace]:
        workplace = await asyncio.to_thread(
            open_workplace, self._orders.employer, self._board, self._name, self._post_soon
        )
        self._workplace = workplace
        self._engine = await asyncio.to_thread(make_engine, self._orders.engine)
        await self._engine.start()
        await self._post(Loaded())
        return self._engine, workplace

    async def _make_rest(self, task: Task, engine: Engine, workplace: Workplace) -> None:
        """Raises EngineError, Abandoned, Overtaken, and what the writer raised; what was finished is committed."""
        slot, stored = await asyncio.to_thread(workplace.take_up, task)
        owed = _owed(workplace, task, stored)
        if not len(owed):
            return
        interval = self._orders.engine.config.commit_interval
        async with _entered(ShardWriter(slot, workplace.files.manifest, commit_interval=interval)) as writer:
            jobs = {
                asyncio.create_task(self._sampler(engine, owed, writer).run()),
                asyncio.create_task(self._tick(engine, writer)),
            }
            try:
                done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
                for job in done:
                    job.result()
            finally:
                await self._cancel(jobs)

    def _sampler(self, engine: Engine, owed: Owed, writer: ShardWriter) -> Sampler:
        return Sampler(
            engine=engine,
            work=Work(owed, writer.close_group),
            writer=writer,
            stats=RunStats(),
            record_failure=self._failed,
            note=lambda message: self._post_soon(Warned(message)),
            stall_timeout=self._orders.engine.config.stall_timeout,
            max_failures=sys.maxsize,  # the driver knows when there are too many
            workers=min(engine.window, len(owed)),
        )

    async def _tick(self, engine: Engine, writer: ShardWriter) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            writer.tick()
            if more := engine.resampled - self._resampled:
                self._resampled += more
                await self._post(Resampled(more))

    def _failed(self, request: SampleRequest, stage: Stage, error: str) -> None:
        self._post_soon(Failed(request, stage, error))

    async def _die(self, error: EngineError) -> None:
        """Commit what the other tasks have finished, say why, and end. The first task to see the death does it."""
        if self._is_dying:
            return
        self._is_dying = True
        await self._cancel(self._making - {asyncio.current_task()})
        await self._post(Died(f"{error}; the log of {socket.gethostname()} is {_log()}"))
        self._end()

    async def _cancel(self, tasks: set[asyncio.Task[None]]) -> None:
        """Cancel these, and wait until they are over."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _post(self, news: News) -> None:
        """Known to the board on return, as is everything posted before. Raises RayError when there is none."""
        await self._board.post.remote(self._name, news)

    def _post_soon(self, news: News) -> None:
        self._board.post.remote(self._name, news)

    def _end(self) -> NoReturn:
        """End this process, whatever its threads do. The kernel ends the engine's (`engines/children.py`)."""
        if self._workplace is not None:
            self._workplace.close()
        os._exit(1)


def _owed(workplace: Workplace, task: Task, stored: Int64Array) -> Owed:
    """What is to be made of a task."""
    files = workplace.files
    done = np.ones(files.positions.count, np.bool_)
    done[task.positions] = False
    done[stored] = True
    return Owed(files.plan, files.retries, done)


@asynccontextmanager
async def _entered(writer: ShardWriter) -> AsyncIterator[ShardWriter]:
    """Left in a thread, which is waited for even when this is cancelled: the last commit may take long."""
    with ExitStack() as left:
        left.enter_context(writer)
        try:
            yield writer
        finally:
            await to_the_end(asyncio.ensure_future(asyncio.to_thread(left.pop_all().close)))


def _log() -> str:
    """Where the standard error of this process goes, and that of the engine's."""
    return str(Path("/proc/self/fd/2").readlink())
