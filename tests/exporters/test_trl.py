"""`rollgen export --to trl`: loaded by `datasets`, compared with the dataset, trained on with the lines of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollgen.exporters.export import export

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
RENAMED = {"prompt_token_ids": "prompt_ids", "token_ids": "completion_ids"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `datasets` keeps what it loaded."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def load(directory: Path) -> datasets.Dataset:
    """As the page says."""
    return datasets.load_dataset("parquet", data_files=str(directory / "train.parquet"), split="train")


def test_every_column_comes_back(
    tmp_path: Path,
    write_odd: Callable[..., Path],
    current: Callable[[Path], dict[tuple[str, int], dict[str, Any]]],
) -> None:
    """Bit by bit, each sample once, groups together; float32 numbers compare as the float64 that they widen to."""
    features = {"temperatures": (0.75, 1.25), "untruncated": (3,), "support_logprobs": True, "extras": True}
    stored = write_odd(**features)
    exported = export(stored, "trl", tmp_path / "out", reward="correct", routed_experts=True)
    expected = current(stored)
    rows = load(tmp_path / "out")
    assert exported.lost == {}
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == sorted(expected)
    for row in rows:
        told = expected[row["prompt_id"], row["sample_index"]]
        assert row["advantage"] == pytest.approx(told.pop("advantage"), abs=1e-12)
        for name in ("prompt_length", "response_length"):  # those of the lists
            told.pop(name)
        for name, value in told.items():
            assert row[RENAMED.get(name, name)] == value, name
    assert rows[0]["completion_ids"] == [511]
    assert rows[0]["sampling_mask"] == [[3, 511]]


def test_what_is_not_asked_for_is_told_as_lost(tmp_path: Path, write_odd: Callable[..., Path]) -> None:
    """Experts, which take much space: 24 samples have some."""
    exported = export(write_odd(extras=True), "trl", tmp_path / "out")
    assert exported.lost == {"routed_experts": 24}
    assert "reward" not in load(tmp_path / "out").column_names


def lines_of_the_page() -> dict[str, Any]:
    """What they define, run where `trl-rollouts` is."""
    (block,) = re.findall(r"```python\n(from itertools.*?)```", PAGE.read_text(), re.DOTALL)
    lines: dict[str, Any] = {}
    exec(block, lines)
    return lines


def test_the_lines_of_the_page_keep_runs_apart(tmp_path: Path, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a merged dataset, whose two runs have the same prompts: a group is of one of them."""
    export(merged, "trl", tmp_path / "trl-rollouts")
    monkeypatch.chdir(tmp_path)
    lines = lines_of_the_page()
    groups = [lines["rows"][numbers] for numbers in lines["numbers"].values()]
    assert [len(set(zip(group["run"], group["prompt_id"], strict=True))) for group in groups] == [1] * 12


def test_the_lines_of_the_page_train(
    tmp_path: Path, tiny_model: Path, write_odd: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own trainer is served every sample once in an epoch, with its reward."""
    stored = write_odd()
    export(stored, "trl", tmp_path / "trl-rollouts", reward="correct")
    monkeypatch.chdir(tmp_path)
    lines = lines_of_the_page()
    served = []

    def reward(reward: list[float], completion_ids: list[list[int]], **given: Any) -> list[float]:
        served.extend(zip(map(tuple, completion_ids), reward, strict=True))
        return lines["reward"](reward, **given)

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        reward,
        args=GRPOConfig(
            output_dir=str(tmp_path / "output"),
            num_generations=4,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=lines["train_dataset"],
        rollout_func=lines["rollout_func"],
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    ).train()
    rows = load(tmp_path / "trl-rollouts")
    assert sorted(served) == sorted(zip(map(tuple, rows["completion_ids"]), rows["reward"], strict=True))
