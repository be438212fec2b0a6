"""slime: files are read as its trainer reads them, and compared token by token.

Fields, their defaults and the checks are those of `slime/utils/types.py` and `_convert_samples_to_train_data` in
`slime/ray/rollout.py` (681b3adc).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models.rewards import write_rewards

import rollgen
from rollgen.errors import UsageError
from rollgen.rollouts import Sampling

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]
FIELDS = {
    *("group_index", "index", "rollout_id", "prompt", "tokens", "multimodal_inputs", "multimodal_train_inputs"),
    *("multimodal_train_input_id", "apply_chat_template_kwargs", "response", "response_length", "label", "reward"),
    *("loss_mask", "weight_versions", "rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("rollout_routed_experts", "remove_sample", "teacher_log_probs", "status", "metadata", "generate_function_path"),
    *("custom_rm_path", "train_metadata", "session_id", "non_generation_time", "spec_info", "prefix_cache_info"),
}
"""Of `Sample`: others would be attributes that nothing reads."""


def read(out: Path) -> list[list[dict[str, Any]]]:
    """The samples of each step."""
    steps = []
    while (path := out / f"{len(steps)}.pt").exists():
        content = torch.load(path, weights_only=True)
        assert content["rollout_id"] == len(steps)
        steps.append(content["samples"])
    assert len(list(out.glob("*.pt"))) == len(steps)
    return steps


def check(sample: dict[str, Any], *, masks: bool) -> None:
    """The assertions of slime's conversion, and of `_validate_response_metadata_lengths`."""
    assert sample.keys() <= FIELDS
    length = sample["response_length"]
    assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == length
    assert sample["status"] in ("completed", "truncated")
    assert ("rollout_top_p_token_ids" in sample) == masks
    if masks:
        ids, offsets = sample["rollout_top_p_token_ids"], sample["rollout_top_p_token_offsets"]
        assert ids.dtype == offsets.dtype == torch.int32
        assert len(offsets) == length + 1
        assert offsets[0] == 0
        assert offsets[-1] == len(ids)


def supports_of(sample: dict[str, Any]) -> list[list[int]]:
    offsets = sample["rollout_top_p_token_offsets"].tolist()
    ids = sample["rollout_top_p_token_ids"].tolist()
    return [ids[start:stop] for start, stop in pairwise(offsets)]


