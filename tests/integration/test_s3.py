"""A run into a bucket with real vLLM: killed with all its processes after a commit, and continued."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.datasets import read_rows
from models.storage import s3_server

from rollgen import RolloutStream
from rollgen.remote.objects import ObjectStore

pytestmark = pytest.mark.vllm

PROMPTS, N = 60, 4
"""240 samples of 48 tokens: some seconds of sampling, so that there is something to interrupt."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as root:
        yield root


@pytest.mark.timeout(600)  # two engines are loaded
def test_killed_and_continued(
    bucket: str, rollgen: Any, tiny_model: Path, tmp_path: Path, write_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample is there once; nothing is made again; a copy verifies clean, and loads as the bucket does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"id": f"p{index}", "prompt": f"Number {index} is"} for index in range(PROMPTS)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    store = ObjectStore(f"{bucket}/run")
    options = ["--model", tiny_model, "--dtype", "float32", "--max-tokens", 48, "--sampling-arg", "ignore_eos=true"]
    options += ["--max-num-seqs", 4]  # commits do not hold up sampling: it must not be over before the first
    command = ["generate", prompts, *options, "--n", N, "--out", store.url, "--commit-interval", 0.5, "--json"]

    killed = rollgen.start(*command)
    while "journal/w0-000000.jsonl" not in store.list("journal"):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.1)
    killed.kill()  # rollgen alone, which could have cleaned up: the kernel ends the engine's processes
    rollgen.wait_until_gone(killed)
    committed = store.list("data")

    continued = json.loads(rollgen(*command, "--resume").stdout)
    assert 0 < continued["stored_before"] < PROMPTS * N
    objects = store.list()
    assert committed.items() <= objects.items()
    assert "journal/w0.lock" not in objects

    copy = tmp_path / "copy"
    for name in objects:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        store.download(name, copy / name)
    assert read_rows(copy).keys() == {(f"p{index}", sample, 0) for index in range(PROMPTS) for sample in range(N)}
    rollgen("verify", copy)

    from_bucket, from_copy = (RolloutStream(place, batch_tokens=2048, seed=1) for place in (store.url, copy))
    for one, other in zip(from_bucket, from_copy, strict=True):
        assert one.prompt_id == other.prompt_id
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.logprobs, other.logprobs)
        assert torch.equal(one.support.ids, other.support.ids)
