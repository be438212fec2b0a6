"""`rollgen generate` with real vLLM, its whole process group killed at random moments after a commit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from models.datasets import planned_keys, read_rows, write_prompts

PROMPTS, N = 150, 4
LATEST = 2.0
"""Seconds after an attempt's first commit: the latest kill."""
_ROLLGEN = Path(sys.executable).with_name("rollgen")


def run(directory: Path, model: Path, *, kills: int, seed: int) -> str:
    """Kill it so many times and let it finish. Returns the figure; raises AssertionError for anything that is lost."""
    rng, out, n = random.Random(seed), directory / "out", N
    prompts = write_prompts(directory / "prompts.jsonl", PROMPTS)
    flags = (
        "--dtype",
        "float32",
        "--max-tokens",
        "64",
        "--sampling-arg",
        "ignore_eos=true",
        "--commit-interval",
        "0.5",
    )
    command = [str(_ROLLGEN), "generate", str(prompts), "--model", str(model), "--out", str(out), "--resume", *flags]
    killed = 0
    while killed < kills:
        before = _journal(out)
        if _kill([*command, "--n", str(n)], directory, out, rng.uniform(0, LATEST)):
            killed += 1
        else:
            n += 1
        assert _journal(out).startswith(before), "the journal has lost lines"
    log = directory / "last.log"
    with log.open("w") as file:
        code = subprocess.run(
            [*command, "--n", str(n)], stdout=file, stderr=file, env=_environment(directory)
        ).returncode
    assert code == 0, log.read_text()
    rows = read_rows(out)
    assert rows.keys() == planned_keys(PROMPTS, n)
    verified = subprocess.run([str(_ROLLGEN), "verify", str(out)], capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout
    return f"{killed} kills, {len(rows):,} of {len(rows):,} samples stored once, verify clean"


def _kill(command: list[str], directory: Path, out: Path, moment: float) -> bool:
    """Start it, and kill it after a commit. Returns False when it had ended."""
    commits = _journal(out).count(b"\n")
    log = directory / "killed.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=_environment(directory), start_new_session=True
        )
        while process.poll() is None and _journal(out).count(b"\n") == commits:
            time.sleep(0.05)
        time.sleep(moment)
        members = _members(process.pid)
        segments = {segment for member in members for segment in _segments(member)}
        for member in members:  # the engine's processes have groups of their own
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(member, signal.SIGKILL)
        code = process.wait(180)
    assert code in (0, -signal.SIGKILL), log.read_text()
    deadline = time.monotonic() + 180
    while _members(process.pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)
    for segment in segments:
        segment.unlink(missing_ok=True)
    return code != 0


def _environment(directory: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(directory), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def _journal(out: Path) -> bytes:
    path = out / "journal" / "w0.jsonl"
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _members(session: int) -> list[int]:
    """Living processes of a session."""
    listing = subprocess.run(["ps", "-o", "pid=,stat=", "-s", str(session)], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if not line.split()[1].startswith("Z")]


def _segments(process: int) -> set[Path]:
    """Shared memory that it has mapped, which a kill leaves behind."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return set()
    return {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
