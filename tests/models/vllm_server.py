"""Real vLLM servers as processes of their own, on ports of their own, that are gone when a test is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from models.ports import free_port

START_SECONDS = 900
STOP_SECONDS = 20
"""Then it is killed."""


class VllmServer:
    """vLLM's server with a tiny model in float32. Keeps its port when it is started again."""

    def __init__(self, model: Path, scratch: Path, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = scratch / f"{self.port}.log"
        own = {"TMPDIR": str(scratch), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._environment = os.environ | own | environment
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny", "--dtype", "float32"),
            *("--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"),
            *("--no-enable-prefix-caching", "--max-num-seqs", "8", *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does not wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            log = self._log.read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL, engine and all."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # when all have ended by themselves
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """In order, so that it leaves no shared memory behind; and if that takes too long, as `kill`."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self.kill()

    def running(self) -> int:
        """Requests that it is at."""
        return self._metric("vllm:num_requests_running")

    def generated(self) -> int:
        """Tokens since it was started."""
        return self._metric("vllm:generation_tokens_total")

    def _metric(self, name: str) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name + "{"))

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False
