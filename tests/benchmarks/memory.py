"""Peak memory of a whole run, from prompt file to last commit, as the number of prompts grows a hundredfold.

    python -m tests.benchmarks.memory

The real preflight, loop, writer and commits; only the engine is replaced, by one that answers at once with short
completions. Each size runs in a process of its own and makes the same million samples, of few prompts or of many.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (10_000, 100_000, 1_000_000)
SAMPLES = 1_000_000
TOKENS = 4
COMMIT_SECONDS = 0.5
"""A run holds what it made since the last commit; at thousands of samples a second that must not drown the rest."""


class InstantEngine:
    """`engines.base.Engine` that answers at once: TOKENS tokens with supports of two ids."""

    capture = "native"
    dtype = "float32"
    window = 256
    resampled = 0

    def __init__(self) -> None:
        from rollgen.format.manifest import EngineRecord

        self.record = EngineRecord(name="instant", version="1", device="cpu", versions={}, processors="none")
        self._token_ids = np.arange(3, 3 + TOKENS, dtype=np.int32)
        self._mask_ids = np.stack([self._token_ids, self._token_ids + 1], axis=1).reshape(-1)
        self._offsets = np.arange(0, 2 * TOKENS + 1, 2, dtype=np.int64)
        self._logprobs = np.full(TOKENS, -0.5, np.float32)

    async def start(self) -> None:
        pass

    async def sample(self, request: Any) -> Any:
        import asyncio

        from rollgen.rollouts import Completion

        await asyncio.sleep(0)
        prompt = request.prompt
        return Completion(
            prompt_id=prompt.prompt_id,
            sample_index=request.sample_index,
            prompt_index=prompt.prompt_index,
            prompt_token_ids=prompt.token_ids,
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            mask_ids=self._mask_ids,
            mask_offsets=self._offsets,
            finish_reason="length",
            sampling=prompt.sampling,
            seed=request.seed,
            prompt=prompt.prompt,
            metadata=prompt.metadata,
        )

    def close(self) -> None:
        pass


def run(prompts: int) -> None:
    """One run in this process; prints peak memory and time as JSON."""
    from models.tiny import make_tiny_model

    from rollgen.cli.progress import ConsoleReporter
    from rollgen.config import RunConfig
    from rollgen.loop.engines import Engines
    from rollgen.loop.run import generate

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = make_tiny_model(directory / "model")
        file = directory / "prompts.jsonl"
        with file.open("w") as lines:
            for index in range(prompts):
                lines.write(json.dumps({"prompt": f"Question {index}: how much is it?", "answer": index}) + "\n")
        config = RunConfig(model=str(model), max_tokens=TOKENS, n=SAMPLES // prompts, commit_interval=COMMIT_SECONDS)
        started = time.monotonic()
        with ConsoleReporter("none") as reporter:
            out = directory / "out"
            stats = generate([file], config, out, make_crew=lambda _: Engines([InstantEngine()]), reporter=reporter)
        assert stats.stored == SAMPLES
        print(json.dumps({"mib": peak_kib() / 1024, "seconds": time.monotonic() - started}))


def peak_kib() -> int:
    """Peak resident memory of this process; `ru_maxrss` would begin with that of the process it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Print the table."""
    print(f"{'prompts':>10}{'peak MiB':>10}{'samples/s':>11}")
    for prompts in SIZES:
        command = [sys.executable, "-m", "tests.benchmarks.memory", str(prompts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"{prompts:>10,}{result['mib']:>10,.0f}{SAMPLES / result['seconds']:>11,.0f}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    run(int(sys.argv[1])) if len(sys.argv) > 1 else main()
