"""verl: the files, and what the conversion of docs/export.md makes of them, compared token by token.

Fields are those of `AgentLoopOutput.as_dict` and `AgentLoopWorkerTQ` (0.9.1), which the V1 trainer reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgen
from rollgen.errors import UsageError

Rows = Callable[[Path], dict[tuple[str, int], dict[str, Any]]]
UNTRUNCATED = {"untruncated": tuple(range(6))}


def check(tensors: dict[str, torch.Tensor], row: dict[str, Any]) -> None:
    """The tensors of one sample against its row of the dataset."""
    prompt, response = row["prompt_token_ids"], row["token_ids"]
    assert tensors["prompts"].tolist() == prompt
    assert tensors["responses"].tolist() == response
    assert tensors["input_ids"].tolist() == prompt + response
    assert tensors["position_ids"].tolist() == list(range(len(prompt) + len(response)))
    assert tensors["response_mask"].tolist() == tensors["loss_mask"].tolist() == [1] * len(response)
    assert tensors["rollout_log_probs"].tolist() == row["logprobs"]
    assert tensors["rm_scores"].tolist() == [*[0.0] * (len(response) - 1), pytest.approx(row["reward"], abs=1e-7)]
    kinds = {name: tensors[name].dtype for name in tensors}
    floats = {"rollout_log_probs", "rm_scores"}
    assert all(kinds[name] == torch.float32 for name in floats)
    others = {"prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids"}
    assert all(kinds[name] == torch.int64 for name in others)
    assert kinds.keys() == floats | others


def test_every_token(write_odd: Callable[..., Path], current: Rows, tmp_path: Path) -> None:
    """A file a step, counted from 1; groups have a uid, samples a session of it."""
    rows = current(directory := write_odd(**UNTRUNCATED))
    rollgen.export(directory, "verl", tmp_path / "out", reward="correct", prompts_per_step=3)
    for step in (1, 2):
        content = torch.load(tmp_path / "out" / f"{step}.pt", weights_only=True)
        tensors, values = content["tensors"], content["values"]
        assert content["global_steps"] == step
        assert len(content["keys"]) == len(content["tags"]) == 12
        assert set(Counter(values["uid"]).values()) == {4}
        for number, (key, tag) in enumerate(zip(content["keys"], content["tags"], strict=True)):
            kept = values["extra_fields"][number]["rollgen"]
            row = rows.pop((kept["prompt_id"], kept["sample_index"]))
            check({name: column[number] for name, column in tensors.items()}, row)
            assert key.split("_") == [values["uid"][number], str(kept["sample_index"]), "0"]
            assert tag["seq_len"] == tag["prompt_len"] + tag["response_len"] == len(tensors["input_ids"][number])
            assert {tag[name] for name in tag if name.endswith("global_steps")} == {step}
            assert {name: row[name] for name in kept} == kept
    assert rows == {}


def test_truncated_is_refused(write_odd: Callable[..., Path], tmp_path: Path) -> None:
    """verl would normalise over the full vocabulary."""
    with pytest.raises(UsageError, match=r"^verl replays no sampling masks: .* carry_masks=true"):
        rollgen.export(write_odd(), "verl", tmp_path / "out", reward="correct")
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}


def test_masks_can_be_carried(write_odd: Callable[..., Path], current: Rows, tmp_path: Path) -> None:
    """For a trainer that reads them."""
    rows = current(directory := write_odd(extras=True))
    options = {"carry_masks": True, "routed_experts": True}
    exported = rollgen.export(directory, "verl", tmp_path / "out", reward="correct", **options)
    assert not {"sampling_mask", "routed_experts", "weight_versions"} & exported.lost.keys()
    content = torch.load(tmp_path / "out" / "1.pt", weights_only=True)
    tensors = content["tensors"]
    for number, extra in enumerate(content["values"]["extra_fields"]):
        row = rows[extra["rollgen"]["prompt_id"], extra["rollgen"]["sample_index"]]
        offsets = tensors["sampling_mask_offsets"][number]
        ids = tensors["sampling_mask_ids"][number].tensor_split(offsets[1:-1])
        assert [part.tolist() for part in ids] == row["sampling_mask"]
        experts = tensors["routed_experts"][number]
        assert (experts.dtype, experts.shape) == (torch.int16, (len(tensors["input_ids"][number]), 3, 2))
        assert experts[:-1].flatten().tolist() == row["routed_experts"]
        assert not experts[-1].any()


def test_the_cache_of_the_trainer(
    write_odd: Callable[..., Path], code_of: Callable[[str], str], tmp_path: Path
) -> None:
    """The lines of the page make a TensorDict with jagged rows, where the trainer looks for it."""
    rollgen.export(write_odd(**UNTRUNCATED), "verl", tmp_path / "out", reward="correct", prompts_per_step=3)
    names: dict[str, Any] = {}
    exec(code_of("verl"), names)
    names["fill_cache"](tmp_path / "out", tmp_path / "cache")
    for step in (1, 2):
        place = tmp_path / "cache" / str(step) / "0"
        assert (place / "meta.json").exists()
        loaded = torch.load(place / "tq_batch.pt", weights_only=False)
        plain = torch.load(tmp_path / "out" / f"{step}.pt", weights_only=True)
        batch = loaded["tensordict"]
        assert batch.batch_size == (12,)
        for name, rows in plain["tensors"].items():
            assert [row.tolist() for row in batch[name].unbind()] == [row.tolist() for row in rows]
        assert [batch[number]["extra_fields"] for number in range(12)] == plain["values"]["extra_fields"]
        assert (loaded["keys"], loaded["tags"]) == (plain["keys"], plain["tags"])
