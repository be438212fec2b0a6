"""Which processes an engine ends: its own, and never those of the engines beside it, or of the program around it."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from rollgen.engines.processes import EngineProcesses


def start_process() -> BaseProcess:
    """One that would go on."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600,), daemon=True)
    process.start()
    return process


@pytest.fixture
def sibling() -> Iterator[BaseProcess]:
    """Of another engine, or of the program."""
    process = start_process()
    yield process
    process.kill()
    process.join()


async def load(processes: EngineProcesses, *, fails: bool = False, count: int = 1) -> list[BaseProcess]:
    """A start of an engine, which starts so many processes, or fails. Returns what it started."""

    async def loading() -> list[BaseProcess]:
        await asyncio.sleep(0)
        if fails:
            raise OSError("no such model")
        return [start_process() for _ in range(count)]

    others = multiprocessing.active_children()
    task = asyncio.ensure_future(loading())
    await processes.started(task, others)
    return await task


def test_a_start_that_fails_ends_no_sibling(sibling: BaseProcess) -> None:
    """Neither the first one, nor one after a death: before a process has appeared, a replica has none."""
    processes = EngineProcesses(is_replica=True)
    processes.end()
    with pytest.raises(OSError, match="no such model"):
        asyncio.run(load(processes, fails=True))
    processes.end()
    assert sibling.is_alive()
    [own] = asyncio.run(load(processes))
    processes.end()
    assert not own.is_alive()
    with pytest.raises(OSError, match="no such model"):
        asyncio.run(load(processes, fails=True))
    processes.end()
    assert sibling.is_alive()


def test_a_start_that_is_cancelled(sibling: BaseProcess) -> None:
    """Before its process is there: that is waited for, so that it can be ended."""
    processes = EngineProcesses(is_replica=True)

    async def cancelled() -> list[BaseProcess]:
        others, gate = multiprocessing.active_children(), asyncio.Event()

        async def loading() -> list[BaseProcess]:
            await gate.wait()
            return [start_process()]

        task = asyncio.ensure_future(loading())
        starting = asyncio.ensure_future(processes.started(task, others))
        await asyncio.sleep(0.1)  # it waits
        starting.cancel()
        await asyncio.sleep(0.1)
        assert not starting.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        processes.end()
        return await task

    [own] = asyncio.run(cancelled())
    assert not own.is_alive()
    assert sibling.is_alive()


def test_an_engine_that_is_alone_ends_all_of_its_own(sibling: BaseProcess) -> None:
    """All that appeared while it was loaded; none of the program's, be they older or younger."""
    processes = EngineProcesses(is_replica=False)
    processes.end()
    first, second = asyncio.run(load(processes, count=2))
    younger = start_process()
    processes.end()
    assert not first.is_alive()
    assert not second.is_alive()
    assert sibling.is_alive()
    assert younger.is_alive()
    younger.kill()
    younger.join()


def test_an_engine_that_is_alone_and_cancelled(sibling: BaseProcess) -> None:
    """What has appeared by then is ended, though it is still loading."""
    processes = EngineProcesses(is_replica=False)

    async def cancelled() -> BaseProcess:
        others = multiprocessing.active_children()
        own = start_process()
        starting = asyncio.ensure_future(processes.started(asyncio.get_running_loop().create_future(), others))
        await asyncio.sleep(0)  # it waits
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        processes.end()
        return own

    assert not asyncio.run(cancelled()).is_alive()
    assert sibling.is_alive()
