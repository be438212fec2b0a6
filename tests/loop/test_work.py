"""How workers share what is owed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from models.runs import Runs

from rollgen.format.schema import PLAN_FILE
from rollgen.loop.owed import Owed
from rollgen.loop.work import Taken, Work
from rollgen.prompts.plan import Plan


@pytest.fixture
def owed(runs: Runs) -> Owed:
    """All of five prompts, two samples each."""
    runs()
    return Owed(Plan(runs.out / PLAN_FILE), (), np.zeros(10, np.bool_))


async def take(work: Work) -> Taken:
    taken = await work.take()
    assert taken is not None
    return taken


def test_what_is_given_back_comes_last(owed: Owed) -> None:
    """Positions 0, 2 and 3 were in flight when an engine died, 1 was settled: others come first."""

    async def positions() -> list[int]:
        work = Work(owed, lambda prompt_index: None)
        first = [await take(work) for _ in range(4)]
        work.settle(first.pop(1))
        for taken in first:
            work.give_back(taken)
        order = []
        while (taken := await work.take()) is not None:
            order.append(taken.position)
            work.settle(taken)
        return order

    assert asyncio.run(positions()) == [4, 5, 6, 7, 8, 9, 0, 2, 3]
    assert len(owed) == 0


def test_groups_are_closed_once(owed: Owed) -> None:
    """When the last sample of a prompt is settled, one that was given back too."""
    closed: list[int] = []

    async def run() -> None:
        work = Work(owed, closed.append)
        first, second = await take(work), await take(work)
        work.give_back(first)
        work.settle(second)
        assert closed == []
        while (taken := await work.take()) is not None:
            work.settle(taken)

    asyncio.run(run())
    assert closed == [1, 2, 3, 4, 0]


def test_idle_workers_wait_for_what_may_come_back(owed: Owed) -> None:
    """Nobody leaves while another has a request in flight; once it is settled, all leave, and the work is over."""

    async def run() -> None:
        work = Work(owed, lambda prompt_index: None)
        over = asyncio.create_task(work.over())
        taken = [await take(work) for _ in range(10)]
        idle = [asyncio.create_task(work.take()) for _ in range(2)]
        for one in taken[1:]:
            work.settle(one)
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in (*idle, over))
        work.give_back(taken[0])
        done, waiting = await asyncio.wait(idle, return_when=asyncio.FIRST_COMPLETED)
        again = done.pop().result()
        assert again == taken[0]
        assert not over.done()
        work.settle(again)
        assert await waiting.pop() is None
        await over

    asyncio.run(run())
