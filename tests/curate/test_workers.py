"""The processes that score, at their worst: what they do, and what becomes of their module, mixes no two scorers.

Datasets have twelve samples of six prompts; each test writes a module of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pebble.pool.process import PoolManager

from rollgen.curate import workers
from rollgen.curate.compact import compact
from rollgen.curate.score import score
from rollgen.errors import ResumeRefused, RollgenError, UsageError
from rollgen.format.rewards import list_parts

CHANGES = """
import os
from pathlib import Path
VALUE = 1.0
def f(answers):
    if answers[0].prompt_id == "p3":
        path = Path(__file__)
        path.write_text(path.read_text().replace("VALUE = 1.0", "{became}"))
        os._exit(9)
    return [VALUE] * len(answers)
"""
FORKS = """
import os
def f(answers):
    child = os.fork()
    if not child:
        {child}
    os.waitpid(child, 0)
    return [1.0] * len(answers)
"""
TELLS = """
import os
def f(answers):
    os.environ["JUDGE_TOKEN"] = "tell nobody of this"
    raise RuntimeError("x" * {shift} + "tell nobody of this" + "y" * 1000)
"""
HIDES = """
import os
def f(answers):
    secret = os.environ.pop("JUDGE_TOKEN", "tell nobody of this")
    return [ValueError(secret)] * len(answers)
"""
WAITS = """
import os, time
if os.getpid() != {parent}:
    time.sleep(600)
def f(answers):
    return [1.0] * len(answers)
"""
DIES = """
import os
def f(answers):
    os._exit(9)
"""
SLOW = """
import time
def f(answers):
    print(__import__("os").getpid(), flush=True)
    if answers[0].prompt_id != "p0":
        time.sleep(3600)
    return [1.0] * len(answers)
"""
STOPPED = """
import time
from pathlib import Path
def f(answers):
    first = Path(__file__).with_name("first")
    if not first.exists():
        first.touch()
        print(1, flush=True)
        time.sleep(3600)
    return [1.0] * len(answers)
"""
HOURS = """
import signal, time
clocks, stopped = (time.time, time.monotonic), [0.0]
signal.signal(signal.SIGCONT, lambda number, frame: stopped.append(7200.0))
time.time, time.monotonic = (lambda clock=clock: clock() + stopped[-1] for clock in clocks)
"""
"""Whoever is stopped is stopped for two hours."""
TAKEN = """
import math, sys
from rollgen.curate import score
add, score._commit_seconds = score._Store.add, lambda parts: math.inf
def announced(store, judged):
    add(store, judged)
    if judged:
        print("taken", file=sys.stderr, flush=True)
score._Store.add = announced
"""
PROGRAM = "from rollgen.cli.app import main\nif __name__ == '__main__': main()"


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Two shards."""
    return make_dataset(tmp_path / "run")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`write(text)` makes it the module `judge`, here and in the processes that score."""
    directory = tmp_path / "modules"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "judge", raising=False)

    def write_module(text: str) -> Path:
        path = directory / "judge.py"
        path.write_text(text)
        return path

    return write_module


def stored(directory: Path, column: str = "reward") -> list[float | str | None]:
    """Of all rows of all files."""
    return [value for path in list_parts(directory, "f") for value in pq.read_table(path)[column].to_pylist()]


@pytest.mark.parametrize("became", ["VALUE = 2.0", "VALUE ="])
def test_a_module_that_changes_meanwhile(dataset: Path, write: Callable[[str], Path], became: str) -> None:
    """A process that starts afterwards would score by another function, or by none: what is finished is committed."""
    path = write(CHANGES.replace("{became}", became))
    with pytest.raises(
        ResumeRefused, match=rf"^{path}: has changed while judge:f was scoring; .*--name, or all with --"
    ):
        score(dataset, "judge:f", processes=1, batch_size=2)
    assert stored(dataset) == [1.0] * 6


def test_a_module_that_is_removed_meanwhile(dataset: Path, write: Callable[[str], Path]) -> None:
    """It is no longer what it was, either."""
    write("import os\ndef f(answers):\n    os.unlink(__file__)\n    os._exit(9)\n")
    with pytest.raises(ResumeRefused, match="has changed while judge:f was scoring"):
        score(dataset, "judge:f", processes=1)


@pytest.mark.parametrize("child", ["return [-1.0] * len(answers)", "raise ValueError", "raise SystemExit"])
def test_a_function_that_forks(dataset: Path, write: Callable[[str], Path], child: str) -> None:
    """A child that comes back answers for nobody."""
    write(FORKS.replace("{child}", child))
    assert score(dataset, "judge:f", processes=1, batch_size=2).scored == 12
    assert stored(dataset) == [1.0] * 12


@pytest.mark.parametrize("shift", [0, 263])
def test_a_secret_of_the_process(dataset: Path, write: Callable[[str], Path], shift: int) -> None:
    """Of its environment as it is when the function fails, also where the text is cut."""
    write(TELLS.replace("{shift}", str(shift)))
    assert score(dataset, "judge:f", processes=1).failed == 12
    for error in stored(dataset, "error"):
        assert isinstance(error, str)
        assert "tell" not in error
        assert "$JUDGE" in error


def test_a_secret_that_the_function_has_hidden(
    dataset: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From others that its process starts, perhaps. It is in the environment of this one."""
    monkeypatch.setenv("JUDGE_TOKEN", "tell nobody of this")
    write(HIDES)
    assert score(dataset, "judge:f", processes=1).failed == 12
    assert set(stored(dataset, "error")) == {"ValueError: $JUDGE_TOKEN"}


