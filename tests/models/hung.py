"""The clock of `pebble`, by which it ends processes that take too long: time passes while one says that it hangs.

So a batch that is only slow, or whose process is stopped for a minute, never takes too long.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class HungClock:
    """For the `time` of `pebble.pool.process`. Who hangs makes a file in `directory`, named by its process id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._now = 1.0
        directory.mkdir()

    sleep = staticmethod(time.sleep)

    def time(self) -> float:
        if any(_is_there(int(path.name)) for path in self._directory.iterdir()):
            self._now += 0.2
        return self._now


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
