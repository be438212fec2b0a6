"""miles: files, and the conversion that docs/export.md gives, are read as its trainer reads them.

The class of masks, with its checks, is that of `miles/utils/sampling_mask.py` (2806267d), in our words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import rollgen
from rollgen.errors import UsageError

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]
FIELDS = {
    *("group_index", "index", "rollout_id", "prompt", "tokens", "multimodal_inputs", "multimodal_train_inputs"),
    *("response", "response_length", "label", "reward", "loss_mask", "weight_versions", "rollout_log_probs"),
    *("rollout_sampling_mask", "rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_routed_experts"),
    *("rollout_indexer_topk", "remove_sample", "teacher_log_probs", "opd_reverse_kl", "status", "metadata"),
    *("generate_function_path", "train_metadata", "reward_spec", "routing_key", "non_generation_time", "spec_info"),
    "prefix_cache_info",
}
"""Of `Sample`: others would be attributes that nothing reads."""


@dataclass
class RolloutSamplingMask:
    ids: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        assert (self.ids.dtype, self.offsets.dtype) == (torch.int32, torch.int64)
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.ids)
        assert (self.offsets[1:] > self.offsets[:-1]).all(), "every response token needs a non-empty sampling mask"


@pytest.fixture
def miles_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with the class under its name."""
    module = ModuleType("miles.utils.sampling_mask")
    module.RolloutSamplingMask = RolloutSamplingMask  # type: ignore[attr-defined]
    for name in ("miles", "miles.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def convert(path: Path, code: str, *options: int) -> dict[str, Any]:
    """What the lines of the page make of a file, before they save it."""
    names: dict[str, Any] = {}
    exec(code, names)
    content: dict[str, Any] = names["converted"](path, *options)
    assert all(sample.keys() <= FIELDS for sample in content["samples"])
    return content


@pytest.mark.usefixtures("miles_is_there")
@pytest.mark.parametrize(
    "features",
    [
        pytest.param({}, id="plain"),
        pytest.param({"extras": True}, id="weights and experts"),
        pytest.param({"support_logprobs": True}, id="support_logprobs"),
    ],
)
def test_every_token(
    features: dict[str, Any],
    write_odd: Callable[..., Path],
    current: Rows,
    code_of: Callable[[str], str],
    tmp_path: Path,
) -> None:
    """After the conversion masks are miles' own objects, and everything is that of the dataset, bit by bit."""
    rows = current(directory := write_odd(**features))
    experts = "extras" in features
    rollgen.export(directory, "miles", tmp_path / "out", reward="correct", prompts_per_step=3, routed_experts=experts)
    for step in range(2):
        content = convert(tmp_path / "out" / f"{step}.pt", code_of("miles"))
        assert (content["rollout_id"], content["metadata"]) == (step, {})
        assert len(content["samples"]) == 12
        for sample in content["samples"]:
            kept = sample["metadata"]["rollgen"]
            row = rows.pop((kept["prompt_id"], kept["sample_index"]))
            assert sample["tokens"] == row["prompt_token_ids"] + row["token_ids"]
            assert sample["rollout_log_probs"] == row["logprobs"]
            mask = sample["rollout_sampling_mask"]
            supports = [part.tolist() for part in mask.ids.tensor_split(mask.offsets[1:-1])]
            assert supports == row["sampling_mask"]
            assert sample["reward"] == row["reward"]
            assert sample["loss_mask"] == [1] * len(row["token_ids"])
            assert sample["response_length"] == len(row["token_ids"])
            assert sample["status"] == ("completed" if row["finish_reason"] == "stop" else "truncated")
            if experts:
                assert sample["rollout_routed_experts"].dtype == "int32"
                assert sample["rollout_routed_experts"].ravel().tolist() == row["routed_experts"]
                check_versions(sample, row)
    assert rows == {}


def check_versions(sample: dict[str, Any], row: dict[str, Any]) -> None:
    """Places are those in `tokens`: spans follow each other from the first generated token to the end."""
    (spans,) = sample["weight_versions"]
    prompt = len(row["prompt_token_ids"])
    assert [span["version"] for span in spans] == row["weight_versions"]
    assert [span["abs_start"] - prompt for span in spans] == row["weight_version_starts"]
    assert [span["abs_end"] for span in spans] == [*(span["abs_start"] for span in spans[1:]), len(sample["tokens"])]


@pytest.mark.usefixtures("miles_is_there")
def test_score_centering(
    write_odd: Callable[..., Path], current: Rows, code_of: Callable[[str], str], tmp_path: Path
) -> None:
    """Candidates are the supports, in their order, with all their log-probabilities: what miles validates."""
    rows = current(directory := write_odd(support_logprobs=True))
    exported = rollgen.export(directory, "miles", tmp_path / "out", reward="correct")
    assert "support_logprobs" not in exported.lost
    assert exported.advice[-1].endswith("--rollout-top-logprobs-num 12")  # as wide as ties made the widest support
    for sample in convert(tmp_path / "out" / "0.pt", code_of("miles"), 12)["samples"]:
        kept = sample["metadata"]["rollgen"]
        row = rows[kept["prompt_id"], kept["sample_index"]]
        ids, logprobs = sample["rollout_topk_token_ids"], sample["rollout_topk_log_probs"]
        assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
        assert ids.shape == logprobs.shape == (len(row["token_ids"]), 12)
        assert [each[each >= 0].tolist() for each in ids] == row["sampling_mask"]
        assert [each[there].tolist() for each, there in zip(logprobs, ids >= 0, strict=True)] == row["support_logprobs"]
        assert np.isneginf(logprobs[ids < 0]).all()


@pytest.mark.usefixtures("miles_is_there")
def test_too_narrow_for_a_support(
    write_odd: Callable[..., Path], code_of: Callable[[str], str], tmp_path: Path
) -> None:
    """Nothing is cut off."""
    rollgen.export(write_odd(support_logprobs=True), "miles", tmp_path / "out", reward="correct")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        convert(tmp_path / "out" / "0.pt", code_of("miles"), 11)


def test_flags(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """miles replays masks if, and only if, its sampling truncates."""
    note, flags = rollgen.export(write_odd(), "miles", tmp_path / "out", reward="correct").advice
    assert "docs/export.md" in note
    assert "--rollout-temperature 0.75 --rollout-top-k 8 --rollout-top-p 0.875 --rollout-batch-size 6 " in flags


def test_flags_without_top_k(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """miles takes top_p only with a top_k: that of the widest support, 12 ids, changes nothing."""
    flags = rollgen.export(write_odd(top_p_only=True), "miles", tmp_path / "out", reward="correct").advice[-1]
    assert "--rollout-top-k 12 --rollout-top-p 0.875 " in flags


def test_without_masks(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """No field, and no flag that would ask for it."""
    advice = rollgen.export(write_odd(untruncated=tuple(range(6))), "miles", tmp_path / "out", reward="correct").advice
    assert "top" not in advice[-1]
    samples = torch.load(tmp_path / "out" / "0.pt", weights_only=True)["samples"]
    assert not any("sampling_mask" in name for sample in samples for name in sample)


def test_mixed_is_refused(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """Every token needs a support there, or none."""
    with pytest.raises(UsageError, match=r"^miles takes masks of all samples or of none"):
        rollgen.export(write_odd(untruncated=(0,)), "miles", tmp_path / "out", reward="correct")
