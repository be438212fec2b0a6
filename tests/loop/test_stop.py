"""SIGINT, SIGTERM and SIGHUP, sent to a process of its own that runs the loop with a fake engine."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from models.runs import Runs, keys

from rollgen.format.commit import start_section
from rollgen.loop.stop import Interrupted, Stop

INTERRUPTED = """
import asyncio, resource, sys
from pathlib import Path
from models.fake_engine import FakeEngine
from rollgen.loop.stop import Interrupted
from models.runs import Runs

finished = 0
stubborn = sys.argv[3] == "stubborn"

async def before(request):
    global finished
    if finished < 5:
        finished += 1
        return
    if sys.argv[3] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        if stubborn:
            print("held on", flush=True)
            await asyncio.Event().wait()

runs = Runs(Path(sys.argv[1]), Path(sys.argv[2]))
try:
    runs(FakeEngine(before=before, window=1))
except Interrupted as stop:
    print(stop, runs.engine.closed)
    sys.exit(128 + stop.signal_number)
"""

WAITING = """
import sys
from pathlib import Path
from models.fake_engine import FakeEngine
from models.runs import Runs
from rollgen.format import commit
from rollgen.loop.stop import Interrupted

start_section = commit.start_section

def announced(*arguments):
    print("waiting", flush=True)
    return start_section(*arguments)

class Loaded(FakeEngine):
    async def start(self):
        await super().start()
        print("loaded", flush=True)
        sys.stdin.readline()
        commit.start_section = announced

runs = Runs(Path(sys.argv[1]), Path(sys.argv[2]))
try:
    runs(Loaded(), resume=True)
except Interrupted as stop:
    print(stop)
    sys.exit(128 + stop.signal_number)
"""


def start_process(runs: Runs, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, str(runs.out.parent), str(runs.model), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def start_interrupted(runs: Runs, manner: str) -> subprocess.Popen[str]:
    """A process that has finished five samples and waits for the sixth."""
    process = start_process(runs, INTERRUPTED, manner)
    assert read_line(process) == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_commit_what_is_finished(runs: Runs, number: signal.Signals) -> None:
    """128 + the signal's number, five samples on disk, nothing temporary; --resume makes the other five."""
    process = start_interrupted(runs, "yielding")
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=180)
    assert (process.returncode, stderr) == (128 + number, "")
    assert stdout == f"interrupted by {number.name}; 5 finished samples are committed, --resume continues 1\n"
    assert runs.stored() == keys(5, 2)[:5]
    assert not list(runs.out.rglob(".tmp-*"))
    stats = runs(resume=True)
    assert (stats.stored_before, stats.stored) == (5, 5)
    assert sorted(runs.stored()) == keys(5, 2)


def test_a_commit_that_fails_is_not_told_as_made(runs: Runs) -> None:
    """A full disk, in this case: one line says what became of the work, and the samples are owed."""
    process = start_interrupted(runs, "full")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=180)
    assert (process.returncode, stderr) == (130, "")
    assert stdout.startswith("interrupted by SIGINT; the samples that were finished last could not be committed: ")
    assert "File too large" in stdout
    assert runs(resume=True).stored_before == 0
    assert sorted(runs.stored()) == keys(5, 2)


def test_a_terminal_that_goes(runs: Runs) -> None:
    """SIGHUP comes twice, from the kernel and from the shell: the second one does not cut off the commit."""
    process = start_interrupted(runs, "stubborn")
    process.send_signal(signal.SIGHUP)
    assert read_line(process) == "held on\n"
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_hangup_that_is_ignored(runs: Runs) -> None:
    """As `nohup` has it: the run goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start_interrupted(runs, "yielding")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_second_signal_ends_at_once(runs: Runs) -> None:
    """An engine that does not let go need not be waited for; what was committed before stays, the rest is owed."""
    process = start_interrupted(runs, "stubborn")
    process.send_signal(signal.SIGINT)
    assert read_line(process) == "held on\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM
    runs(resume=True)
    assert sorted(runs.stored()) == keys(5, 2)


@pytest.mark.parametrize("there", [False, True], ids=["a new directory", "a run"])
def test_a_signal_while_others_are_in_the_start_section(runs: Runs, there: bool) -> None:
    """It ends the wait, however long they stay, and the process; nobody is kept out by it afterwards."""
    if there:
        runs(n=1)
    process = start_process(runs, WAITING)
    assert read_line(process) == "loaded\n"
    with start_section(runs.out):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert read_line(process) == "waiting\n"
        process.send_signal(signal.SIGINT)
        try:
            stdout, stderr = process.communicate(timeout=180)
        finally:
            process.kill()
    assert (process.returncode, stderr) == (130, "")
    assert stdout == "interrupted by SIGINT; no sample was finished, and nothing new is stored, --resume continues\n"
    assert runs(resume=True).stored_before == 5 * there
    assert sorted(runs.stored()) == keys(5, 2)


def test_a_signal_that_interrupts_another_thread() -> None:
    """The kernel may choose any. The loop, which waits for nothing else, is woken."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def send() -> None:
        time.sleep(0.2)  # until the loop sleeps
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    async def wait() -> None:
        with Stop() as stop:
            threading.Thread(target=send).start()
            await stop.guard(asyncio.Event().wait())

    with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
        asyncio.run(wait())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
