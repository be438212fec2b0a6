"""Recomputed figures, against float64 logits of the tiny model that are masked here, in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models.sampled import LENGTHS, ROUNDING, Row
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollgen.curate.merge import merge
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest
from rollgen.format.writer import ShardWriter
from rollgen.prompts.single import id_number
from rollgen.verify import recompute as module
from rollgen.verify.merged import Sampled
from rollgen.verify.recomputation import Drift
from rollgen.verify.recompute import Recomputation, describe, recompute


def _drift(rows: list[Row], kind: str) -> tuple[float, float, float, float, float]:
    """The fields of a Drift, from the definitions."""
    delta = np.concatenate([getattr(row, kind) - row.completion.logprobs.astype(np.float64) for row in rows])
    ratio = np.exp(delta)
    error = ratio.std() / np.sqrt(len(ratio))
    return ratio.mean(), error, np.abs(delta).mean(), np.abs(delta).max(), (np.abs(ratio - 1) > 0.1).mean()


def _fields(drift: Drift) -> tuple[float, float, float, float, float]:
    return drift.mean_ratio, drift.standard_error, drift.mean_abs, drift.max_abs, drift.share_outside


def _k3(row: Row) -> np.ndarray:
    delta = row.masked - row.completion.logprobs
    return np.exp(delta) - 1 - delta


@pytest.mark.parametrize(
    ("full", "support_logprobs", "estimator"),
    [
        pytest.param((), False, "k3", id="masks"),
        pytest.param((), True, "exact", id="support logprobs"),
        pytest.param((2, 5), True, "mixed", id="support logprobs and untruncated rows"),
        pytest.param((2, 5), False, "k3", id="masks and untruncated rows"),
        pytest.param(range(10), False, "k3", id="nothing truncated"),
    ],
)
def test_every_figure_is_the_oracles(
    make_row: Callable[..., Row],
    write_rows: Callable[..., Path],
    tiny_model: Path,
    full: tuple[int, ...],
    support_logprobs: bool,
    estimator: str,
) -> None:
    """Ten rows in several row groups of two shards, sampled by a policy that is 0.2 nats away in every logit."""
    rows = [make_row(index, length, noise=0.2, full=index in full) for index, length in enumerate(LENGTHS)]
    directory = write_rows([row.completion for row in rows], support_logprobs=support_logprobs)
    found = recompute(directory, str(tiny_model))
    assert (found.model, found.dtype, found.device) == ("tiny", "float32", "cpu")
    assert (found.samples, found.unreplayable, found.tokens) == (10, 0, sum(LENGTHS))
    assert (found.same_checkpoint, found.lowest_temperature, found.noise_floor) == (True, 0.5, None)
    assert _fields(found.with_masks) == pytest.approx(_drift(rows, "masked"), abs=ROUNDING)
    assert _fields(found.without_masks) == pytest.approx(_drift(rows, "full"), abs=ROUNDING)
    exact = [row.kl if support_logprobs and index not in full else _k3(row) for index, row in enumerate(rows)]
    assert found.kl_estimator == estimator
    assert found.kl == pytest.approx(np.concatenate(exact).mean(), abs=ROUNDING)
    assert found.kl > 0.005
    score, variance = (np.concatenate([getattr(row, name) for row in rows]) for name in ("score", "variance"))
    delta = np.concatenate([row.masked - row.completion.logprobs for row in rows])
    assert found.temperature is not None
    assert found.temperature.by_tokens == pytest.approx(1 - score.sum() / variance.sum(), abs=ROUNDING)
    assert found.temperature.tokens_error == pytest.approx(variance.sum() ** -0.5, abs=ROUNDING)
    assert found.temperature.largest_score == pytest.approx(np.abs(score).max(), abs=ROUNDING)
    assert found.temperature.by_logprobs == pytest.approx(1 + (delta @ score) / (score @ score), abs=ROUNDING)
    listed = sum(length for index, length in enumerate(LENGTHS) if index not in full)
    assert (found.supports.tokens if found.supports else 0) == listed
    assert found.supports is None or found.supports.violating == 0
    assert "the largest |delta|" in str(found.problem())


def test_without_masks_the_ratio_is_the_kept_mass(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """The same checkpoint replays to rounding with masks; without, each ratio is the mass that its support keeps."""
    rows = [make_row(index, length) for index, length in enumerate(LENGTHS)]
    found = recompute(write_rows([row.completion for row in rows]), str(tiny_model))
    assert found.problem() is None
    assert found.with_masks.mean_ratio == pytest.approx(1, abs=1e-6)
    assert found.with_masks.max_abs < ROUNDING
    kept = np.exp(np.concatenate([row.full - row.masked for row in rows]))
    assert found.without_masks.mean_ratio == pytest.approx(kept.mean(), abs=ROUNDING)
    assert 0.6 < kept.mean() < 0.9


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_noise_floor_is_the_same_weights_in_float32(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path, dtype: str
) -> None:
    """Stored are float64 results, so the deltas are the rounding of that dtype, which the floor measures as well."""
    rows = [make_row(index, length) for index, length in enumerate(LENGTHS)]
    found = recompute(write_rows([row.completion for row in rows], dtype=dtype), str(tiny_model))
    assert found.problem() is None
    assert found.noise_floor is not None
    assert found.with_masks.mean_abs > 10 * ROUNDING
    assert _fields(found.noise_floor) == pytest.approx(_fields(found.with_masks), abs=ROUNDING)


def test_long_sequences_go_through_in_parts(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 tokens at once, where all but the shortest rows are longer: keys and values carry over."""
    rows = [make_row(index, length, noise=0.2, full=index == 3) for index, length in enumerate(LENGTHS)]
    directory = write_rows([row.completion for row in rows], support_logprobs=True)
    monkeypatch.setattr(module, "MAX_TOKENS", 7)
    found = recompute(directory, str(tiny_model))
    assert _fields(found.with_masks) == pytest.approx(_drift(rows, "masked"), abs=ROUNDING)
    assert _fields(found.without_masks) == pytest.approx(_drift(rows, "full"), abs=ROUNDING)


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [
        pytest.param(1, [0], id="one"),
        pytest.param(3, [0, 3, 6], id="three"),
        pytest.param(9, [0, 1, 2, 3, 4, 5, 6, 7, 8], id="nearly all"),
        pytest.param(64, range(10), id="more than there are"),
        pytest.param(None, range(10), id="all"),
    ],
)
def test_samples_are_spread_evenly(
    make_row: Callable[..., Row],
    write_rows: Callable[..., Path],
    tiny_model: Path,
    limit: int | None,
    chosen: list[int],
) -> None:
    """Row i * 10 // limit for i below the limit; the figures are of exactly these."""
    rows = [make_row(index, length, noise=0.2) for index, length in enumerate(LENGTHS)]
    found = recompute(write_rows([row.completion for row in rows]), str(tiny_model), limit=limit)
    assert found.samples == len(chosen)
    assert found.tokens == sum(LENGTHS[index] for index in chosen)
    assert _fields(found.with_masks) == pytest.approx(_drift([rows[i] for i in chosen], "masked"), abs=ROUNDING)