def test_a_module_that_hangs_elsewhere(
    dataset: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be imported here and not there: nobody waits for ever."""
    monkeypatch.setattr(workers, "_START_SECONDS", 1.0)
    write(WAITS.replace("{parent}", str(os.getpid())))
    with pytest.raises(RollgenError, match=r"stand still: importing judge:f takes them longer than 0.5 s"):
        score(dataset, "judge:f", processes=1, timeout=0.5)


def test_a_function_that_ends_every_process(
    dataset: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes of going on."""
    monkeypatch.setattr(workers, "_DEATHS", 4)
    write(DIES)
    with pytest.raises(RollgenError, match="judge:f: its process died with exit code 9, and so did the 3 before, with"):
        score(dataset, "judge:f", processes=1, batch_size=6)


def test_a_compaction_meanwhile(dataset: Path, write: Callable[[str], Path]) -> None:
    """The samples are where they are now, and each is scored once."""
    write("def f(answers):\n    return [1.0] * len(answers)\n")

    def once(done: int, total: int) -> None:
        if done and not compacted:
            compacted.append(compact(dataset, shard_tokens=1000))

    compacted: list[object] = []
    done = score(dataset, "judge:f", processes=1, batch_size=1, progress=once)
    assert (done.samples, done.scored, done.kept) == (12, 12, 0)
    assert stored(dataset) == [1.0] * 12
    assert score(dataset, "judge:f", processes=1).kept == 12


def test_a_stop_of_everything(dataset: Path, write: Callable[[str], Path]) -> None:
    """By Ctrl-Z, for longer than an import and a batch may take: nobody stood still while nobody ran."""
    path = write(STOPPED)
    command = [sys.executable, "-c", HOURS + PROGRAM, "score", dataset, "--with", "judge:f", "--processes", "1"]
    command += ["--batch-size", "4"]
    with subprocess.Popen(
        list(map(str, command)), cwd=path.parent, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        running.stderr.readline()
        os.killpg(running.pid, signal.SIGSTOP)
        time.sleep(1)  # so that the program looks for what came back as soon as it goes on
        os.killpg(running.pid, signal.SIGCONT)
        error = running.stderr.read()
        assert running.wait() == 0, error
    assert stored(dataset) == [1.0] * 12


def test_a_death_before_the_last_words_are_read(
    dataset: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process, which has little time: the death is of the answers that it was at, and not of those before."""
    real = PoolManager.process_next_message

    def late(manager: PoolManager, timeout: float) -> None:
        time.sleep(0.2)  # the library looks twice as often whether its processes live
        real(manager, timeout)

    monkeypatch.setattr(PoolManager, "process_next_message", late)
    write(
        "import os\n"
        "def f(answers):\n    answers[0].prompt_id == 'p3' and os._exit(9)\n    return [1.0] * len(answers)\n"
    )
    done = score(dataset, "judge:f", processes=1, batch_size=6)
    assert (done.scored, done.failed) == (10, 2)
    assert set(stored(dataset, "error")) == {None, "its process died with exit code 9"}
    assert stored(dataset) == [1.0] * 6 + [None] * 2 + [1.0] * 4


def test_what_came_back_beside_a_failure() -> None:
    """It is handed out before the failure may end everything."""
    good, bad = Future[object](), Future[object]()
    good.set_result([])
    bad.set_exception(UsageError("no"))
    assert list(workers._first([bad, good])) == [good]
    assert list(workers._first([bad])) == [bad]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_a_command_that_is_ended(dataset: Path, write: Callable[[str], Path], number: signal.Signals) -> None:
    """Its processes end with it; what is finished is committed, but where it was killed."""
    path = write(SLOW)
    command = [sys.executable, "-c", TAKEN + PROGRAM, "score", dataset, "--with", "judge:f", "--processes", "1"]
    command += ["--batch-size", "2"]
    with subprocess.Popen(list(map(str, command)), cwd=path.parent, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        first, second, taken = sorted(running.stderr.readline() for _ in range(3))
        assert (first, taken) == (second, "taken\n")
        running.send_signal(number)
        error = running.stderr.read()  # until the process that scores has ended too, which holds it open
        assert running.wait() == (-number if number == signal.SIGKILL else 128 + number), error
    assert stored(dataset) == ([] if number == signal.SIGKILL else [1.0, 1.0])


def test_a_function_of_standard_input(dataset: Path) -> None:
    """No other process could find it."""
    program = f"import rollgen\ndef f(answers): return [1.0] * len(answers)\nrollgen.score({str(dataset)!r}, f)\n"
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=False)
    assert "UsageError: __main__:f: other processes cannot import it from a notebook or from" in done.stderr
    assert not (dataset / "rewards").exists()


def test_a_program_of_standard_input(dataset: Path, write: Callable[[str], Path]) -> None:
    """The processes that score import the program as well: one clear error, and not one for each of them."""
    path = write("def f(answers):\n    return [1.0] * len(answers)\n")
    program = f"import rollgen\nif __name__ == '__main__': rollgen.score({str(dataset)!r}, 'judge:f')\n"
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=False, cwd=path.parent
    )
    assert "UsageError: <stdin>: is the program that calls this, and no file that the processes" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert not (dataset / "rewards").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field": 5}, "field must be a text, not of type int"),
        ({"name": 5}, "name must be a text, not of type int"),
        ({"extract": b"x"}, "extract must be a text, not of type bytes"),
        ({"timeout": "1"}, "timeout must be a finite number of seconds above 0"),
        ({"batch_size": 2.0}, "batch_size must be a whole number, 1 or more, not 2.0"),
    ],
)
def test_options_of_other_types(dataset: Path, options: dict[str, object], message: str) -> None:
    """Refused before anything is written."""
    with pytest.raises(UsageError, match=message):
        score(dataset, "exact_match", **{"field": "answer", **options})  # type: ignore[arg-type]
    assert not (dataset / "rewards").exists()
