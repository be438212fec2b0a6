"""Fixtures that everyone shares: a tiny model, valid random completions of any size, whole datasets on disk."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from models.schedule import Schedule, place_of

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import file_sha256
from rollgen.format.manifest import (
    Attempt,
    EngineRecord,
    Manifest,
    ModelRecord,
    PromptSource,
    RoutedExperts,
    create_manifest,
)
from rollgen.format.schema import PLAN_FILE
from rollgen.format.writer import ShardWriter
from rollgen.prompts.plan import PlanWriter
from rollgen.rollouts import Completion, Prompt, Sampling, WeightVersions, sample_seed

if TYPE_CHECKING:
    from models.runs import Runs

# Under nohup it is ignored, and would be by every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Ray starts its processes with a niceness of 15: beside tests that fill all cores they would wait for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# How long an example takes is the machine's: by default 0.2 s are too long.
settings.register_profile(
    "rollgen", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("rollgen")

VOCAB_SIZE = 512
TIME = "2026-01-02T03:04:05+00:00"
UNTRUNCATED = Sampling(top_k=0)
EXPERTS = RoutedExperts(layers=3, top_k=2, experts=8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of `models.schedule`. Tests with vLLM load models several times, a minute each on a busy machine."""
    items.sort(key=lambda item: place_of(item.nodeid))
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule | None:
    """`models.schedule` is what loadfile means here."""
    return Schedule(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with a byte-level tokenizer: vocabulary 512, context 256. Read-only."""
    from models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    """`make_completion(prompt_index, sample_index, tokens=8, ...)`: see `random_completion`."""
    return random_completion


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    """`make_prompt(prompt_index, n=1, **changes)`: the row of the plan that `make_completion` belongs to."""
    return random_prompt


@pytest.fixture
def make_manifest() -> Callable[..., Manifest]:
    """`make_manifest(support_logprobs=False, **changes)`: of a run over a vocabulary of 512."""
    return some_manifest


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., Path]:
    """`make_dataset(directory, shards=2, prompts=3, n=2, ...)`: see `write_dataset`."""
    return write_dataset


@pytest.fixture
def make_extras() -> Callable[..., Path]:
    """`make_extras(directory, ...)`: the same with weights and experts, whatever `make_dataset` is elsewhere."""
    return partial(write_dataset, extras=True)


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """`make_run(directory, number, ...)`: see `write_run`."""
    return write_run


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Of the runs `base` and `step-1`: the same six prompts, two samples each, of 8 and of 9 tokens."""
    from rollgen.curate.merge import merge

    sources = [write_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]
    merge(sources, tmp_path / "merged")
    return tmp_path / "merged"


@pytest.fixture
def runs(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs of five prompts, two samples each, with a fake engine, into `tmp_path / "out"`."""
    from models.runs import Runs

    # A dead engine is not taken for the first sign of Ctrl-C: no waiting for the signal.
    for module in ("stop", "engines"):  # both have the name
        monkeypatch.setattr(f"rollgen.loop.{module}.SIGNAL_GRACE_SECONDS", 0.01)
    runs = Runs(tmp_path, tiny_model)
    runs.write_prompts(5)
    return runs


def random_prompt(prompt_index: int, *, n: int = 1, **changes: Any) -> Prompt:
    """1 to 5 token ids; the same for the same index."""
    rng = np.random.default_rng(prompt_index)
    prompt = Prompt(
        prompt_id=f"p{prompt_index}",
        prompt_index=prompt_index,
        token_ids=rng.integers(0, VOCAB_SIZE, 1 + prompt_index % 5).astype(np.int32),
        sampling=Sampling(temperature=0.75, top_p=0.875, top_k=8, max_tokens=64),
        n=n,
        seed=0,
        prompt=f"prompt {prompt_index}",
        metadata=f'{{"answer": {prompt_index}}}',
    )
    return replace(prompt, **changes)


def random_completion(
    prompt_index: int = 0,
    sample_index: int = 0,
    *,
    tokens: int = 8,
    largest: int = 12,
    vocab_size: int = VOCAB_SIZE,
    full: bool = False,
    support_logprobs: bool = False,
    extras: bool = False,
    **changes: Any,
) -> Completion:
    """A valid completion, the same for the same arguments: supports of 1 to `largest` ids, or none at all when `full`.

    Probabilities of each support are random and sum to 1, so a singleton's logprob is 0. With `extras` its weights
    change at every third token, and it has experts as `EXPERTS` says.
    """
    rng = np.random.default_rng([prompt_index, sample_index])
    prompt = random_prompt(prompt_index)
    sizes = np.zeros(tokens, np.int64) if full else rng.integers(1, largest + 1, tokens)
    offsets = np.concatenate([[0], sizes.cumsum()])
    starts = offsets[:-1]
    if full:
        ids, weights = np.empty(0, np.int64), np.empty(0)
        token_ids, logprobs = rng.integers(0, vocab_size, tokens), -rng.exponential(size=tokens)
    else:
        # `largest` steps of at most vocab_size // largest each stay below vocab_size.
        climb = rng.integers(1, vocab_size // largest + 1, offsets[-1]).cumsum()
        ids = climb - np.repeat(np.concatenate([[0], climb])[starts], sizes) - 1
        mass = rng.exponential(size=offsets[-1])
        weights = np.log(mass / np.repeat(np.add.reduceat(mass, starts), sizes))
        picked = starts + rng.integers(0, sizes)
        token_ids, logprobs = ids[picked], weights[picked]
    completion = Completion(
        prompt_id=prompt.prompt_id,
        sample_index=sample_index,
        prompt_index=prompt_index,
        prompt_token_ids=prompt.token_ids,
        token_ids=token_ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        mask_ids=ids.astype(np.int32),
        mask_offsets=offsets.astype(np.int64),
        finish_reason="stop",
        sampling=UNTRUNCATED if full else prompt.sampling,
        seed=sample_seed(0, prompt.prompt_id, sample_index),
        support_logprobs=weights.astype(np.float32) if support_logprobs else None,
        text=f"text {prompt_index}.{sample_index}",
        prompt=prompt.prompt,
        metadata=prompt.metadata,
    )
    if extras:
        starts = tuple(range(0, tokens, 3))
        shape = (len(prompt.token_ids) + tokens - 1, EXPERTS.layers, EXPERTS.top_k)
        experts = np.stack([rng.integers(0, 4, shape[:2]), rng.integers(4, 8, shape[:2])], axis=2)
        completion = replace(
            completion,
            weight_versions=WeightVersions(tuple(f"step {start}" for start in starts), starts),
            routed_experts=experts.astype(np.int16),
        )
    return replace(completion, **changes)


def some_manifest(*, support_logprobs: bool = False, extras: bool = False, **changes: Any) -> Manifest:
    """A manifest of a run that never was, but could be: all that a writer and a reader need."""
    identity = {"temperature": 0.75, "top_k": 8, "top_p": 0.875, "seed": 0, "support_logprobs": support_logprobs}
    attempt = Attempt(
        started_at=TIME,
        rollgen_version="0",
        n=1,
        limit=None,
        prompts=[PromptSource(name="prompts.jsonl", bytes=0, sha256=digest(""))],
        operational={},
        engine=EngineRecord(name="fake", version="1", device="cpu", versions={}, processors="top_k, top_p"),
    )
    manifest = Manifest(
        created_at=TIME,
        config_digest=digest(identity),
        identity=identity,
        capture="logprobs",
        support_logprobs=support_logprobs,
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=VOCAB_SIZE - 12,
        model=ModelRecord(name="tiny", revision=None, fingerprint="0", dtype="float32", context_length=256),
        tokenizer_sha256=digest("tokenizer"),
        attempts=[attempt],
        weight_versions=extras,
        routed_experts=EXPERTS if extras else None,
    )
    return manifest.model_copy(update=changes)


def write_plan(path: Path, prompts: Sequence[Prompt]) -> Path:
    """A plan of these prompts."""
    with PlanWriter(path) as plan:
        plan.write(prompts)
    return path


def write_dataset(
    directory: Path,
    *,
    shards: int = 2,
    prompts: int = 3,
    n: int = 2,
    support_logprobs: bool = False,
    extras: bool = False,
    said: Mapping[str, Any] | None = None,
    planned: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A finished dataset of `shards * prompts * n` samples.

    `changes` go to `random_completion`, `said` into its manifest, `planned` into each row of its plan.
    """
    directory.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Any] = {"sampling": UNTRUNCATED} if changes.get("full") else {}
    asked |= planned or {}
    plan = write_plan(directory / PLAN_FILE, [random_prompt(index, n=n, **asked) for index in range(shards * prompts)])
    stored = {"support_logprobs": support_logprobs, "extras": extras}
    manifest = some_manifest(**stored, plan_sha256=file_sha256(plan), **(said or {}))
    assert create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for index in range(shards * prompts):
            for sample_index in range(n):
                writer.add(random_completion(index, sample_index, **stored, **changes))
            if (index + 1) % prompts == 0:
                writer.flush()
    return directory


def write_run(directory: Path, number: int, **changes: Any) -> Path:
    """`write_dataset` of another model, at another time: its samples are one token longer for each `number`."""
    identity = {"temperature": 0.75, "top_k": 8, "top_p": 0.875, "seed": 0, "model_fingerprint": str(number)}
    said = {
        "identity": identity,
        "config_digest": digest(identity),
        "created_at": f"2026-02-{number + 1:02}T00:00:00+00:00",
        "model": ModelRecord(
            name=f"model-{number}", revision=None, fingerprint=str(number), dtype="float32", context_length=256
        ),
    }
    said |= changes.pop("said", {})
    return write_dataset(directory, **{"tokens": 8 + number} | changes, said=said)
