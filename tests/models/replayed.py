"""The `rollgen` command with its engine replaced, and a fault on demand: all else is the real program.

`main` is what a process of its own runs (`program.py`). The engine's completions are a pure function of a request's
seed: whatever was killed and continued in between, the rows of a finished dataset are those of an undisturbed run. A
longer max_tokens goes on where a shorter one cut.

Steps are the calls that change what is on disk, or say when it is: link, replace, rename, unlink, mkdir, rmdir,
truncate and fsync, write_table of a row group, and append of a line. They are numbered from 1; `kill_at` ends the whole
process group with SIGKILL in front of that call, or for a line, once half of it is written.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rollgen import crews
from rollgen.engines.base import Capture, Extras, SampleRequest
from rollgen.errors import EngineError
from rollgen.format import jsonlines
from rollgen.format.manifest import EngineRecord
from rollgen.loop import sampling
from rollgen.loop.engines import Engines
from rollgen.preflight import Preflight
from rollgen.rollouts import Completion

STEPS = ("link", "replace", "rename", "unlink", "mkdir", "rmdir", "truncate", "fsync")
"""Of `os`, which pathlib and shutil call too."""
LONGEST = 40
"""Tokens of the longest response, before max_tokens cuts it."""
_ENDS = (signal.SIGINT, signal.SIGTERM)
_CLONE_NEWUTS = 0x04000000


@dataclass(frozen=True, slots=True)
class Faults:
    """What is unusual about one process."""

    delay: float = 0.0
    """Seconds that a sample takes on average."""
    hang_after: int | None = None
    """So many samples come, the others never do."""
    let_through: Path | None = None
    """As many requests as this file has bytes, in the order of their arrival, are answered; the others wait."""
    tick: float = 0.05
    """Seconds between two looks at the clock, ten times as often as in earnest: so many commits may be in a second."""
    engine_process: bool = False
    """The seed of each sample passes through a process, without which there are none."""
    stubborn: bool = False
    """Samples do not let go when they are cancelled, as of an engine that has died in a bad way."""
    kill_at: int | str = 0
    """Number of the step, or the first one of that name; 0 is never."""
    steps: Path | None = None
    """File that gets a line for each step."""
    largest_file: int | None = None
    """Bytes: a limit on file sizes stands in for a full disk."""
    hostname: str | None = None
    """Of this process alone, where the system lets it have one."""


def main(
    entry: Callable[[], None], arguments: list[str], output: tuple[Path, Path], scratch: Path, faults: Faults
) -> None:
    """Run a program, given by its `main`, as the leader of a session. `output` takes stdout and stderr."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # as long as it is not the program that they would end
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    os.chdir(scratch)
    os.environ |= {"TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    tempfile.tempdir = None
    for descriptor, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if faults.hostname is not None and ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0:
        socket.sethostname(faults.hostname)
    if faults.kill_at or faults.steps is not None:
        _watch_steps(faults)
    sampling.TICK_SECONDS = faults.tick
    crews.make_crew = lambda preflight: Engines([ReplayedEngine(preflight, faults=faults)])
    sys.argv = ["rollgen", *arguments]
    if faults.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (faults.largest_file, resource.RLIM_INFINITY))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    except KeyboardInterrupt:  # it has come already
        sys.exit(128 + signal.SIGINT)
    try:
        entry()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)


