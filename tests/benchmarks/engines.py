"""Generated tokens a second with real vLLM: rollgen against what people use, in interleaved pairs.

    python -m tests.benchmarks.engines --model .cache/smollm2

rollgen is the whole of a run: its loop, exact supports, checks, shards that are verified and committed. Against it,
with the same prompts, lengths, seeds, places in the batch and requests in flight:

    bare AsyncLLM            the same engine with the same parameters, its outputs thrown away
    AsyncLLM without masks   the same, without what supports are read from
    LLM.generate in batches  of as many prompts as are in flight elsewhere, one after the other, outputs thrown away
    rollgen over HTTP        through a vLLM server on this machine

One prompt in eight wants a long answer, the others short ones. A pair is two legs after each other, in turns in either
order; what counts is the median of the ratios of pairs: above 1, rollgen in process is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rollgen.cli.progress import ConsoleReporter
from rollgen.config import RunConfig, load_config
from rollgen.crews import make_crew
from rollgen.engines.base import SampleRequest
from rollgen.engines.children import PARENT_VARIABLE
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.schema import PLAN_FILE
from rollgen.inert import Discretion
from rollgen.loop.crew import Job
from rollgen.loop.owed import Owed
from rollgen.loop.report import RunStats
from rollgen.preflight import establish, plan_run
from rollgen.prompts.plan import Plan

SLOTS = 16
"""Requests in the engine's batch."""
WINDOW = 24
"""Requests in flight."""
PROMPTS = 64
LONG_TOKENS = 192
"""Of one answer in eight."""
SHORT_TOKENS = (4, 24)
"""Of the others, between these."""
TOP_K = 50
MAX_MODEL_LEN = 512
KV_CACHE_BYTES = 1 << 29
KV_CACHE = f"kv_cache_memory_bytes={KV_CACHE_BYTES}"
Leg = Callable[[], Awaitable[float]]
"""Makes everything once and returns the seconds."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2"))
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_compare(arguments.model.resolve(), arguments.pairs, Path(scratch)))


async def _compare(model: Path, pairs: int, scratch: Path) -> None:
    tokens = _lengths()
    prompts = scratch / "prompts.jsonl"
    rows = [{"id": str(i), "prompt": f"Number {i} is", "max_tokens": count} for i, count in enumerate(tokens)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{PROMPTS} prompts, {sum(tokens)} tokens, {min(tokens)} to {max(tokens)} each, {WINDOW} in flight")
    with _llm(model) as llm, _server(model, scratch) as url:
        ours = Rollgen(prompts, scratch / "ours", _config(model, engine_arg=[KV_CACHE]))
        served = Rollgen(prompts, scratch / "served", _config(model, server=[url]))
        try:
            await ours.start()
            await served.start()
            others: dict[str, Leg] = {
                "bare AsyncLLM": partial(ours.bare, masks=True),
                "AsyncLLM without masks": partial(ours.bare, masks=False),
                "LLM.generate in batches": partial(asyncio.to_thread, llm, ours.requests()),
                "rollgen over HTTP": served.run,
            }
            for leg in (ours.run, *others.values()):
                await leg()  # warm
            print("| against | rollgen, tokens/s | the other | ratio, median of pairs | each |\n|---|---|---|---|---|")
            for name, leg in others.items():
                _print(name, sum(tokens), [await _pair(ours.run, leg, turn) for turn in range(pairs)])
        finally:
            ours.close()
            served.close()


def _lengths() -> list[int]:
    lengths = np.random.default_rng(0).integers(*SHORT_TOKENS, PROMPTS)
    lengths[::8] = LONG_TOKENS
    return lengths.tolist()


async def _pair(ours: Leg, other: Leg, turn: int) -> tuple[float, float]:
    """Seconds of both, in turns first."""
    if turn % 2:
        theirs = await other()
        return await ours(), theirs
    mine = await ours()
    return mine, await other()


def _print(name: str, tokens: int, seconds: list[tuple[float, float]]) -> None:
    ratios = sorted(theirs / mine for mine, theirs in seconds)
    mine, theirs = (tokens / statistics.median(column) for column in zip(*seconds, strict=True))
    each = " ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"| {name} | {mine:.0f} | {theirs:.0f} | **{statistics.median(ratios):.3f}** | {each} |", flush=True)


def _config(model: Path, **settings: Any) -> RunConfig:
    common = {
        "model": str(model),
        "dtype": "bfloat16",
        "top_k": TOP_K,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": SLOTS,
        "sampling_arg": ["ignore_eos=true"],
        "progress": "none",
    }
    return load_config(common | settings)


class Rollgen:
    """Runs of one plan with a crew that stays started, each into a directory of its own."""

    def __init__(self, prompts: Path, directory: Path, config: RunConfig) -> None:
        directory.mkdir()
        self._directory = directory
        self._preflight = plan_run([prompts], config, directory / "plan")
        self._crew = make_crew(self._preflight)
        self._runs = 0

    async def start(self) -> None:
        await self._crew.start()

    def close(self) -> None:
        self._crew.close()

    def requests(self) -> list[SampleRequest]:
        return [SampleRequest(prompt, 0) for prompt in Plan(self._preflight.plan_path)]

    async def run(self) -> float:
        """From the first request to the last shard committed."""
        self._runs += 1
        out = self._directory / str(self._runs)
        with WriterSlot(out, "w0") as slot, ConsoleReporter("none") as reporter:
            plan_path = out / ".tmp-plan"
            shutil.copy(self._preflight.plan_path, plan_path)
            preflight = replace(self._preflight, plan_path=plan_path)
            manifest = establish(preflight, self._crew, slot)
            stats = RunStats(planned=PROMPTS)
            job = Job(
                slot=slot,
                preflight=preflight,
                manifest=manifest,
                owed=Owed(Plan(out / PLAN_FILE), (), np.zeros(PROMPTS, np.bool_)),
                failures=FailureLog(out, "w0"),
                discretion=Discretion([]),
                stats=stats,
                reporter=reporter,
                max_failures=0,
            )
            started = time.monotonic()
            await self._crew.make(job)
            seconds = time.monotonic() - started
        assert stats.stored == PROMPTS
        return seconds

    async def bare(self, *, masks: bool) -> float:
        """The engine without rollgen around it: the same requests at the same time, their outputs thrown away."""
        from vllm.inputs import tokens_input

        engine = self._crew._engines[0]
        requests = iter(self.requests())

        async def work() -> None:
            for request in requests:
                params = _params(request, masks=masks)
                prompt = tokens_input(request.prompt.token_ids.tolist())
                async for _ in engine._llm.generate(prompt, params, request.request_id):
                    pass

        started = time.monotonic()
        await asyncio.gather(*(work() for _ in range(WINDOW)))
        return time.monotonic() - started


def _params(request: SampleRequest, *, masks: bool) -> Any:
    """What rollgen asks for; without masks, only the sampled token's logprob."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from rollgen.engines.capture import first_num_logprobs

    return SamplingParams(
        **request.sampling_params,
        ignore_eos=True,
        logprobs=first_num_logprobs(TOP_K) if masks else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@contextmanager
def _llm(model: Path) -> Iterator[Callable[[list[SampleRequest]], float]]:
    """`LLM.generate` in a process of its own, as a leg."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_llm, args=(there, str(model)))
    process.start()
    assert here.recv() == "ready"

    def leg(requests: list[SampleRequest]) -> float:
        here.send(requests)
        return here.recv()

    yield leg
    here.send(None)
    process.join()


def _serve_llm(connection: Connection, model: str) -> None:
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # its processes end with this one
    from vllm import LLM
    from vllm.inputs import tokens_input

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=2048,
        enable_chunked_prefill=False,
        enforce_eager=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    connection.send("ready")
    while (requests := connection.recv()) is not None:
        started = time.monotonic()
        for first in range(0, len(requests), WINDOW):
            batch = requests[first : first + WINDOW]
            prompts = [tokens_input(request.prompt.token_ids.tolist()) for request in batch]
            llm.generate(prompts, [_params(request, masks=True) for request in batch], use_tqdm=False)
        connection.send(time.monotonic() - started)
    llm.llm_engine.engine_core.shutdown()  # else leaving waits for its process, which waits for us


@contextmanager
def _server(model: Path, scratch: Path) -> Iterator[str]:
    """The URL of a vLLM server on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "2048"]
    command += ["--no-enable-chunked-prefill", "--generation-config", "vllm", "--max-logprobs", "-1"]
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--kv-cache-memory-bytes"]
    command += [str(KV_CACHE_BYTES)]
    with (scratch / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _is_up(url):
            if process.poll() is not None:
                raise RuntimeError((scratch / "server.log").read_text())
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


if __name__ == "__main__":
    main()
