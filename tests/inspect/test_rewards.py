"""Figures of rewards: of current samples with the tokens that were scored."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.rewards import write_rewards
from rich.console import Console

from rollgen.errors import DatasetError
from rollgen.format.reader import open_dataset
from rollgen.format.rewards import list_parts
from rollgen.inspect.card import write_card
from rollgen.inspect.rewards import RewardBar, RewardFigures, RewardStats, _figures, stored_rewards
from rollgen.inspect.stats import DatasetStats, stats_of
from rollgen.inspect.terminal import render


def measured(directory: Path) -> DatasetStats:
    """As `rollgen inspect` measures it."""
    dataset = open_dataset(directory)
    return stats_of(dataset, stored_rewards(dataset))


def figures(directory: Path) -> tuple[RewardStats, ...]:
    return measured(directory).rewards


@pytest.fixture
def dataset(tmp_path: Path, make_extras: Callable[..., Path]) -> Path:
    """Twelve samples of six prompts in two shards."""
    return make_extras(tmp_path / "run")


def graded(row: dict[str, Any]) -> float | None:
    """Of prompts 0 and 1 both samples have 1, of 2 and 3 one has 0, of 4 one has nothing, of 5 both have nothing."""
    prompt, sample = row["prompt_index"], row["sample_index"]
    if prompt < 2:
        return 1.0
    if prompt < 4:
        return float(sample)
    return None if prompt == 5 or sample else 0.0


def test_figures(dataset: Path) -> None:
    """Nine rewards: six 1, three 0; mean 2/3, variance 2/3 * 1/3. Equal are prompts 0, 1, and 4 with its only one."""
    write_rewards(dataset, "correct", graded)
    write_rewards(dataset, "style", lambda row: {"reward": 0.25, "tone": 1.0})
    write_rewards(dataset, "vain", lambda row: None)
    correct, style, vain = figures(dataset)
    assert correct == RewardStats(
        name="correct",
        scorer="scorers:score",
        scored=9,
        not_scored=3,
        figures=RewardFigures(
            mean=pytest.approx(2 / 3),
            std=pytest.approx(math.sqrt(2 / 9)),
            min=0,
            max=1,
            prompts=5,
            equal_prompts=3,
            bars=(RewardBar(0, 0, 3), RewardBar(1, 1, 6)),
        ),
        further=(),
    )
    bars = (RewardBar(0.25, 0.25, 12),)
    assert style.figures == RewardFigures(mean=0.25, std=0, min=0.25, max=0.25, prompts=6, equal_prompts=6, bars=bars)
    assert style.further == ("tone",)
    assert (vain.scored, vain.not_scored, vain.figures) == (0, 12, None)


def test_tokens_that_changed_do_not_count(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample was made again."""
    write_rewards(dataset, "correct", lambda row: 1.0)
    monkeypatch.setattr("models.rewards.crc_of", lambda ids: 1)
    write_rewards(dataset, "correct", lambda row: 1.0, only=lambda row: row["prompt_index"] == 0)
    (correct,) = figures(dataset)
    assert (correct.scored, correct.not_scored) == (10, 2)


def test_what_inspect_shows(dataset: Path) -> None:
    """A section of the terminal's figures, fitting 80 columns, and of the JSON; nothing without rewards."""
    assert "Rewards" not in shown(dataset)
    assert measured(dataset).to_json()["rewards"] == []
    write_rewards(dataset, "correct", graded)
    text = shown(dataset)
    assert "Rewards" in text
    assert "correct by scorers:score · 9 scored · 3 not scored" in text
    assert "mean 0.6667 · std 0.4714 · 0 to 1 · no gradient 60.0% of prompts" in text
    (told,) = measured(dataset).to_json()["rewards"]
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(asdict(figures(dataset)[0])))


@pytest.mark.parametrize(
    ("rewards", "mean", "std", "told"),
    [
        pytest.param([1e-5, 3e-5], 2e-5, 1e-5, "mean 2e-05 · std 1e-05 · 1e-05 to 3e-05", id="small"),
        pytest.param([-4e-4, 4e-4], 0, 4e-4, "mean 0 · std 0.0004 · -0.0004 to 0.0004", id="around 0"),
        pytest.param([-3e38, 3e38], 0, 3e38, "mean 0 · std 3e+38 · -3e+38 to 3e+38", id="huge"),
        pytest.param([-0.0, -0.0], 0, 0, "mean 0 · std 0 · 0 to 0", id="minus nothing"),
    ],
)
def test_rewards_of_any_size(dataset: Path, rewards: list[float], mean: float, std: float, told: str) -> None:
    """Two, half of the samples each: six digits of each figure, wherever the point is, and no infinity in the JSON."""
    write_rewards(dataset, "correct", lambda row: rewards[row["sample_index"]])
    found = figures(dataset)[0].figures
    assert found is not None
    assert (found.mean, found.std) == (pytest.approx(mean, rel=1e-12), pytest.approx(std, rel=1e-12))
    assert told in shown(dataset)
    json.dumps(measured(dataset).to_json(), allow_nan=False)


@pytest.mark.parametrize("scale", [2.0**-1070, 1.0, 1e20])
@pytest.mark.parametrize("base", [-20.0, 0.0, 2.0**52])
def test_many_rewards(scale: float, base: float) -> None:
    """41 values, a step apart: 20 bars that hold each of them once, however small a step is beside the values."""
    values = (base + np.arange(41)) * scale
    bars = list(_figures(values, np.zeros(41, np.int64)).bars)
    assert (len(bars), sum(bar.samples for bar in bars)) == (20, 41)
    assert (bars[0].low, bars[-1].high) == (values[0], values[-1])
    for bar in bars[:-1]:
        assert bar.samples == ((bar.low <= values) & (values < bar.high)).sum()


def test_a_card_does_not_need_them(dataset: Path) -> None:
    """It tells nothing of rewards: a damaged file is an error of `rollgen inspect`, not of a run that is over."""
    write_rewards(dataset, "correct", graded)
    path = list_parts(dataset, "correct")[0]
    path.write_bytes(path.read_bytes()[:-1])
    write_card(dataset)
    with pytest.raises(DatasetError, match=r"correct-000000\.parquet: damaged"):
        measured(dataset)


def shown(directory: Path) -> str:
    console = Console(file=io.StringIO(), width=80)
    render(measured(directory), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
