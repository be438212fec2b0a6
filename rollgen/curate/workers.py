"""Processes that score: what one answer does to its process, or takes too long for, costs that answer alone.

Batches are handed to processes that were started afresh (spawned) and have imported the scoring function. One that
takes longer than it may is ended with its process, which another replaces; one whose process dies, or that raises, is
nothing worse. The answers of such a batch are then scored again one by one. A few batches are under way at a time, so
that memory is bounded by those. No process outlives this one, whatever it dies of.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import PoolManager

from rollgen.curate.answers import Score, StoredAnswer, failed, told
from rollgen.curate.scorers import GUARD, Scorer, prepare, score_batch
from rollgen.errors import ResumeRefused, RollgenError, UsageError

_AHEAD: Final = 2
"""Batches under way for each process: one that it works on, and one that waits."""
_TICK_SECONDS: Final = 0.5
_STARTS: Final = 3
"""Pools that may break one after the other before anything comes back from them."""
_DEATHS: Final = 100
"""Processes that may die one after the other before any answer is scored: a bad answer is one, or a few."""
_START_SECONDS: Final = 60.0
"""That Python may take to start on a machine that is busy."""

Batch = Sequence[StoredAnswer]
Judged = tuple[StoredAnswer, Score]
"""An answer, and what became of it."""


def check_program() -> None:
    """Raise UsageError when other processes cannot import the program that is running, as those that score do."""
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    if file is not None and program.__spec__ is None and not Path(file).is_file():
        raise UsageError(
            f"{file}: is the program that calls this, and no file that the processes which score could import; write "
            "it to a file and run that, or use `rollgen score`"
        )


class _Manager(PoolManager):
    """That of the library, but what a process said before it died is read before anyone is told of the death.

    Otherwise, where this process has little time, a death passes for that of the batch before, which has been scored,
    and the one that it is of seems to be under way until its time is over.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reading = Lock()

    def process_next_message(self, timeout: float) -> None:
        with suppress(OSError):  # which comes again below
            self._is_said(timeout)
        with self._reading:
            super().process_next_message(0)

    def update_workers(self) -> None:
        dead = self.worker_manager.inspect_workers()
        if dead:
            with self._reading:
                while self._is_said(0):
                    super().process_next_message(0)
        for each in dead:
            self.handle_worker_expiration(each)
        self.worker_manager.create_workers()  # type: ignore[no-untyped-call]

    def _is_said(self, timeout: float) -> bool:
        """Whether there is something to read, within these seconds."""
        channel = self.worker_manager.pool_channel
        return channel is not None and channel.poll(timeout)


class _Pool(ProcessPool):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pool_manager = _Manager(self._context, named["context"])


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
        self._deaths = 0
        """Of processes, since an answer was scored."""
        self._silent = 0.0
        """Seconds waited since something came back, or a pool was started: not those in which all was stopped."""
        self._pool = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def score(self, batches: Iterator[Batch]) -> Iterator[list[Judged]]:
        """The answers of all batches as they are scored, in any order; now and then none, while that takes its time.

        Raises RollgenError when the processes die, or stand still, before they get to anything, and when nothing comes
        of them but deaths; ResumeRefused when the source of the function has changed; UsageError when it does not
        return one result for each answer.
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
        done = wait(self._pending, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED).done
        self._check_progress(bool(done))
        for future in _first(done):
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

    def _check_progress(self, is_some: bool) -> None:
        """Raise RollgenError when nothing comes back for longer than an import and a batch may take together."""
        self._silent = 0.0 if is_some else self._silent + _TICK_SECONDS
        if self._silent > 2 * self._timeout + _START_SECONDS:
            raise RollgenError(
                f"the processes that score stand still: importing {self._scorer.function} takes them longer than "
                f"{self._timeout:g} s. See what it waits for, or give it more with --timeout"
            )

    def _outcome(self, future: Future[list[Score] | str]) -> list[Score] | str | None:
        """A score for each answer, why there is none for any of them, or None when all processes are gone."""
        try:
            outcome = future.result()
        except TimeoutError:
            return f"took longer than {self._timeout:g} s, or ended its process with exit code 0"
        except ProcessExpired as death:
            return self._died(death)
        except BrokenProcessPool:
            return None
        except ResumeRefused:
            raise
        except UsageError as error:
            raise UsageError(f"{self._scorer.function}: {error}; what was scored before is committed") from None
        except Exception as error:  # noqa: BLE001  of the way there or back: what a function returned cannot do more
            return told(error)
        if not isinstance(outcome, str):
            self._deaths = 0
        return outcome

    def _died(self, death: ProcessExpired) -> str:
        self._deaths += 1
        said = f"its process died with exit code {death.exitcode}"
        if self._deaths == _DEATHS:
            raise RollgenError(
                f"{self._scorer.function}: {said}, and so did the {_DEATHS - 1} before, with not one answer scored "
                "between them; what was scored before is committed"
            )
        return said

    def _started(self) -> ProcessPool:
        self._starts += 1
        self._silent = 0.0
        context = multiprocessing.get_context("spawn")  # a fork would copy our threads' locks, and our memory
        return _Pool(self._processes, initializer=prepare, initargs=(self._scorer, os.getpid()), context=context)

    def _restart(self) -> None:
        """Another pool, for what was under way too: the library gives up when a process dies while none is at work.

        That may be a death that it saw before it knew what the process was at, or one at the start. Raises RollgenError
        when it happens again and again.
        """
        if self._starts == _STARTS:
            raise RollgenError(
                f"the processes that score die as they start: does importing {self._scorer.function} end them? They "
                f"import its module, and the program that called this: {GUARD}"
            )
        self.__exit__()
        self._again += self._pending.values()
        self._pending.clear()
        self._pool = self._started()


def _first(done: Collection[Future[list[Score] | str]]) -> Collection[Future[list[Score] | str]]:
    """Those that brought something, or else all: a failure may raise, and would take with it what came back beside it.

    It is not forgotten: the next look finds it at once.
    """
    return [future for future in done if future.exception() is None] or done
