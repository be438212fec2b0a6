"""The processes that an engine has started, so that it ends these and no others: the program around may have its own.

They are those `multiprocessing` children that appear while the engine is loaded. Of several engines, one starts its
processes at a time: those that appear in its turn are its own, and before any has appeared it has none.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Collection
from multiprocessing.process import BaseProcess
from typing import Any, Final

TERMINATE_SECONDS: Final = 5.0
"""For a process to end by itself."""
POLL_SECONDS: Final = 0.02


class EngineProcesses:
    """Of one engine. `is_replica`: there are others in this program."""

    def __init__(self, *, is_replica: bool) -> None:
        self._is_replica = is_replica
        self._others: Collection[BaseProcess] = ()
        """Those that were there before the last start."""
        self._own: set[BaseProcess] | None = set()
        """None while any that appears is one."""

    async def started(self, loading: asyncio.Future[Any], others: Collection[BaseProcess]) -> None:
        """Return when the next engine may start its own: when those of this one are there, or all is loaded or failed.

        `others` were there before. To be called at each start, of which it forgets the processes of the one before. A
        replica's are waited for even when it is cancelled: they could not be told from others' later, and not be ended.
        """
        self._others = others
        if not self._is_replica:
            self._own = None
            await asyncio.wait({loading})
            self._own = self._appeared()
            return
        self._own = set()
        appearing = asyncio.ensure_future(self._appear(loading))
        try:
            await asyncio.shield(appearing)
        except asyncio.CancelledError:
            await asyncio.wait({appearing})
            raise

    async def _appear(self, loading: asyncio.Future[Any]) -> None:
        while not loading.done() and not self._own:
            await asyncio.wait({loading}, timeout=POLL_SECONDS)
            self._own = self._appeared()

    def _appeared(self) -> set[BaseProcess]:
        return set(multiprocessing.active_children()).difference(self._others)

    def end(self) -> None:
        """End them and wait for it: first asked, then killed. A stopped one only takes the second."""
        own = self._appeared() if self._own is None else self._own
        for process in own:
            process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in own:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
