"""SkyRL: what the generator of docs/export.md answers with, checked as its trainer checks it, token by token.

Types and checks are those of `skyrl/train/generators/base.py`, `validate_generator_output`, `build_sample_support` and
`validate_sample_support` (0.4.0), in our words.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import rollgen
from rollgen.errors import UsageError

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]
FIELDS = {
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "trajectory_ids", "rollout_expert_indices", "rollout_sample_support"),
}


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int


@dataclass
class BatchMetadata:
    global_step: int
    training_phase: str


@pytest.fixture
def skyrl_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the two names that the generator needs."""
    base = ModuleType("skyrl.train.generators.base")
    base.GeneratorInterface, base.GeneratorOutput = object, dict  # type: ignore[attr-defined]
    for name in ("skyrl", "skyrl.train", "skyrl.train.generators"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)


def generator(code: str, out: Path) -> Any:
    """That of the page, on an export."""
    names: dict[str, Any] = {}
    exec(code, names)
    return names["StoredRollouts"](out)


def ask(code: str, out: Path, phase: str = "train") -> dict[str, Any]:
    """What the trainer gets for all prompts, the last ones first, four samples of each."""
    rows = pq.read_table(out / "prompts.parquet").to_pylist()[::-1]
    batch = {
        "env_extras": [{"group": row["group"]} for row in rows for _ in range(4)],
        "trajectory_ids": [TrajectoryID(row["prompt"][0]["content"], each) for row in rows for each in range(4)],
        "batch_metadata": BatchMetadata(1, phase),
    }
    answer: dict[str, Any] = asyncio.run(generator(code, out).generate(batch))
    return answer


