"""The installed `rollgen` command in processes of its own, with real vLLM on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROLLGEN = Path(sys.executable).with_name("rollgen")
REPOSITORY = Path(__file__).parents[2]
HANGS = 900
"""Seconds that nothing here takes: to load vLLM takes half a minute, and ten times as long on a bad day."""


@dataclass
class Command:
    """Runs `rollgen` with a temporary directory of its own: killed engines leave sockets and segments behind."""

    scratch: Path
    directory = ROLLGEN.parent
    """Of the installed command."""
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: {"VLLM_CPU_KVCACHE_SPACE": "1"})
    """Set on top of this process's own. A cache of 1 GiB: to clear a quarter of the memory takes seconds."""

    def __call__(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit code."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=HANGS)
        assert process.returncode == code, f"exit {process.returncode}\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start in a process group of its own, as a shell would."""
        environment = os.environ | {"TMPDIR": str(self.scratch), "HF_HUB_OFFLINE": "1"} | self.environment
        process = subprocess.Popen(
            [str(ROLLGEN), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.scratch,
            env=environment,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def members(self, process: subprocess.Popen[str]) -> list[int]:
        """Processes of that command's session that are alive: the engine's among them."""
        listing = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(process.pid)], capture_output=True, text=True)
        return [int(line.split()[0]) for line in listing.stdout.splitlines() if not line.split()[1].startswith("Z")]

    def wait_until_gone(self, process: subprocess.Popen[str]) -> str:
        """Until no process of that command is left: one that loads imports vLLM first. Its stderr."""
        deadline = time.monotonic() + HANGS
        while members := self.members(process):
            assert time.monotonic() < deadline, members
            time.sleep(0.1)
        return process.communicate()[1]


@pytest.fixture(scope="module")
def rollgen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """`rollgen(*arguments, code=0)` runs the command; `rollgen.start(...)` starts it."""
    command = Command(tmp_path_factory.mktemp("scratch"))
    yield command
    for process in command.running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="session")
def write_prompts() -> Callable[..., Path]:
    """`write_prompts(path, rows)`: a JSONL file."""

    def write(path: Path, rows: list[dict[str, Any]]) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def wait_for_shards() -> Callable[[Path, int, subprocess.Popen[str]], None]:
    """`wait_for_shards(dataset, count, process)`: until the journal has that many lines."""

    def wait(dataset: Path, count: int, process: subprocess.Popen[str]) -> None:
        journal = dataset / "journal" / "w0.jsonl"
        deadline = time.monotonic() + HANGS
        while not journal.exists() or journal.read_bytes().count(b"\n") < count:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no commit in time"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model that `make model` puts in place."""
    model = REPOSITORY / ".cache" / "smollm2"
    assert model.is_dir(), "run `make model` first"
    return model
