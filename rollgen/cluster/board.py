"""The board: a Ray actor beside the driver, on which replicas post news, and which says when to stop.

Ray Data gives a replica's output only when the whole task is over, and none of one that died. News come at once: the
journal, the totals and the failures are up to date, and the deaths of a replica are counted while Ray restarts it.
News are no proof of anything: whatever they leave out is found in the dataset directory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

from rollgen.cluster.receipts import Receipt
from rollgen.engines.base import SampleRequest
from rollgen.errors import RollgenError
from rollgen.format.failures import Stage

MAX_BEGINNINGS: Final = 2
"""Of a task in one round: then it is put off, since its samples may be what kills its replica."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process of a replica is there; the second one of the same replica means that the first one has died."""

    place: str
    """Node and process, for people."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Its engine has loaded the model."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A shard is stored."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """A sample could not be made."""

    request: SampleRequest
    stage: Stage
    error: str


@dataclass(frozen=True, slots=True)
class Resampled:
    """So many samples were asked for again: see `engines.base.Engine.resampled`."""

    count: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the user should know."""

    message: str


@dataclass(frozen=True, slots=True)
class Died:
    """Its engine is dead, and it ends itself, having committed what was finished."""

    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot do what is asked for, and nor could another."""

    error: RollgenError


@dataclass(frozen=True, slots=True)
class Rested:
    """It was told to stop, and has committed what was finished."""


News = Started | Loaded | Committed | Failed | Resampled | Warned | Died | Refused | Rested


class Board:
    """Made a Ray actor by the driver, which is its only reader."""

    def __init__(self) -> None:
        self._news: list[tuple[str, News]] = []
        self._beginnings: Counter[str] = Counter()
        self._stopping = asyncio.Event()

    async def begin(self, task: str) -> bool:
        """Whether a replica is to make this task now. To be asked each time it is handed one."""
        if self._stopping.is_set() or self._beginnings[task] == MAX_BEGINNINGS:
            return False
        self._beginnings[task] += 1
        return True

    async def post(self, replica: str, news: News) -> None:
        """`replica` is the name of the one it is of."""
        self._news.append((replica, news))

    async def take(self) -> list[tuple[str, News]]:
        """What has been posted since it was taken last, in order."""
        news, self._news = self._news, []
        return news

    async def stop(self) -> None:
        """From now on no task begins, and whoever waits for it is told."""
        self._stopping.set()

    async def stopping(self) -> None:
        """Wait until there is a stop."""
        await self._stopping.wait()