class ReplayedEngine:
    """See `rollgen.engines.base.Engine`: it answers with `completion_of(request)`, after a while."""

    capture: Capture = "logprobs"
    dtype = "float32"
    extras = Extras()
    window = 8
    resampled = 0
    notes: tuple[str, ...] = ()

    def __init__(self, preflight: Preflight, *, faults: Faults) -> None:
        self.record = EngineRecord(name="replayed", version="1", device="cpu", versions={}, processors="top_k, top_p")
        self.tokens = 0
        self._asked = 0
        self._decode = preflight.model.decode
        self._support_logprobs = preflight.config.support_logprobs
        self._faults = faults
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Nothing to load, but for the process."""
        await asyncio.sleep(0)
        if self._faults.engine_process:
            self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    async def sample(self, request: SampleRequest) -> Completion:
        """Raises EngineError when the engine's process is dead."""
        self._asked += 1
        hangs = self._faults.hang_after is not None and self._asked > self._faults.hang_after
        if hangs and self._asked == self._faults.hang_after + self.window:
            print("all hang", file=sys.stderr, flush=True)  # those before them are with the writer
        place = self._asked
        try:
            while self._faults.let_through is not None and place > self._faults.let_through.stat().st_size:
                await asyncio.sleep(0.01)
            await asyncio.sleep(math.inf if hangs else float(np.random.default_rng().exponential(self._faults.delay)))
        finally:
            if self._faults.stubborn and asyncio.current_task().cancelling():
                print("cancelled", file=sys.stderr, flush=True)
            while self._faults.stubborn and asyncio.current_task().cancelling():
                await asyncio.sleep(0.01)
        if self._process is not None:
            _pass_through(self._process, b"%d\n" % request.seed)
        completion = completion_of(request, self._decode, support_logprobs=self._support_logprobs)
        self.tokens += len(completion.token_ids)
        return completion

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def completion_of(request: SampleRequest, decode: Callable[..., str], *, support_logprobs: bool) -> Completion:
    """1 to LONGEST tokens out of the request's seed, cut at max_tokens. The ids of a support are equally probable."""
    rng = np.random.default_rng(request.seed)
    wanted = int(rng.integers(1, LONGEST + 1))
    sizes, steps, picks = rng.integers(1, 9, LONGEST), rng.integers(1, 64, (LONGEST, 8)), rng.random(LONGEST)
    prompt = request.prompt
    tokens = min(wanted, prompt.sampling.max_tokens)
    sizes, ids = sizes[:tokens], steps[:tokens].cumsum(axis=1) - 1  # below 8 * 63 = 504
    kept = np.arange(8) < sizes[:, None]
    logprobs = -np.log(sizes).astype(np.float32)
    token_ids = ids[np.arange(tokens), (picks[:tokens] * sizes).astype(np.int64)].astype(np.int32)
    return Completion(
        prompt_id=prompt.prompt_id,
        sample_index=request.sample_index,
        prompt_index=prompt.prompt_index,
        prompt_token_ids=prompt.token_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        mask_ids=ids[kept].astype(np.int32),
        mask_offsets=np.concatenate([[0], sizes.cumsum()]),
        support_logprobs=np.repeat(logprobs, sizes) if support_logprobs else None,
        finish_reason="length" if tokens < wanted else "stop",
        sampling=prompt.sampling,
        seed=request.seed,
        generation=request.generation,
        text=decode(token_ids),
        prompt=prompt.prompt,
        metadata=prompt.metadata,
    )


def _pass_through(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Raises EngineError when it does not come back."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        echo = process.stdout.read(len(line))
    except BrokenPipeError:
        echo = b""
    if echo != line:
        raise EngineError("the replayed engine's process died")


def _watch_steps(faults: Faults) -> None:
    """Count the steps from now on, and die in front of the one that is wanted."""
    taken = 0

    def step(name: str, place: object) -> bool:
        """Whether this is the last one."""
        nonlocal taken
        taken += 1
        if faults.steps is not None:
            with faults.steps.open("a") as file:
                file.write(f"{name} {_place(place)}\n")
        is_trial = _place(place).endswith("-link")  # of whether there are hard links: a name means what is for good
        return faults.kill_at == taken or (faults.kill_at == name and not is_trial)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*arguments: Any, **named: Any) -> Any:
            if step(name, arguments[0]):
                _die()
            return real(*arguments, **named)

        return call

    write_all = jsonlines._write_all

    def write_half(file: Any, content: bytes) -> None:
        if step("append", file.name):
            file.write(content[: len(content) // 2])
            _die()
        write_all(file, content)

    for name in STEPS:
        setattr(os, name, watched(name, getattr(os, name)))
    pq.ParquetWriter.write_table = watched("write_table", pq.ParquetWriter.write_table)
    jsonlines._write_all = write_half


def _place(argument: object) -> str:
    """What a step is about, where it can be told."""
    return os.fsdecode(argument) if isinstance(argument, str | bytes | os.PathLike) else ""


def _die() -> None:
    os.killpg(0, signal.SIGKILL)
