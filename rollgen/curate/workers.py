"""Processes that score: what one answer does to its process, or takes too long for, costs that answer alone.

Batches are handed to processes that were started afresh (spawned) and have imported the scoring function. One that
takes longer than it may is ended with its process, which another replaces; one whose process dies, or that raises, is
nothing worse. The answers of such a batch are then scored again one by one. A few batches are under way at a time, so
that memory is bounded by those.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Final, Self

from pebble import ProcessExpired, ProcessPool

from rollgen.curate.answers import Score, StoredAnswer, failed
from rollgen.curate.scorers import Scorer, prepare, score_batch
from rollgen.errors import RollgenError

_AHEAD: Final = 2
"""Batches under way for each process: one that it works on, and one that waits."""
_TICK_SECONDS: Final = 0.5
_STARTS: Final = 3
"""Pools that may break one after the other before anything comes back from them."""

Batch = Sequence[StoredAnswer]
Judged = tuple[StoredAnswer, Score]
"""An answer, and what became of it."""


class Workers:
    """`processes` processes that score batches, each of which may take `timeout` seconds. Use as a context manager.

    Leaving it ends them at once, whatever they are at.
    """

    def __init__(self, scorer: Scorer, processes: int, timeout: float) -> None:
        self._scorer = scorer
        self._processes = processes
        self._timeout = timeout
        self._pending: dict[Future[list[Score] | str], Batch] = {}
        self._again: deque[Batch] = deque()
        self._starts = 0
        """Of pools, since something came back."""
        self._pool = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def score(self, batches: Iterator[Batch]) -> Iterator[list[Judged]]:
        """The answers of all batches as they are scored, in any order; now and then none, while that takes its time.

        Raises RollgenError when the processes die before they get to anything.
        """
        while True:
            while len(self._pending) < _AHEAD * self._processes:
                batch = self._again.popleft() if self._again else next(batches, None)
                if batch is None:
                    break
                self._hand_out(batch)
            if not self._pending:
                return
            yield self._collect()

    def _hand_out(self, batch: Batch) -> None:
        try:
            future = self._pool.schedule(score_batch, args=(self._scorer, batch), timeout=self._timeout)
        except RuntimeError:  # it broke while nothing was under way, or what was has not been collected yet
            self._again.append(batch)
            self._restart()
        else:
            self._pending[future] = batch

    def _collect(self) -> list[Judged]:
        """Wait a while for some that are scored; what could not be as a batch comes again."""
        scored: list[Judged] = []
        is_broken = False
        for future in wait(self._pending, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED).done:
            outcome = self._outcome(future)
            if outcome is None:
                is_broken = True
                continue
            batch, self._starts = self._pending.pop(future), 0
            if not isinstance(outcome, str):
                scored += zip(batch, outcome, strict=True)
            elif len(batch) == 1:
                scored.append((batch[0], failed(outcome)))
            else:
                self._again += [[answer] for answer in batch]
        if is_broken:
            self._restart()
        return scored

    def _outcome(self, future: Future[list[Score] | str]) -> list[Score] | str | None:
        """A score for each answer, why there is none for any of them, or None when all processes are gone."""
        try:
            return future.result()
        except TimeoutError:
            return f"took longer than {self._timeout:g} s"
        except ProcessExpired as death:
            return f"its process died with exit code {death.exitcode}"
        except BrokenProcessPool:
            return None

    def _started(self) -> ProcessPool:
        self._starts += 1
        context = multiprocessing.get_context("spawn")  # a fork would copy our threads' locks, and our memory
        return ProcessPool(self._processes, initializer=prepare, initargs=(self._scorer,), context=context)

    def _restart(self) -> None:
        """Another pool, for what was under way too: the library gives up when a process dies while none is at work.

        That may be a death that it saw before it knew what the process was at, or one at the start. Raises RollgenError
        when it happens again and again.
        """
        if self._starts == _STARTS:
            raise RollgenError(
                f"the processes that score die as they start: does importing {self._scorer.function} end them?"
            )
        self.__exit__()
        self._again += self._pending.values()
        self._pending.clear()
        self._pool = self._started()