@pytest.mark.parametrize(
    "features",
    [
        pytest.param({}, id="plain"),
        pytest.param({"support_logprobs": True}, id="support_logprobs"),
        pytest.param({"untruncated": tuple(range(6))}, id="nothing truncated"),
        pytest.param({"extras": True}, id="weights and experts"),
    ],
)
def test_every_token(features: dict[str, Any], write_odd: Callable[..., Path], current: Rows, tmp_path: Path) -> None:
    """Ids, log-probabilities, masks and rewards are those of the dataset, bit by bit; the rest is in the metadata."""
    rows = current(directory := write_odd(**features))
    rollgen.export(directory, "slime", tmp_path / "out", reward="correct", prompts_per_step=3)
    steps = read(tmp_path / "out")
    assert [len(step) for step in steps] == [12, 12]
    masks = "untruncated" not in features
    for number, sample in enumerate(sample for step in steps for sample in step):
        check(sample, masks=masks)
        kept = sample["metadata"]["rollgen"]
        row = rows.pop((kept["prompt_id"], kept["sample_index"]))
        assert sample["tokens"] == row["prompt_token_ids"] + row["token_ids"]
        assert sample["tokens"][-sample["response_length"] :] == row["token_ids"]
        assert sample["rollout_log_probs"] == row["logprobs"]
        assert (supports_of(sample) if masks else [None] * len(row["token_ids"])) == row["sampling_mask"]
        assert (sample["index"], sample["group_index"]) == (number, number // 4)
        assert (sample["reward"], sample["response"], sample["prompt"]) == (row["reward"], row["text"], row["prompt"])
        assert sample["status"] == ("completed" if row["finish_reason"] == "stop" else "truncated")
        assert sample["weight_versions"] == row.get("weight_versions", [])
        starts = {"weight_version_starts"} & kept.keys()
        assert {name: row[name] for name in kept} == kept
        assert bool(starts) == ("extras" in features)
    assert rows == {}


def test_groups_are_found_by_place(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """`rewards.reshape(-1, n)` is the group of a prompt, also of one whose samples lie in two shards."""
    rollgen.export(write_odd(), "slime", tmp_path / "out", reward="correct")
    (samples,) = read(tmp_path / "out")
    for start in range(0, len(samples), 4):
        group = [sample["metadata"]["rollgen"] for sample in samples[start : start + 4]]
        assert len({kept["prompt_id"] for kept in group}) == 1
        assert [kept["sample_index"] for kept in group] == [0, 1, 2, 3]


def test_experts(write_odd: Callable[..., Path], current: Rows, tmp_path: Path) -> None:
    """int32 [tokens - 1, layers, top_k], as the trainer asserts."""
    rows = current(directory := write_odd(extras=True))
    rollgen.export(directory, "slime", tmp_path / "out", reward="correct", routed_experts=True)
    for sample in read(tmp_path / "out")[0]:
        experts, kept = sample["rollout_routed_experts"], sample["metadata"]["rollgen"]
        assert (experts.dtype, experts.shape) == (torch.int32, (len(sample["tokens"]) - 1, 3, 2))
        assert experts.flatten().tolist() == rows[kept["prompt_id"], kept["sample_index"]]["routed_experts"]


def test_a_file_holds_its_samples_only(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Tensors have memory of their own: a view is saved with the whole block behind it."""
    rollgen.export(write_odd(), "slime", tmp_path / "out", reward="correct")
    tensors = [sample["rollout_top_p_token_ids"] for sample in read(tmp_path / "out")[0]]
    assert all(tensor.untyped_storage().nbytes() == 4 * len(tensor) for tensor in tensors)


@pytest.mark.parametrize(
    ("features", "flags"),
    [
        pytest.param({}, "--rollout-temperature 0.75 --rollout-top-p 0.875 ", id="top_p"),
        pytest.param({"temperatures": (0.7,), "untruncated": tuple(range(6))}, "0.7 --rollout-top-p 1 ", id="none"),
    ],
)
def test_flags(features: dict[str, Any], flags: str, write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """slime reads masks if, and only if, its top_p is not 1."""
    (advice,) = rollgen.export(
        write_odd(**features), "slime", tmp_path / "out", reward="correct", prompts_per_step=2
    ).advice
    assert flags in advice
    assert advice.endswith("--rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8 --num-rollout 3")


def test_a_top_p_that_is_printed_as_1_is_off(make_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """0.9999999 has masks like any other."""
    sampling = Sampling(temperature=0.75, top_p=0.9999999, top_k=0, max_tokens=64)
    write_rewards(directory := make_dataset(tmp_path / "run", sampling=sampling), "correct", lambda row: 1.0)
    (advice,) = rollgen.export(directory, "slime", tmp_path / "out", reward="correct").advice
    assert 0.99 < float(advice.split("--rollout-top-p ")[1].split()[0]) < 1


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        pytest.param(
            {"temperatures": (0.7, 1.0)}, {}, r"^slime divides .* by one temperature, these have 0\.7, 1\.0", id="T"
        ),
        pytest.param({"untruncated": (5,)}, {}, r"^slime takes masks of all samples or of none", id="mixed"),
        pytest.param({}, {"prompts_per_step": 4}, r"6 are not a multiple of 4; 3 would do$", id="uneven steps"),
    ],
)
def test_refused(
    features: dict[str, Any], options: dict[str, Any], message: str, write_odd: Callable[..., Path], tmp_path: Path
) -> None:
    """What slime would train on wrongly; nothing is left then."""
    with pytest.raises(UsageError, match=message):
        rollgen.export(write_odd(**features), "slime", tmp_path / "out", reward="correct", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}


def test_log_probabilities_of_the_trainer(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """A logit that is not in the mask is -inf there, over one temperature: what `support_logprobs` computes."""
    directory = write_odd()
    rollgen.export(directory, "slime", tmp_path / "out", reward="correct")
    by_key = {(rollout.prompt_id, rollout.sample_index): rollout for rollout in rollgen.RolloutDataset(directory)}
    generator = torch.Generator().manual_seed(0)
    for sample in read(tmp_path / "out")[0]:
        kept = sample["metadata"]["rollgen"]
        batch = rollgen.collate([by_key[kept["prompt_id"], kept["sample_index"]]])
        logits = torch.randn(1, len(sample["tokens"]), 512, generator=generator)
        first = len(sample["tokens"]) - sample["response_length"] - 1
        for step, support in enumerate(supports_of(sample)):
            keep = torch.full((512,), -math.inf)
            keep[support] = 0
            theirs = torch.log_softmax(logits[0, first + step] / 0.75 + keep, -1)[sample["tokens"][first + step + 1]]
            ours = batch.support_logprobs(logits)[0, first + step + 1]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
