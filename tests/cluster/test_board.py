"""The board, in this process: what is posted is read once, whatever becomes of who waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollgen.cluster.board import Board, Reader, Resampled


class SlowAnswers:
    """A handle of a board whose answers wait for the gate: by then the board has given them."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.answered = asyncio.Event()
        self.gate = asyncio.Event()
        self.take = self

    async def remote(self, read: int) -> Any:
        """Of `take`."""
        news = await self._board.take(read)
        self.answered.set()
        await self.gate.wait()
        return news


def told(news: list[Any]) -> list[tuple[str, int]]:
    """Whom they are of, and what they say."""
    return [(replica, each.count) for replica, each in news]


def test_news_outlive_a_reader_that_is_cancelled() -> None:
    """After the board has answered, and before the answer is there: they come with the next ones, once."""

    async def scene() -> None:
        board = Board({})
        handle = SlowAnswers(board)
        reader = Reader(handle)
        await board.post("a", Resampled(1))
        reading = asyncio.create_task(reader.news())
        await handle.answered.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await board.post("b", Resampled(2))
        handle.gate.set()
        assert told(await reader.news()) == [("a", 1), ("b", 2)]
        await board.post("a", Resampled(3))
        assert told(await reader.news()) == [("a", 3)]
        assert await reader.news() == []

    asyncio.run(scene())


def test_a_question_that_comes_late_takes_nothing_away() -> None:
    """One that was given up, and is asked when a later one has been answered."""

    async def scene() -> None:
        board = Board({})
        for count in range(4):
            await board.post("a", Resampled(count))
        assert told(await board.take(3)) == [("a", 3)]
        await board.take(0)
        assert told(await board.take(3)) == [("a", 3)]

    asyncio.run(scene())
