"""`rollgen generate --out s3://...` in a process of its own, with a fault on demand in what it does to the storage.

Steps are the calls of `ObjectStore` that change something. They are numbered from 1; `kill_at` ends the whole process
group with SIGKILL in front of that call or, when `after`, behind it, before its answer is known.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import s3fs
from models.datasets import Key, read_rows
from models.program import Finished, Program, Running

from rollgen.cli.app import main
from rollgen.remote import lease, workspace
from rollgen.remote.objects import ObjectStore
from rollgen.verify.dataset import verify_dataset

STEPS = ("create", "replace", "put", "upload", "delete")


@dataclass(frozen=True)
class StorageFaults:
    """What is unusual about one process's storage."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Where it is, and where the workspace is."""
    kill_at: int | str = 0
    """Number of the step, or what its line in `steps` is."""
    after: bool = False
    steps: Path | None = None
    """File that gets a line for each step."""
    stop_before: str = ""
    """The process stops (SIGSTOP) in front of the first step whose line in `steps` has this in it."""
    passing: int = 0
    """So many of these steps are taken before."""
    patience: float = 600.0
    """Seconds after which a silent lock is that of a dead writer: none that is only slow, or stopped for a minute."""
    beat: float = 60.0
    """Seconds between two beats, and between two looks at a lock."""
    hasty: bool = False
    """The time that it waits for others passes at once: to it, whoever does not beat meanwhile is dead."""
    outage: float = 0.0
    """Seconds for which a commit is tried again while the storage fails."""


class HastyClock:
    """For a module's `time`: as it is, but that sleep takes no time."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
    clock_gettime = staticmethod(time.clock_gettime)

    def __init__(self) -> None:
        self._slept = 0.0

    def sleep(self, seconds: float) -> None:
        self._slept += seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._slept


def rollgen(faults: StorageFaults) -> None:
    """The entry of a process: see `models.program.Program.start`."""
    os.environ |= faults.environment
    lease.DEAD_SECONDS = faults.patience
    lease.REFRESH_SECONDS = lease.POLL_SECONDS = faults.beat
    if faults.hasty:
        lease.time = HastyClock()  # type: ignore[assignment]
    s3fs.S3FileSystem.retries = 1
    s3fs.S3FileSystem.read_timeout = 180
    workspace.OUTAGE_SECONDS = faults.outage
    _watch(faults)
    main()


def _watch(faults: StorageFaults) -> None:
    taken = 0
    met = 0

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(store: ObjectStore, *arguments: Any) -> Any:
            nonlocal taken, met
            taken += 1
            place = str(arguments[1] if name in ("put", "upload") else arguments[0])
            step = f"{name} {place}"
            if faults.steps is not None:
                with faults.steps.open("a") as file:
                    file.write(f"{step}\n")
            if faults.stop_before and faults.stop_before in step:
                met += 1
                if met == faults.passing + 1:
                    signal.raise_signal(signal.SIGSTOP)  # for this thread: another one might not be stopped at once
            last = faults.kill_at in (taken, step)
            if last and not faults.after:
                os.killpg(0, signal.SIGKILL)
            result = real(store, *arguments)
            if last:
                os.killpg(0, signal.SIGKILL)
            return result

        return call

    for name in STEPS:
        setattr(ObjectStore, name, watched(name, getattr(ObjectStore, name)))


class StoredRuns:
    """Runs of one URL, each on a machine of its own if need be, with a replayed engine."""

    def __init__(self, program: Program, directory: Path, model: Path, url: str) -> None:
        self.url = url
        self.store = ObjectStore(url)
        self.prompts = directory / "prompts.jsonl"
        self._program = program
        self._directory = directory
        self._command = ("generate", self.prompts, "--model", model, "--dtype", "float32", "--max-tokens", 16)
        self._environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self._copies = itertools.count()

    def start(
        self, *options: object, storage: Mapping[str, Any] | None = None, machine: str = "", **faults: object
    ) -> Running:
        """Start `rollgen generate --out URL`. `storage` are fields of StorageFaults, `faults` of `replayed.Faults`."""
        environment = self._environment | {"XDG_CACHE_HOME": str(self.cache(machine)), "AWS_MAX_ATTEMPTS": "1"}
        entry = partial(rollgen, StorageFaults(environment, **(storage or {})))
        hostname = {"hostname": machine} if machine else {}
        arguments = (*self._command, "--progress", "log", "--out", self.url, *options)
        return self._program.start(*arguments, entry=entry, **hostname, **faults)

    def __call__(self, *options: object, code: int = 0, **unusual: Any) -> Finished:
        """Run to the end and check the exit code."""
        finished = self.start(*options, **unusual).wait()
        assert finished.code == code, f"exit {finished.code}, not {code}\n{finished.stdout}\n{finished.stderr}"
        assert "Traceback" not in finished.stderr, finished.stderr
        return finished

    def cache(self, machine: str = "") -> Path:
        """What stands for the user's cache directory on a machine."""
        return self._directory / f"cache-{machine}"

    def copy(self) -> Path:
        """A plain copy of all objects."""
        directory = self._directory / f"copy-{next(self._copies)}"
        for name in self.store.list():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self.store.download(name, path)
        return directory

    def verified_rows(self) -> dict[Key, dict[str, Any]]:
        """Those of a plain copy, which verifies clean and in which nobody holds a lock any more."""
        copy = self.copy()
        assert not list(copy.rglob("*.lock"))
        assert verify_dataset(copy).is_clean
        return read_rows(copy)

    def wait_until_stopped(self, running: Running) -> None:
        """Until the process has come to `stop_before`."""
        while Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert running.alive, running.output
            time.sleep(0.05)

    def wait_for(self, name: str, running: Running) -> None:
        """Until the storage has an object of this name."""
        while not self.store.exists(name):
            assert running.alive, running.output
            time.sleep(0.05)