@pytest.mark.usefixtures("skyrl_is_there")
@pytest.mark.parametrize("files", [1, 6])
@pytest.mark.parametrize(
    "features",
    [
        pytest.param({}, id="plain"),
        pytest.param({"extras": True}, id="weights and experts"),
        pytest.param({"untruncated": tuple(range(6))}, id="nothing truncated"),
    ],
)
def test_every_token(
    features: dict[str, Any],
    files: int,
    write_odd: Callable[..., Path],
    current: Rows,
    code_of: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In the order of the question; ids, log-probabilities, supports and rewards are those of the dataset."""
    if files > 1:
        monkeypatch.setattr("rollgen.exporters.records.BLOCK_TOKENS", 1)  # a file a prompt
    rows = current(directory := write_odd(**features))
    experts = "extras" in features
    out = tmp_path / "out"
    exported = rollgen.export(directory, "skyrl", out, reward="correct", routed_experts=experts)
    assert exported.files == files + 1
    answer = ask(code_of("skyrl"), out)
    assert answer.keys() <= FIELDS
    assert {len(values) for name, values in answer.items() if name != "rollout_metrics"} == {24}
    assert [trajectory.instance_id for trajectory in answer["trajectory_ids"][:5]] == ["p5"] * 4 + ["p4"]
    for number, trajectory in enumerate(answer["trajectory_ids"]):
        row = rows.pop((trajectory.instance_id, trajectory.repetition_id))
        assert answer["prompt_token_ids"][number] == row["prompt_token_ids"]
        assert answer["response_ids"][number] == row["token_ids"]
        assert answer["rollout_logprobs"][number] == row["logprobs"]
        assert answer["loss_masks"][number] == [1] * len(row["token_ids"])
        assert answer["rewards"][number] == row["reward"]
        assert answer["stop_reasons"][number] == ("stop" if row["finish_reason"] == "stop" else "length")
        if "untruncated" not in features:
            check_support(answer["rollout_sample_support"][number], row["sampling_mask"])
        if experts:
            indices = answer["rollout_expert_indices"][number]
            assert (type(indices), indices.dtype) == (np.ndarray, np.int16)
            assert indices.shape == (len(row["prompt_token_ids"]) + len(row["token_ids"]) - 1, 3, 2)
            assert indices.ravel().tolist() == row["routed_experts"]
    assert rows == {}
    assert ("rollout_sample_support" in answer) == ("untruncated" not in features)


def check_support(support: Any, wanted: list[list[int]]) -> None:
    """int32 [T, top_k], of one width, -1 only at the end of a row; each has an id."""
    assert isinstance(support, np.ndarray)
    assert support.dtype == np.int32
    assert support.shape == (len(wanted), 12)
    assert not np.any((support[:, :-1] == -1) & (support[:, 1:] >= 0))
    assert [row[row >= 0].tolist() for row in support] == wanted


@pytest.mark.usefixtures("skyrl_is_there")
def test_evaluation_is_refused(write_odd: Callable[..., Path], code_of: Callable[[str], str], tmp_path: Path) -> None:
    """Its prompts are others."""
    rollgen.export(write_odd(), "skyrl", tmp_path / "out", reward="correct")
    with pytest.raises(ValueError, match="training prompts only"):
        ask(code_of("skyrl"), tmp_path / "out", phase="eval")


@pytest.mark.usefixtures("skyrl_is_there")
@pytest.mark.parametrize("group", [pytest.param(0, id="the next prompt is there"), pytest.param(5, id="nothing is")])
def test_more_samples_than_there_are(
    group: int, write_odd: Callable[..., Path], code_of: Callable[[str], str], tmp_path: Path
) -> None:
    """A prompt has samples 0 to 3: number 4 is never one of another prompt."""
    rollgen.export(write_odd(), "skyrl", tmp_path / "out", reward="correct")
    stored = generator(code_of("skyrl"), tmp_path / "out")
    assert stored.sample(group, 3)
    with pytest.raises(ValueError, match=f"group {group} has no sample 4: set n_samples_per_prompt"):
        stored.sample(group, 4)


def test_what_is_lost(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Texts. Advantages are not: it makes its own of the rewards."""
    exported = rollgen.export(write_odd(), "skyrl", tmp_path / "out", reward="correct")
    assert exported.lost == dict.fromkeys(("prompt", "text"), 24)


def test_settings(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Batch and mini batch are a step; top_k is the width of supports, 12 with ties, where 8 were asked for."""
    exported = rollgen.export(write_odd(), "skyrl", tmp_path / "out", reward="correct", prompts_per_step=3)
    assert exported.advice[1] == (
        "skyrl: top_k below is the width of its arrays, that of the widest support: it samples nothing"
    )
    assert exported.advice[-1].split()[4:] == [
        "data.train_data=\"['PATH/prompts.parquet']\"",
        "trainer.train_batch_size=3",
        "trainer.policy_mini_batch_size=3",
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.temperature=0.75",
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.eval_interval=-1",
        "trainer.algorithm.enable_sample_support_replay=true",
        "generator.inference_engine.enable_return_sample_support_set=true",
        "generator.sampling_params.top_k=12",
    ]


def test_settings_without_masks(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Nothing is replayed then but experts, if they are asked for."""
    directory = write_odd(untruncated=tuple(range(6)), extras=True)
    advice = rollgen.export(directory, "skyrl", tmp_path / "out", reward="correct", routed_experts=True).advice
    assert not any("top_k" in line for line in advice)
    assert advice[-1].split()[-3:] == [
        "trainer.eval_interval=-1",
        "generator.inference_engine.enable_return_routed_experts=true",
        "trainer.policy.megatron_config.moe_enable_routing_replay=true",
    ]


def test_a_file(write_odd: Callable[..., Path], current: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tensor is a view, with which more would be saved; what SkyRL has no field for is there."""
    monkeypatch.setattr("rollgen.exporters.records.BLOCK_TOKENS", 1)
    rows = current(directory := write_odd())
    rollgen.export(directory, "skyrl", tmp_path / "out", reward="correct")
    content = torch.load(tmp_path / "out" / "samples-000001.pt", weights_only=True)
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors.values())
    assert tensors["group"].tolist() == [1] * 4
    for sample, kept in enumerate(content["rollgen"]):
        assert (kept["prompt_id"], kept["sample_index"]) == ("p1", sample)
        assert {name: rows["p1", sample][name] for name in kept} == kept


@pytest.mark.parametrize(
    ("features", "message"),
    [
        pytest.param({"untruncated": (1,)}, "^skyrl takes masks of all samples or of none", id="mixed"),
        pytest.param({"temperatures": (0.7, 1.0)}, "^skyrl divides the logits of all samples", id="temperatures"),
    ],
)
def test_refused(features: dict[str, Any], message: str, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """What its trainer would refuse, or train wrongly."""
    with pytest.raises(UsageError, match=message):
        rollgen.export(write_odd(**features), "skyrl", tmp_path / "out", reward="correct")
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}
