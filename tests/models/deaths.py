"""Death at any step of what runs in this process, and what must be there afterwards."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """As if by a signal that cannot be caught: nothing that would clean up can do anything any more."""


STEPS = ("os.link", "os.unlink", "os.rename", "os.replace", "os.mkdir", "os.fsync")


@contextmanager
def dying(
    at: int, *, how: type[BaseException] | signal.Signals = Killed, steps: Sequence[str] = STEPS
) -> Iterator[list[int]]:
    """Raise `how` instead of step number `at`, and if it is Killed, instead of every later one. Gives their count.

    A signal comes just before the step, which is taken unless its handler raises.
    """
    count = [0]

    def step(real: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if isinstance(how, signal.Signals):
                if count[0] == at:
                    os.kill(os.getpid(), how)
            elif count[0] == at or (count[0] > at and how is Killed):
                raise how
            return real(*arguments, **named)

        return taken

    with pytest.MonkeyPatch.context() as patch:
        for name in steps:
            module, _, attribute = name.rpartition(".")
            patch.setattr(name, step(getattr(sys.modules[module], attribute)))
        yield count


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def assert_kept(before: dict[str, bytes], directory: Path) -> None:
    """What was there is there still, under some name; a file of lines may have got more of them."""
    after = contents(directory)
    for name, content in before.items():
        assert any(other.startswith(content) for other in after.values()), f"{name} has lost something"