def test_unreplayable_rows_are_left_out_and_counted(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """Four of ten: the limit spreads over the six others."""
    rows = [make_row(index, length, noise=0.2) for index, length in enumerate(LENGTHS)]
    out = {0, 3, 4, 8}
    completions = [replace(row.completion, replayable=index not in out) for index, row in enumerate(rows)]
    found = recompute(write_rows(completions), str(tiny_model), limit=3)
    assert (found.samples, found.unreplayable) == (3, 4)
    assert _fields(found.with_masks) == pytest.approx(_drift([rows[i] for i in (1, 5, 7)], "masked"), abs=ROUNDING)
    assert describe(found)[1].startswith("NOT COMPARED: 4 of 10 samples are marked as not replayable")
    assert "most samples" not in str(found.problem())


def test_a_dataset_that_grows_meanwhile(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are those that were there when it was opened, though others have a place before them by then."""
    rows = [make_row(index, length, noise=0.2) for index, length in enumerate(LENGTHS)]
    out = {0, 3, 4, 8}
    directory = write_rows([replace(row.completion, replayable=index not in out) for index, row in enumerate(rows)])
    later = [make_row(len(rows) + index, 5, noise=0.2).completion for index in range(3)]
    opened = module.sampled_by

    def grown(manifest: Manifest, model: str, *, flag: str) -> Sampled:
        with WriterSlot(directory, "a0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for completion in later:
                writer.add(completion)
        return opened(manifest, model, flag=flag)

    monkeypatch.setattr(module, "sampled_by", grown)
    found = recompute(directory, str(tiny_model), limit=None)
    chosen = [row for index, row in enumerate(rows) if index not in out]
    assert (found.samples, found.unreplayable) == (6, 4)
    assert _fields(found.with_masks) == pytest.approx(_drift(chosen, "masked"), abs=ROUNDING)


def test_another_checkpoint_is_named_as_such(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], oracle: PreTrainedModel, tmp_path: Path
) -> None:
    """A trained one, without a tokenizer beside it: its ratios measure how far it moved, and nothing is wrong."""
    model = AutoModelForCausalLM.from_pretrained(oracle.config._name_or_path, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "trained")
    rows = [make_row(index, length) for index, length in enumerate(LENGTHS)]
    found = recompute(write_rows([row.completion for row in rows]), str(tmp_path / "trained"))
    assert (found.model, found.same_checkpoint, found.problem()) == ("trained", False, None)
    assert found.with_masks.mean_abs > 0.1
    text = "\n".join(describe(found))
    assert "not the checkpoint that sampled" in text
    assert "its fingerprint is another" in text


def test_it_is_silent(
    make_row: Callable[..., Row],
    write_rows: Callable[..., Path],
    tiny_model: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Bars and advice of other libraries stay out of stdout and stderr."""
    found: Recomputation = recompute(write_rows([make_row(i, 4).completion for i in range(2)]), str(tiny_model))
    assert found.tokens == 8
    assert capfd.readouterr() == ("", "")


def test_only_the_runs_that_the_model_sampled(
    write_rows: Callable[..., Path],
    make_row: Callable[..., Row],
    make_run: Callable[..., Path],
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    """Of a merged dataset the four samples of this model, and not the twelve random ones of another; it says so."""
    made = [make_row(index, 6).completion for index in range(4)]
    own = write_rows([replace(each, prompt_index=id_number(each.prompt_id)) for each in made])
    merge([own, make_run(tmp_path / "other", 1)], tmp_path / "merged")
    found = recompute(tmp_path / "merged", str(tiny_model), limit=None)
    assert (found.runs, found.samples, found.of_other_runs) == (("dataset",), 4, 12)
    assert (found.same_checkpoint, found.problem()) == (True, None)
    assert "of the runs that it sampled: dataset; not compared: 12 samples of others" in describe(found)
    assert found.to_json()["runs"] == ["dataset"]
