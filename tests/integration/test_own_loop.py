"""Loops that are not ours: real vLLM beside `rollgen.generate`, processes of which one dies, SGLang's shape."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.fake_engine import fake_completion

import rollgen
from rollgen.config import digest
from rollgen.engines.base import SampleRequest
from rollgen.format.manifest import EngineRecord, read_manifest
from rollgen.rollout_writer import RolloutWriter

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY / "tests")}


def rows(directory: Path) -> pa.Table:
    """All rows, sorted by key."""
    return pq.read_table(directory / "data").sort_by([("prompt_index", "ascending"), ("sample_index", "ascending")])


def run(*command: object) -> str:
    """Standard output of a Python process that must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=ENVIRONMENT, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.vllm
def test_a_bare_vllm_loop_makes_what_generate_makes(tiny_model: Path, tmp_path: Path, write_prompts: Any) -> None:
    """The same plan and seeds, float32, one request at a time: every column of every row is equal, bit by bit.

    (One at a time because the sums of a batch of other size round differently.) Both are examples as they stand.
    """
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        [{"id": f"p{i}", "prompt": f"Number {i} is", "answer": i} for i in range(6)]
        + [{"id": "chat", "messages": [{"role": "user", "content": "Hello"}], "top_k": 5, "max_tokens": 7}],
    )
    own, ours = tmp_path / "own", tmp_path / "ours"
    options = ["--model", tiny_model, "--dtype", "float32", "--max-num-seqs", 1]
    assert run(REPOSITORY / "examples/03_own_loop.py", prompts, own, *options) == f"14 samples in {own}\n"

    told = run(REPOSITORY / "examples/01_generate.py", prompts, ours, *options)
    assert told.startswith("14 samples, ")
    assert "its support: [" in told

    by_loop, by_command = rows(own), rows(ours)
    assert by_loop.schema.equals(by_command.schema)
    for name in by_command.column_names:
        assert by_loop[name].equals(by_command[name]), name
    assert read_manifest(own).identity == read_manifest(ours).identity
    assert pq.read_table(own / "plan.parquet").equals(pq.read_table(ours / "plan.parquet"))
    assert (own / "README.md").exists()
    assert (ours / "README.md").exists()


@pytest.fixture
def loops(tmp_path: Path, tiny_model: Path, write_prompts: Any) -> Iterator[Any]:
    """`loops(number, release)` starts the process of that part of three; it goes beyond its half when told to."""
    rows = [{"id": f"p{i}", "prompt": f"Prompt {i}"} for i in range(31)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    running: list[subprocess.Popen[str]] = []

    def start(number: int, release: Path) -> subprocess.Popen[str]:
        script = REPOSITORY / "tests/models/own_loop.py"
        command = [sys.executable, script, tmp_path / "out", prompts, tiny_model, number, 3, release]
        running.append(subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_three_processes_one_of_which_is_killed(loops: Any, tmp_path: Path) -> None:
    """Started at once on nothing; the second is killed at its half and started again beside the others: exact cover.

    31 prompts of 2 samples: parts of 11, 10 and 10 prompts.
    """
    out, at_once, later = tmp_path / "out", tmp_path, tmp_path / "later"
    processes = [loops(number, later) for number in range(3)]
    assert [line(process) for process in processes] == ["owes 22", "owes 20", "owes 20"]
    assert [line(process) for process in processes] == ["half"] * 3
    while not any((out / "data").glob("part-w1-*")):  # committed beside the loop
        time.sleep(0.02)
    processes[1].kill()
    processes[1].wait()
    stored = rows(out)["prompt_index"].to_numpy()
    of_second = np.count_nonzero(stored % 3 == 1)
    assert 0 < of_second <= 10
    processes[1] = loops(1, at_once)
    assert line(processes[1]) == f"owes {20 - of_second}"
    assert [line(processes[1]), line(processes[1])] == ["half", "done"]
    later.touch()
    assert [line(processes[0]), line(processes[2])] == ["done", "done"]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]

    table = rows(out)
    keys = list(zip(table["prompt_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
    assert keys == [(prompt, sample) for prompt in range(31) for sample in range(2)]
    manifest = read_manifest(out)
    assert len(manifest.attempts) == 4, "each start is recorded, none is lost"
    assert manifest.config_digest == digest(manifest.identity)
    for shard in (out / "data").glob("part-*.parquet"):
        number = int(shard.name.split("-")[1].removeprefix("w"))
        assert set(pq.read_table(shard)["prompt_index"].to_numpy() % 3) == {number}
    assert not list(out.glob("data/.tmp-*"))
    assert len(rollgen.RolloutDataset(out)) == 62
    assert (out / "README.md").exists()


async def sglang(payload: dict[str, Any], request: SampleRequest) -> dict[str, Any]:
    """What SGLang's `/generate` answers to this payload, made of a fake completion; each as late as it likes."""
    assert payload["return_sampling_mask"]
    await asyncio.sleep(payload["sampling_params"]["sampling_seed"] % 7 / 1000)
    completion = fake_completion(request)
    masks = np.split(completion.mask_ids, completion.mask_offsets[1:-1])
    return {
        "text": completion.text,
        "output_ids": completion.token_ids.tolist(),
        "meta_info": {
            "id": "0",
            "finish_reason": {"type": completion.finish_reason, "matched": 2},
            "prompt_tokens": len(payload["input_ids"]),
            "output_token_sampling_mask": [mask[::-1].tolist() for mask in masks],  # by weight, not by id
            "output_token_sampling_logprobs": completion.logprobs.tolist(),
        },
    }


def test_an_sglang_loop(tiny_model: Path, tmp_path: Path) -> None:
    """Many requests at a time, answered in any order: what is stored is what was answered, sorted and complete."""
    prompts = [{"id": f"p{i}", "prompt": f"Prompt {i}"} for i in range(20)]

    async def make(writer: RolloutWriter, request: SampleRequest) -> None:
        params = request.sampling_params
        params["sampling_seed"], params["max_new_tokens"] = params.pop("seed"), params.pop("max_tokens")
        payload = {
            "input_ids": request.prompt.token_ids.tolist(),
            "sampling_params": params,
            "return_sampling_mask": True,
        }
        writer.add(request, await sglang(payload, request))

    async def loop(writer: RolloutWriter) -> None:
        await asyncio.gather(*(make(writer, request) for request in writer.owed()))

    record = EngineRecord(
        name="sglang", version="0.5.23", device="NVIDIA H200", versions={}, processors="temperature, top_k and top_p"
    )
    settings = {"model": str(tiny_model), "n": 2, "max_tokens": 8, "top_k": 8, "engine": record}
    with RolloutWriter(tmp_path / "out", prompts=prompts, **settings) as writer:
        asyncio.run(loop(writer))
    table = rows(tmp_path / "out").to_pylist()
    assert [(row["prompt_id"], row["sample_index"]) for row in table] == [
        (f"p{i}", k) for i in range(20) for k in (0, 1)
    ]
    with RolloutWriter(tmp_path / "out", prompts=prompts, **settings) as writer:
        assert list(writer.owed()) == []
    assert all(mask == sorted(mask) and len(mask) == 2 for row in table for mask in row["sampling_mask"])
    assert read_manifest(tmp_path / "out").attempts[0].engine == record
