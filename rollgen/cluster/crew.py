"""Replicas on a Ray cluster as a `loop.crew.Crew`: rounds of tasks through Ray Data until nothing is owed.

One round makes everything, as long as replicas live. What it leaves out, because they died over it, is cut into new
tasks for the next round. One that stores nothing is the last.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final
from uuid import uuid4

import ray
import ray.data
from ray.exceptions import RayActorError, RayError, RpcError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollgen.cluster.actors import end_process, is_gone
from rollgen.cluster.board import Board, Materials, Reader
from rollgen.cluster.books import CONTINUE, Books
from rollgen.cluster.connect import connect
from rollgen.cluster.delivery import Delivery, delivery_of
from rollgen.cluster.engine import VLLM, EngineFacts, EngineSpec, examine
from rollgen.cluster.receipts import Positions
from rollgen.cluster.replica import Orders, Replica
from rollgen.cluster.room import REPLICA_CPUS, gpus_per_replica, reserved, room_note, silence_note
from rollgen.cluster.tasks import Task, cut_tasks
from rollgen.cluster.waiting import POLL_SECONDS, Patience, to_the_end
from rollgen.errors import EngineError, ResumeRefused, RollgenError
from rollgen.loop.crew import Job
from rollgen.loop.sampling import TICK_SECONDS
from rollgen.loop.stop import is_stopping
from rollgen.preflight import Preflight

TASKS_AT_ONCE: Final = 3
"""Of a replica. With tasks of half a window, the engine is full while one of them waits for its last samples."""
REST_SECONDS: Final = 15.0
"""For replicas to commit what is finished, when a job ends before its time."""
LEAVE_SECONDS: Final = 3.0
"""For Ray Data to let go of replicas that have done so."""
PATIENCE_SECONDS: Final = 60.0
"""For a replica to be heard of, when there is none or none is left, after which the user is told."""
_NO_ANSWER: Final = (
    f"--ray: the node that was asked what the engine will be has not answered for {PATIENCE_SECONDS:.0f} s; goes on "
    "waiting: it may be importing vLLM, and Ray's dashboard shows the logs of `examine` there"
)
_CALLERS: Final = 10_000
"""Of the board at a time: each replica waits there for a stop."""


class RayCrew:
    """`loop.crew.Crew` on the cluster that `--ray` names. `make_engine` is an `EngineSpec.make`.

    Constructing it joins the cluster, or starts one, and makes an engine without weights there, once there is room.
    That may take long: it is for a thread, and ends soon after `given_up` says so. Raises UsageError when it cannot be.
    What was joined or started is left again by `close`, and when nobody has the crew any more.
    """

    def __init__(
        self, preflight: Preflight, *, make_engine: str = VLLM, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        config = preflight.config
        assert config.ray is not None
        self._spec = EngineSpec.of(preflight, make_engine)
        self._replicas = config.replicas
        with connect(config.ray, given_up) as on_error:
            self._gpus = gpus_per_replica(config)
            facts = _examined(self._spec, self._gpus, given_up)
            note = room_note(self._replicas, self._gpus)
            self._leave = weakref.finalize(self, on_error.pop_all().close)
        self.record, self.capture, self.dtype, self.extras = facts.record, facts.capture, facts.dtype, facts.extras
        self.notes = facts.notes if note is None else (*facts.notes, note)
        self._window = facts.window

    async def start(self) -> None:
        """Nothing to do: models are loaded while their replicas are handed their first tasks."""

    async def make(self, job: Job) -> None:
        """See `loop.crew.Crew`. Interrupted, replicas have REST_SECONDS to commit what is finished; so have they when
        the job cannot go on. What they cannot commit by then is made again by the next attempt."""
        with _ray_errors():
            await self._make(job)

    async def _make(self, job: Job) -> None:
        """Raises RayError too."""
        positions = Positions(job.owed.plan.offsets, job.owed.retries)
        delivery = await asyncio.to_thread(delivery_of, job, positions)
        books = Books(job, positions, replicas=self._replicas, journal=delivery.journal)
        while tasks := cut_tasks(job.owed, job.slot.attempt, replicas=self._replicas, window=self._window):
            before = len(job.owed)
            try:
                await self._round(job, books, delivery, tasks)
            finally:
                _enter_untold(books, delivery, tasks)
            if len(job.owed) == before:
                raise EngineError(
                    f"{books.last_death or 'Ray has lost what was made'}; {before} samples are owed, and none of them "
                    f"can be made; {CONTINUE}"
                )

    def close(self) -> None:
        """Leave the cluster, which ends what was started there. Safe to call twice."""
        self._leave()

    async def _round(self, job: Job, books: Books, delivery: Delivery, tasks: Sequence[Task]) -> None:
        """Raises what `books` has for a problem, and what Ray raises."""
        books.begin_round()
        orders = Orders(self._spec, delivery.employer, board=f"rollgen-{uuid4().hex}")
        board = _make_board(orders.board, delivery.materials)
        reader = Reader(board)
        receiving = asyncio.create_task(delivery.receive(board, books.enter))
        stream = _Stream(tasks, orders, replicas=min(self._replicas, len(tasks)), gpus=self._gpus)
        stream.start()
        waits = False
        try:
            while not stream.over and books.problem is None:
                await asyncio.sleep(TICK_SECONDS)
                books.enter(await reader.news())
                if receiving.done():
                    receiving.result()
                for name in books.silent:
                    if is_gone(name):
                        books.let_go(name)
                    else:
                        books.lost(name)
                        end_process(name)
                if books.silence >= PATIENCE_SECONDS and not waits:
                    job.reporter.note(silence_note(books.silence, self._gpus))
                waits = books.silence >= PATIENCE_SECONDS
        finally:
            await _rest(board, reader, books, stream, receiving)
        if books.problem is not None:
            raise books.problem
        if stream.error is not None:
            raise EngineError(f"Ray ended the job: {_one_line(stream.error)}; {CONTINUE}") from stream.error


def _enter_untold(books: Books, delivery: Delivery, tasks: Sequence[Task]) -> None:
    """What a round has stored and not told. Of a run that is to stop, the next attempt finds what cannot be had now."""
    try:
        for receipt in delivery.untold(tasks, books.received):
            books.receive(receipt)
    except ResumeRefused:
        if not is_stopping():
            raise


class _Stream(threading.Thread):
    """Takes what Ray Data gives, in a thread: it blocks, and the event loop has signals to see."""

    def __init__(self, tasks: Sequence[Task], orders: Orders, *, replicas: int, gpus: int) -> None:
        super().__init__(name="rollgen-ray", daemon=True)
        self._make_dataset = partial(_dataset, tasks, orders, replicas=replicas, gpus=gpus)
        self._stopped = threading.Event()
        self.over = False
        self.error: Exception | None = None

    def run(self) -> None:
        """Until everything has come, or the first thing after `stop`."""
        try:
            dataset = self._make_dataset()
            for _ in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                if self._stopped.is_set():
                    break
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the round is awaited
            self.error = error
        finally:
            self.over = True

    def stop(self) -> None:
        """Take no more than one."""
        self._stopped.set()


def _dataset(tasks: Sequence[Task], orders: Orders, *, replicas: int, gpus: int) -> ray.data.Dataset:
    """The tasks, one a block: Ray Data gives a block's results only when all of it is done.

    It starts an actor that died again, and its tasks with it, without an end: the books say when it is enough.
    """
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are told by who handles them
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # Not `from_arrow`, which has the cluster look at each of them, and waits for that.
    dataset: ray.data.Dataset = ray.data.from_blocks([task.to_table() for task in tasks])
    return dataset.map_batches(
        Replica,
        fn_constructor_args=(orders,),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(
            size=replicas,
            max_tasks_in_flight_per_actor=TASKS_AT_ONCE,  # none waits at a replica that is late
            max_concurrent_calls_per_actor=TASKS_AT_ONCE,
        ),
        num_cpus=REPLICA_CPUS,
        num_gpus=gpus,
    )


def _examined(spec: EngineSpec, gpus: int, given_up: Callable[[], bool]) -> EngineFacts:
    """What the engine is where a replica would be. Raises UsageError, and EngineError when Ray cannot tell."""
    try:
        with reserved(gpus, given_up) as room:
            remote: Any = ray.remote(num_cpus=REPLICA_CPUS, num_gpus=gpus, max_calls=1, scheduling_strategy=room)
            examining = remote(examine).remote(spec)
            patience = Patience(PATIENCE_SECONDS, given_up, lambda: _NO_ANSWER)
            while not ray.wait([examining], timeout=POLL_SECONDS)[0]:
                patience.wait()
            found: EngineFacts | RollgenError = ray.get(examining)
    except RayError as error:
        raise EngineError(f"Ray cannot make an engine: {_one_line(error)}") from error
    if isinstance(found, RollgenError):
        raise found
    return found


def _make_board(name: str, materials: Materials) -> Any:
    """On this node, and gone with this process."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote: Any = ray.remote(Board)
    return remote.options(name=name, num_cpus=0, max_concurrency=_CALLERS, scheduling_strategy=here).remote(materials)


