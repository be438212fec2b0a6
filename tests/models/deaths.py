"""Death at any step of what runs, in this process or in one of its own, and what must be there afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

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


_KILLED = """
import os, signal, sys
from pathlib import Path
from rollgen.curate.compact import compact
from rollgen.curate.merge import merge

call, name, at, *places = sys.argv[1:]
at, real, places = int(at), getattr(os, name), [Path(place) for place in places]

def step(*arguments, **named):
    global at
    at -= 1
    if at == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)

setattr(os, name, step)
if call == "compact":
    compact(*places)
else:
    merge(places[:-1], places[-1])
"""


def killed(call: Literal["compact", "merge"], *places: Path, name: str, at: int) -> int:
    """The exit code of a process that is killed by a signal before its `at`-th `os.<name>`: it compacts a dataset, or
    merges some into the last place."""
    arguments = [call, name, str(at), *map(str, places)]
    return subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False, timeout=180).returncode


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def assert_kept(before: dict[str, bytes], directory: Path) -> None:
    """What was there is there still, under some name; a file of lines may have got more of them."""
    after = contents(directory)
    for name, content in before.items():
        assert any(other.startswith(content) for other in after.values()), f"{name} has lost something"
