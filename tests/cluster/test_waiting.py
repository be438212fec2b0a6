"""What is waited for: to its end, whoever is interrupted meanwhile, and not in silence."""

from __future__ import annotations

import asyncio

import pytest

from rollgen.cluster.crew import _rest
from rollgen.cluster.waiting import Patience, to_the_end
from rollgen.errors import EngineError


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_a_cancelled_wait_goes_on(fails: bool) -> None:
    """Until the other is over: its error counts more than that this was cancelled."""

    async def scene() -> None:
        gate = asyncio.Event()

        async def other() -> None:
            await gate.wait()
            if fails:
                raise OSError("full")

        running = asyncio.ensure_future(other())
        waiting = asyncio.create_task(to_the_end(running))
        for _ in range(2):
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        with pytest.raises(OSError if fails else asyncio.CancelledError):
            await waiting
        assert running.done()
        assert not running.cancelled()

    asyncio.run(scene())


class Ended:
    """A round in which nobody is waited for: its board, its books, and its news, of which there are none."""

    at_rest = True

    def __init__(self) -> None:
        self.stop, self.close = Call(), Call()

    async def news(self) -> list[object]:
        """See above."""
        return []

    def enter(self, news: list[object]) -> None:
        """See above."""


class Stream:
    """Of its results: over."""

    over = True

    def stop(self) -> None:
        """Nothing to do."""


class Call:
    """Of an actor: done at once."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def remote(self) -> None:
        """Its answer."""
        self.done.set()


def test_an_interrupted_end_of_a_round_lets_the_driver_commit() -> None:
    """Ctrl-C while the storage takes its time for a shard that has been sent: what is committed is told."""

    async def scene() -> None:
        ended, gate, told = Ended(), asyncio.Event(), list[str]()

        async def receive() -> None:
            await gate.wait()
            told.append("committed")

        receiving = asyncio.create_task(receive())
        resting = asyncio.create_task(_rest(ended, ended, ended, Stream(), receiving))
        await ended.close.done.wait()
        resting.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await resting
        assert told == ["committed"]

    asyncio.run(scene())


def test_the_user_is_told_once_what_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """When patience is at an end, and not before; who gives up goes."""
    Patience(3600, lambda: False, lambda: "too soon").wait()
    wanted = iter([False, False, True])
    patience = Patience(0, lambda: next(wanted), lambda: "waits for rain")
    patience.wait()
    patience.wait()
    with pytest.raises(EngineError, match="interrupted while the cluster was waited for"):
        patience.wait()
    assert caplog.messages == ["waits for rain"]
