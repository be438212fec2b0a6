"""Loops that are not ours: real vLLM beside `rollgen.generate`, and the shape of SGLang's answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.fake_engine import fake_completion

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
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=ENVIRONMENT, timeout=900, check=False
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
