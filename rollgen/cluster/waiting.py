"""Waiting in a thread, which nobody can cancel: for as long as it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rollgen.errors import EngineError

POLL_SECONDS: Final = 1.0
"""Between two looks at whether a wait is still wanted."""


def refuse_if(given_up: Callable[[], bool]) -> None:
    """Raise EngineError when what is waited for is not wanted any more: whoever did has gone on."""
    if given_up():
        raise EngineError("interrupted while the cluster was waited for")
