"""The board: a Ray actor beside the driver, on which replicas post news, and which says when to stop.

Ray Data gives a replica's output only when the whole task is over, and none of one that died. News come at once: the
journal, the totals and the failures are up to date, and the deaths of a replica are counted while Ray restarts it.
News are no proof of anything: whatever they leave out is found in the dataset directory.

Where there is no directory that all share, it is their post office too: what replicas read of the run is to be had
here, and the driver takes the shards that they send (`parcels.py`, `delivery.py`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rollgen.cluster.receipts import Receipt
from rollgen.engines.base import SampleRequest
from rollgen.errors import RollgenError
from rollgen.format.failures import Stage

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array

Materials = Mapping[str, Sequence[Any]]
"""Files by name, each as references to the parts of its content, which the driver owns."""
MAX_BEGINNINGS: Final = 2
"""Of a task in one round: then it is put off, since its samples may be what kills its replica."""

SIGN_SECONDS: Final = 3.0
"""Between two signs of life of a replica."""


@dataclass(frozen=True, slots=True)
class Started:
    """A process of a replica is there; the second one of the same replica means that the first one has died."""

    place: str
    """Node and process, for people."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life, whatever its engine does. All other news are one too."""


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


News = Started | Alive | Loaded | Committed | Failed | Resampled | Warned | Died | Refused | Rested


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A shard that waits for the driver."""

    number: int
    replica: str
    task: str
    receipt: Receipt
    """Its line has no name of a shard: that is for the driver to give."""


Verdict = Receipt | RollgenError
"""On a parcel: what has been committed, or why nothing has been."""


class Board:
    """Made a Ray actor by the driver, which is its only reader."""

    def __init__(self, materials: Materials) -> None:
        self._materials = materials
        self._news: list[tuple[str, News]] = []
        self._read = 0
        self._beginnings: Counter[str] = Counter()
        self._stopping = asyncio.Event()
        self._numbers = itertools.count()
        self._parcels: asyncio.Queue[Parcel | None] = asyncio.Queue()
        self._contents: dict[int, bytes] = {}
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}
        self._stored: defaultdict[str, list[Int64Array]] = defaultdict(list)
        self._is_closed = False

    async def begin(self, task: str) -> bool:
        """Whether a replica is to make this task now. To be asked each time it is handed one."""
        if self._stopping.is_set() or self._beginnings[task] == MAX_BEGINNINGS:
            return False
        self._beginnings[task] += 1
        return True

    async def post(self, replica: str, news: News) -> None:
        """`replica` is the name of the one it is of."""
        self._news.append((replica, news))

    async def take(self, read: int) -> list[tuple[str, News]]:
        """What has been posted after the first `read` news, in order. Those are forgotten: their reader has them."""
        self._news = self._news[max(0, read - self._read) :]
        self._read = max(read, self._read)
        return list(self._news)

    async def stop(self) -> None:
        """From now on no task begins, and whoever waits for it is told."""
        self._stopping.set()

    async def is_stopping(self, replica: str) -> bool:
        """Wait for a stop, SIGN_SECONDS at most: whether there is one. Whoever asks gives a sign of life."""
        self._news.append((replica, Alive()))
        with suppress(TimeoutError):
            async with asyncio.timeout(SIGN_SECONDS):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def materials(self) -> Materials:
        """What a replica is to read, where it cannot read it in the dataset directory."""
        return self._materials

    async def send(self, replica: str, task: str, receipt: Receipt, content: bytes) -> Verdict:
        """Send the driver a shard of a task, and wait for its word on it."""
        parcel = Parcel(next(self._numbers), replica, task, receipt)
        self._contents[parcel.number] = content
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[parcel.number] = verdict
        self._parcels.put_nowait(parcel)
        return await verdict

    async def stored(self, task: str) -> list[Int64Array]:
        """Positions of a task that the driver has committed."""
        return self._stored[task]

    async def next_parcel(self) -> Parcel | None:
        """For the driver, who takes one after the other: waits for one. None once the board is closed."""
        parcel = await self._parcels.get()
        return None if self._is_closed else parcel

    async def content(self, parcel: Parcel) -> bytes:
        """The shard. It is not here any more then."""
        return self._contents.pop(parcel.number)

    async def answer(self, parcel: Parcel, verdict: Verdict) -> None:
        """Let the sender know."""
        self._contents.pop(parcel.number, None)
        if isinstance(verdict, Receipt):
            self._stored[parcel.task].append(verdict.positions.copy())  # what came with a message stays in Ray's store
        self._verdicts.pop(parcel.number).set_result(verdict)

    async def close(self) -> None:
        """Nothing that is still sent arrives. Its senders wait until this board is gone."""
        self._is_closed = True
        self._parcels.put_nowait(None)


class Reader:
    """Reads the news of a board, which is a Ray actor. Each comes once, also when whoever waits for it is cancelled."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self._read = 0

    async def news(self) -> list[tuple[str, News]]:
        """What has been posted since the last time that this returned, in order. Raises RayError without a board."""
        news: list[tuple[str, News]] = await self._board.take.remote(self._read)
        self._read += len(news)
        return news
