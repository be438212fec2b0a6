"""examples/04_grpo_offline.py: its parts on numbers worked out by hand, and all of it on rollouts of the tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import rollgen
from rollgen.errors import UsageError


@pytest.fixture(scope="module")
def grpo(load_example: Callable[[str], ModuleType]) -> ModuleType:
    """The script."""
    return load_example("04_grpo_offline")


@pytest.fixture
def batches(rollouts: Path) -> list[rollgen.RolloutBatch]:
    """One for each prompt, of two samples."""
    batches = list(rollgen.RolloutStream(rollouts, batch_tokens=1, group_by_prompt=True))
    assert [len(batch) for batch in batches] == [2, 2, 2]
    return batches


def load(grpo: ModuleType, path: Path, *, width: int | None = None, tied: bool = False) -> PreTrainedModel:
    """The tiny model with gradients of zero."""
    model = grpo.load_model(str(path), width)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.embed_tokens.padding_idx = None  # transformers keeps the row of the padding id from learning
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@pytest.mark.parametrize(
    ("text", "metadata", "finish_reason", "expected"),
    [
        pytest.param("2 + 3 = 5", '{"answer": 5}', "stop", 1.25, id="the-last-number-counts"),
        pytest.param("5.", '{"answer": "5"}', "length", 1.0, id="right-but-cut"),
        pytest.param("It is -5", '{"answer": 5}', "stop", 0.25, id="sign"),
        pytest.param("0.50", '{"answer": 0.5}', "stop", 1.25, id="same-number-written-otherwise"),
        pytest.param("five", '{"answer": 5}', "stop", 0.25, id="no-number"),
        pytest.param("5", None, "length", 0.0, id="no-answer-known"),
        pytest.param(None, '{"answer": 5}', "length", 0.0, id="no-text"),
        pytest.param("1,234.5 is 1,000", '{"answer": "1,000"}', "length", 1.0, id="thousands"),
        pytest.param("so \u22125", '{"answer": -5}', "length", 1.0, id="typeset-minus"),
        pytest.param("1e3", '{"answer": 1000.0}', "length", 1.0, id="exponent"),
        pytest.param("5", '{"answer": null}', "length", 0.0, id="null-is-never-right"),
        pytest.param("5", '{"answer": "five"}', "length", 0.0, id="a-word-is-never-right"),
        pytest.param("5", '{"answer": [5]}', "length", 0.0, id="a-list-is-never-right"),
        pytest.param("1", '{"answer": true}', "length", 0.0, id="true-is-never-right"),
    ],
)
def test_reward(grpo: ModuleType, text: str | None, metadata: str | None, finish_reason: str, expected: float) -> None:
    """1 for the right number, 0.25 for an end."""
    assert grpo.reward(text, metadata, finish_reason) == expected


def test_gain_is_clipped_only_where_it_would_grow_further(grpo: ModuleType) -> None:
    """Ratios 1.5 and 0.5 against the bounds 1.2 and 0.8, for advantages 2 and -2."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    gain, clipped = grpo.clipped_gain(ratio.log(), torch.tensor([2.0, -2, 2, -2, 2]))
    # 1.2 * 2 < 1.5 * 2; 1.5 * -2 < 1.2 * -2; 0.5 * 2 < 0.8 * 2; 0.8 * -2 < 0.5 * -2; within the bounds.
    assert gain.tolist() == pytest.approx([2.4, -3.0, 1.0, -1.6, 2.2])
    assert clipped.tolist() == [True, False, False, True, False]


def test_figures_of_ratios(grpo: ModuleType) -> None:
    """Ratios 2 and 0.5: their mean is 1.25; k3 is 1 - log 2 and -0.5 + log 2, on average 0.25."""
    figures = grpo.ratio_figures(torch.tensor([2.0, 0.5]).log())
    assert figures == pytest.approx({"mean_ratio": 1.25, "kl": 0.25, "largest": 0.693147}, rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_the_whole_vocabulary(
    grpo: ModuleType, batches: list[rollgen.RolloutBatch], tiny_model: Path, tied: bool
) -> None:
    """Renumbering changes no gradient: the same loss over all logits, without it, is the reference.

    With a tied weight the policy is another one, so that ratios are far from 1 and some are clipped.
    """
    model, plain = (load(grpo, tiny_model, tied=tied) for _ in range(2))
    figures = grpo.add_gradients(model, batches, compare=False)
    loss = torch.zeros(())
    for batch in batches:
        logits = plain(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        ratio = (batch.support_logprobs(logits) - batch.logprobs)[batch.response_mask].exp()
        advantage = grpo.batch_advantages(batch)[batch.response_rollouts]
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / (3 * (5 + 9))
    loss.backward()
    assert figures["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
        )
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model_type": "gemma2", "final_logit_softcapping": 0.1, "head_dim": 8}, id="capped-logits"),
        pytest.param({"model_type": "granite", "logits_scaling": 2.0}, id="scaled-logits"),
        pytest.param({"model_type": "gemma3_text", "head_dim": 8}, id="scaled-embeddings"),
    ],
)
def test_models_that_scale_or_cap_are_refused(grpo: ModuleType, changes: dict[str, Any]) -> None:
    """What the script computes from the tables alone would not be what such a model samples from."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, **counts, **changes)).eval()
    with pytest.raises(UsageError, match=f"^{changes['model_type']}: logits from the tables"):
        grpo.check_model(model)


def test_memory_does_not_depend_on_the_vocabulary(
    grpo: ModuleType, batches: list[rollgen.RolloutBatch], tiny_model: Path
) -> None:
    """Four times the vocabulary takes the same memory, less than one of the smaller head, which has 4 MiB.

    To 100 kB: where Python keeps its objects varies.
    """
    peaks = []
    for width in 8192, 32768:
        model = load(grpo, tiny_model, width=width)
        peaks.append(grpo.peak_bytes(partial(grpo.add_gradients, model, batches, compare=False)))
    assert peaks[0] == pytest.approx(peaks[1], abs=100_000)
    assert max(peaks) < 8192 * 128 * 4


def test_peak_counts_what_is_alive_at_once(grpo: ModuleType) -> None:
    """2 x 100,000 float64 at a time of torch, a third after the first is gone, none from before; 100,000 of numpy."""
    before = torch.ones(500_000, dtype=torch.float64)

    def work() -> np.ndarray:
        first = before[:100_000] + 1
        second = first + 1
        del first
        second + 1
        return np.ones(100_000)

    assert grpo.peak_bytes(work) == pytest.approx(2_400_000, abs=50_000)


def test_first_step_is_exact_and_later_ones_move(
    grpo: ModuleType,
    rollouts: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With masks ratios begin at 1, without them at the mass that was kept; a padded vocabulary changes neither."""
    plot = tmp_path / "plot.png"
    arguments = ["--model", tiny_model, "--pad-vocab", 1000, "--learning-rate", "1e-3", "--steps", 3]
    monkeypatch.setattr(sys, "argv", ["grpo", *map(str, [rollouts, *arguments, "--json", "--plot", plot])])
    grpo.main()
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["tokens"] for step in steps] == [3 * (5 + 9)] * 3
    first, last = steps[0], steps[-1]
    assert first["with masks"]["largest"] < 1e-4
    assert first["with masks"]["kl"] < 1e-8
    assert first["clipped"] == 0
    assert 0.1 < first["without masks"]["mean_ratio"] < 0.9
    assert last["with masks"]["kl"] > 1e-4
    assert last["clipped"] > 0
    assert last["loss"] < first["loss"]
    assert plot.read_bytes().startswith(b"\x89PNG")