async def _rest(board: Any, reader: Reader, books: Books, stream: _Stream, receiving: asyncio.Task[None]) -> None:
    """End a round, before its time or not: let replicas commit what is finished, and read the last news.

    A commit of the driver's that has begun is waited for, however long it takes, also when this is cancelled.
    """
    try:
        with suppress(RayError, TimeoutError):  # without a board there is nobody to wait for
            async with asyncio.timeout(REST_SECONDS):
                await board.stop.remote()
                books.enter(await reader.news())
                while not stream.over and not books.at_rest:
                    await asyncio.sleep(0.1)
                    books.enter(await reader.news())
    finally:
        stream.stop()
        await to_the_end(asyncio.ensure_future(_close(board, receiving)))
    deadline = time.monotonic() + LEAVE_SECONDS
    while not stream.over and time.monotonic() < deadline:
        await asyncio.sleep(0.1)


async def _close(board: Any, receiving: asyncio.Task[None]) -> None:
    """Have the board take nothing more, and what it has sent committed and told."""
    for ending in (board.close.remote(), receiving):
        with suppress(RayError):  # of a board that is gone
            await ending


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Raises EngineError for a RayError."""
    try:
        yield
    except RayError as error:
        raise _ended(error) from error


def _ended(error: Exception) -> EngineError:
    """What ends a job that Ray does not carry on. Who cannot be reached then is the board, which is on this node."""
    is_lost = isinstance(error, RayActorError | RpcError)
    why = "its head, or its part on this node, does not answer any more" if is_lost else _one_line(error)
    return EngineError(f"Ray ended the job: {why}; {CONTINUE}")


def _one_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
