"""A run into a bucket with real vLLM: killed with all its processes after a commit, and continued as a larger one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.datasets import planned_keys, read_rows
from models.storage import s3_server

from rollgen import RolloutStream
from rollgen.remote.objects import ObjectStore
from rollgen.verify.dataset import verify_dataset

pytestmark = pytest.mark.vllm

PROMPTS, N = 40, 3
"""120 samples of 48 tokens: some seconds of sampling, so that there is something to interrupt."""
LARGER = 45, 4
"""What it is when it is continued."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as root:
        yield root


def test_killed_and_continued_as_a_larger_one(
    bucket: str, rollgen: Any, tiny_model: Path, tmp_path: Path, write_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More samples, more prompts, what was cut once more and longer, all at once: exact cover, no old row changes.

    A copy verifies clean, and loads as the bucket does.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    questions = [{"id": f"p{index}", "prompt": f"Number {index} is"} for index in range(LARGER[0])]
    store = ObjectStore(f"{bucket}/run")
    options = ["--model", tiny_model, "--dtype", "float32", "--sampling-arg", "ignore_eos=true"]
    options += ["--max-num-seqs", 4]  # commits do not hold up sampling: it must not be over before the first
    command = ["generate", prompts, *options, "--out", store.url, "--commit-interval", 0.5, "--json"]

    write_prompts(prompts, questions[:PROMPTS])
    killed = rollgen.start(*command, "--n", N, "--max-tokens", 48)
    while "journal/w0-000000.jsonl" not in store.list("journal"):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.1)
    killed.kill()  # rollgen alone, which could have cleaned up: the kernel ends the engine's processes
    rollgen.wait_until_gone(killed)
    committed = store.list("data")
    first = read_rows(copied(store, tmp_path / "first"))

    write_prompts(prompts, questions)
    retry = ["--resume", "--retry", "finish_reason=length", "--max-tokens", 64]
    continued = json.loads(rollgen(*command, "--n", LARGER[1], *retry).stdout)
    stored = continued["stored_before"]
    assert 0 < len(first) <= stored < PROMPTS * N  # a shard may have been sent whose line had not
    assert (continued["stored"], continued["owed"]) == (LARGER[0] * LARGER[1], 0)  # the rest, and all of these again
    objects = store.list()
    assert committed.items() <= objects.items()
    assert "journal/w0.lock" not in objects

    copy = copied(store, tmp_path / "copy")
    final = read_rows(copy)
    again = {key for key in final if key[2]}
    assert final.keys() - again == planned_keys(*LARGER)
    assert all(final[key] == row for key, row in first.items())
    assert len(again) == stored
    assert again >= {(*key[:2], 1) for key in first}
    for prompt, sample, generation in again:
        row, before = final[prompt, sample, generation], final[prompt, sample, 0]
        assert (row["seed"], row["response_length"], before["response_length"]) == (before["seed"], 64, 48)
    assert verify_dataset(copy).is_clean

    from_bucket, from_copy = (RolloutStream(place, batch_tokens=2048, seed=1) for place in (store.url, copy))
    for one, other in zip(from_bucket, from_copy, strict=True):
        assert one.prompt_id == other.prompt_id
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.logprobs, other.logprobs)
        assert torch.equal(one.support.ids, other.support.ids)


def copied(store: ObjectStore, copy: Path) -> Path:
    """A plain copy of all objects."""
    for name in store.list():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        store.download(name, copy / name)
    return copy
