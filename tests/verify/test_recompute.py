"""Recomputing log-probabilities, against float64 logits of the tiny model that are masked here, in numpy."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollgen.config import digest
from rollgen.curate.merge import merge
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import PLANLESS, Manifest, create_manifest
from rollgen.format.schema import shard_schema
from rollgen.format.writer import build_row_groups, footer_metadata, write_parquet
from rollgen.prompts.fingerprint import directory_fingerprint
from rollgen.prompts.single import id_number
from rollgen.rollouts import Completion, Sampling
from rollgen.verify import recompute as module
from rollgen.verify.recomputation import Drift
from rollgen.verify.recompute import Recomputation, describe, recompute

VOCAB_SIZE = 512
KEPT = 7
"""top_k, and the ids of a support: of the 512 they hold about four fifths of the probability."""
LENGTHS = (1, 30, 5, 17, 2, 40, 9, 9, 3, 24)
"""Generated tokens of the ten rows."""
ROUNDING = 2e-5
"""Between float32 and float64 passes of the tiny model, at most, on the figures below."""


class Row(NamedTuple):
    """A completion and what a recomputation of each of its T tokens has to give, all float64."""

    completion: Completion
    masked: np.ndarray
    """[T], log pi_theta over the support."""
    full: np.ndarray
    """[T], log pi_theta over the vocabulary."""
    kl: np.ndarray
    """[T], KL(pi_old || pi_theta) over the support."""
    score: np.ndarray
    """[T], log pi_theta above its mean."""
    variance: np.ndarray
    """[T], of log pi_theta over the support."""


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> PreTrainedModel:
    """The tiny model in float64."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def sample(oracle: PreTrainedModel) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`sample(prompt, tokens, temperature, kept)`: ids of the `kept` most likely, int64 [T], and logits / T [T, V]."""

    @functools.cache
    @torch.no_grad()
    def draw(prompt: tuple[int, ...], tokens: int, temperature: float, kept: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([*prompt, tokens])
        cache, inputs, chosen, steps = None, torch.tensor([prompt]), [], []
        for _ in range(tokens):
            output = oracle(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache, scaled = output.past_key_values, output.logits[0, -1].numpy() / temperature
            mask = np.sort(np.argsort(scaled)[-kept:])
            chosen.append(int(rng.choice(mask, p=np.exp(_log_softmax(scaled[mask])))))
            inputs = torch.tensor([chosen[-1:]])
            steps.append(scaled)
        return np.array(chosen), np.array(steps)

    return draw


@pytest.fixture
def make_row(
    sample: Callable[..., tuple[np.ndarray, np.ndarray]], make_completion: Callable[..., Completion]
) -> Callable[..., Row]:
    """`make_row(index, tokens, noise=0.0, full=False)`: log-probabilities are of a policy that is `noise` away.

    Every second row has a temperature of 0.5, the others of 1.
    """

    def make(index: int, tokens: int, *, noise: float = 0.0, full: bool = False) -> Row:
        base = make_completion(index, 0, tokens=tokens)
        temperature, kept = 0.5 if index % 2 else 1.0, VOCAB_SIZE if full else KEPT
        token_ids, scaled = sample(tuple(base.prompt_token_ids.tolist()), tokens, temperature, kept)
        moved = scaled + np.random.default_rng(index).normal(0, noise, scaled.shape)
        masks = [np.sort(np.argsort(step)[-kept:]) for step in scaled]
        new = [_log_softmax(step[mask]) for step, mask in zip(scaled, masks, strict=True)]
        old = [_log_softmax(step[mask]) for step, mask in zip(moved, masks, strict=True)]
        at = [int(np.flatnonzero(mask == token)[0]) for mask, token in zip(masks, token_ids, strict=True)]
        sizes = [0 if full else len(mask) for mask in masks]
        completion = replace(
            base,
            token_ids=token_ids.astype(np.int32),
            logprobs=np.array([step[place] for step, place in zip(old, at, strict=True)], np.float32),
            mask_ids=np.concatenate([mask[:size] for mask, size in zip(masks, sizes, strict=True)]).astype(np.int32),
            mask_offsets=np.cumsum([0, *sizes]),
            support_logprobs=np.concatenate([s[:size] for s, size in zip(old, sizes, strict=True)]).astype(np.float32),
            sampling=Sampling(temperature=temperature, top_k=0 if full else KEPT, max_tokens=64),
        )
        return Row(
            completion,
            masked=np.array([step[place] for step, place in zip(new, at, strict=True)]),
            full=np.array([_log_softmax(step)[token] for step, token in zip(scaled, token_ids, strict=True)]),
            kl=np.array([(np.exp(o) * (o - n)).sum() for o, n in zip(old, new, strict=True)]),
            score=np.array([step[place] - np.exp(step) @ step for step, place in zip(new, at, strict=True)]),
            variance=np.array([np.exp(step) @ (step - np.exp(step) @ step) ** 2 for step in new]),
        )

    return make


@pytest.fixture
def write_rows(
    tmp_path: Path, tiny_model: Path, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`write_rows(completions, dtype="float32", support_logprobs=False)`: two shards, row groups of about 16 tokens.

    `sampling_arg` goes into the manifest.
    """
    monkeypatch.setattr("rollgen.format.columns.ROW_GROUP_TOKENS", 16)

    def write(
        completions: list[Completion],
        *,
        dtype: str = "float32",
        support_logprobs: bool = False,
        sampling_arg: dict[str, Any] | None = None,
    ) -> Path:
        directory = tmp_path / "dataset"
        directory.mkdir()
        manifest = make_manifest(support_logprobs=support_logprobs)
        identity = manifest.identity | {"sampling_arg": sampling_arg or {}, PLANLESS: True}
        manifest = manifest.model_copy(update={"identity": identity, "config_digest": digest(identity)})
        model = manifest.model.model_copy(update={"fingerprint": directory_fingerprint(tiny_model), "dtype": dtype})
        manifest = manifest.model_copy(update={"model": model})
        assert create_manifest(directory, manifest)
        schema = shard_schema(support_logprobs=support_logprobs).with_metadata(footer_metadata(manifest))
        half = len(completions) // 2
        with WriterSlot(directory, "w0") as slot:
            for rows in (completions[:half], completions[half:]):
                temporary = slot.temporary()
                write_parquet(temporary, build_row_groups(rows, schema), schema)
                tokens, ids = (sum(len(part) for part in parts) for parts in zip(*map(_sizes, rows), strict=True))
                slot.append(slot.publish(temporary, rows=len(rows), tokens=tokens, mask_ids=ids))
                temporary.unlink()
        return directory

    return write


@pytest.fixture
def changed_model(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """`changed_model(key=value, ...)`: a copy of the tiny model with another config.json."""

    def change(**changes: Any) -> Path:
        model = Path(shutil.copytree(tiny_model, tmp_path / "changed"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))
        return model

    return change


def _sizes(row: Completion) -> tuple[np.ndarray, np.ndarray]:
    return row.token_ids, row.mask_ids


def _without_masks(row: Completion) -> Completion:
    """The same logprobs, said to be of the full vocabulary."""
    sampling = replace(row.sampling, top_k=0)
    return replace(row, mask_ids=row.mask_ids[:0], mask_offsets=np.zeros_like(row.mask_offsets), sampling=sampling)


def _log_softmax(scaled: np.ndarray) -> np.ndarray:
    return scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_supports_show_in_every_dtype(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path, dtype: str
) -> None:
    """As if nothing had truncated: ratios are too small, further than chance and noise explain."""
    rows = [make_row(index, length).completion for index, length in enumerate(LENGTHS)]
    directory = write_rows([_without_masks(row) for row in rows], dtype=dtype)
    assert "|mean ratio - 1|" in str(recompute(directory, str(tiny_model)).problem())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("damage", "problem", "violating"),
    [
        pytest.param("singletons", "140 of 140 supports are not what top_k", 140, id="nothing but the sampled id"),
        pytest.param("one id", "supports are not what top_k", 140, id="another id throughout, and nothing else"),
        pytest.param("dropped", "140 of 140 supports are not what top_k", 140, id="the least likely id is missing"),
        pytest.param("added", "", 140, id="three ids too many"),
        pytest.param("hotter", "", 0, id="temperature 1.15 times too high"),
        pytest.param("shifted", "|mean ratio - 1|", 0, id="log-probabilities 0.1 too low"),
    ],
)
def test_what_fits_itself_does_not_fit_the_model(
    make_row: Callable[..., Row],
    write_rows: Callable[..., Path],
    tiny_model: Path,
    dtype: str,
    damage: str,
    problem: str,
    violating: int,
) -> None:
    """Log-probabilities are normalised over the supports that are stored, so that no ratio gives the first three away.

    A few supports are right by chance: where an added id was among the top, or the one id was the most likely.
    """
    rows = [_damaged(make_row(index, length).completion, damage) for index, length in enumerate(LENGTHS)]
    found = recompute(write_rows(rows, dtype=dtype), str(tiny_model))
    assert found.supports is not None
    assert found.supports.violating == pytest.approx(violating, abs=3)
    assert problem in str(found.problem())
    assert found.problem() is not None


def _damaged(row: Completion, damage: str) -> Completion:
    """The same completion, wrong in one way."""
    if damage == "hotter":
        return replace(row, sampling=replace(row.sampling, temperature=1.15 * row.sampling.temperature))
    if damage == "shifted":
        return replace(row, logprobs=row.logprobs - np.float32(0.1))
    if damage == "added":
        return _with_masks(row, [np.union1d(mask, [100, 200, 300]) for mask in _lists(row, row.mask_ids)])
    if damage == "dropped":
        return _without_the_least_likely(row)
    if damage == "one id":
        row = replace(row, token_ids=np.full_like(row.token_ids, 123))
    return _with_masks(replace(row, logprobs=np.zeros_like(row.logprobs)), list(row.token_ids[:, None]))


def _without_the_least_likely(row: Completion) -> Completion:
    """Or the one before it, where it was sampled; log-probabilities are of what is left."""
    masks, logprobs = [], []
    for mask, of_mask, token in zip(
        _lists(row, row.mask_ids), _lists(row, row.support_logprobs), row.token_ids, strict=True
    ):
        kept = mask != next(int(mask[place]) for place in np.argsort(of_mask) if mask[place] != token)
        masks.append(mask[kept])
        logprobs.append(float(_log_softmax(of_mask[kept])[masks[-1] == token][0]))
    return replace(_with_masks(row, masks), logprobs=np.array(logprobs, np.float32))


def _lists(row: Completion, values: np.ndarray | None) -> list[np.ndarray]:
    assert values is not None
    return np.split(values, row.mask_offsets[1:-1])


def _with_masks(row: Completion, masks: list[np.ndarray]) -> Completion:
    offsets = np.cumsum([0, *map(len, masks)])
    return replace(row, mask_ids=np.concatenate(masks).astype(np.int32), mask_offsets=offsets)


def test_supports_are_not_judged_where_more_ids_were_excluded(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """The manifest says that ids were taken out by name: which is not known, so that no support can be judged."""
    rows = [_damaged(make_row(index, length).completion, "dropped") for index, length in enumerate(LENGTHS)]
    found = recompute(write_rows(rows, sampling_arg={"bad_words": ["no"]}), str(tiny_model))
    assert found.problem() is None
    assert found.supports is None
    assert describe(found)[-2] == "supports: not judged, --sampling-arg bad_words may have taken ids out too"


def test_most_samples_have_to_be_compared(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """Six of ten are left out: what is sound in the others says little."""
    rows = [make_row(index, length).completion for index, length in enumerate(LENGTHS)]
    found = recompute(
        write_rows([replace(row, replayable=index < 4) for index, row in enumerate(rows)]), str(tiny_model)
    )
    assert "most samples were not compared: 6 of 10 are marked as not replayable" in str(found.problem())


def test_logprobs_of_another_token_show(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """Shifted by one inside each row, as an off-by-one would: every token is wrong."""
    rows = [make_row(index, length).completion for index, length in enumerate(LENGTHS)]
    shifted = [replace(row, logprobs=np.roll(row.logprobs, 1)) for row in rows]
    found = recompute(write_rows(shifted), str(tiny_model))
    assert found.with_masks.max_abs > 1
    assert found.problem() is not None


def test_a_sampled_id_outside_its_support_is_infinitely_far(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """Its ratio is 0. JSON has no infinity: the figure is null there, and the problem says what it was."""
    rows = [make_row(index, length).completion for index, length in enumerate(LENGTHS)]
    wrong = rows[1].token_ids.copy()
    wrong[-1] = next(i for i in range(VOCAB_SIZE) if i not in rows[1].mask_ids)
    found = recompute(write_rows([rows[0], replace(rows[1], token_ids=wrong), *rows[2:]]), str(tiny_model))
    assert found.with_masks.max_abs == np.inf
    figures = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert figures["max_abs_delta_logprob"] is None
    assert figures["mean_ratio"] == pytest.approx(1 - 1 / sum(LENGTHS), abs=1e-4)
    assert figures["problem"] == found.problem()
    assert found.problem() is not None


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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({"vocab_size": 400}, "a vocabulary of 400 ids, the dataset has 512", id="narrower vocabulary"),
        pytest.param({"num_hidden_layers": 3}, "weights are missing or of another shape", id="missing weights"),
        pytest.param({"intermediate_size": 128}, "weights are missing or of another shape", id="wrong shape"),
        pytest.param({"model_type": "none"}, "cannot load the model's config", id="unknown architecture"),
        pytest.param({"quantization_config": {"quant_method": "fp8"}}, "quantised", id="quantised"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    make_completion: Callable[..., Completion],
    write_rows: Callable[..., Path],
    changed_model: Callable[..., Path],
    changes: dict[str, Any],
    problem: str,
) -> None:
    """In one line, and before it runs: made-up weights would give made-up figures."""
    directory = write_rows([make_completion(index, 0) for index in range(2)])
    with pytest.raises(UsageError, match=problem) as error:
        recompute(directory, str(changed_model(**changes)))
    assert "\n" not in str(error.value)
    assert "--recompute" in str(error.value)


def test_damaged_weights_are_refused(
    make_completion: Callable[..., Completion], write_rows: Callable[..., Path], changed_model: Callable[..., Path]
) -> None:
    """A file that ends too early."""
    model = changed_model()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot load the model"):
        recompute(write_rows([make_completion(index, 0) for index in range(2)]), str(model))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param({"model": "./none"}, r"\./none: no such model directory; check --recompute", id="no model"),
        pytest.param({"limit": 0}, "limit: must be 1 sample or more", id="no samples"),
        pytest.param({"device": "gpu"}, "--device: 'gpu' cannot be used here", id="unknown device"),
        pytest.param({"device": "meta:0:0"}, "--device: 'meta:0:0' cannot be used here", id="no device"),
    ],
)
def test_wrong_arguments(
    make_completion: Callable[..., Completion],
    write_rows: Callable[..., Path],
    tiny_model: Path,
    arguments: dict[str, Any],
    problem: str,
) -> None:
    """Each names what to change."""
    directory = write_rows([make_completion(index, 0) for index in range(2)])
    with pytest.raises(UsageError, match=problem):
        recompute(directory, **({"model": str(tiny_model)} | arguments))


def test_nothing_to_recompute(
    make_completion: Callable[..., Completion], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """Every row is unreplayable."""
    rows = [make_completion(index, 0, replayable=False) for index in range(2)]
    with pytest.raises(UsageError, match="no sample to recompute: it has 2, and none can be replayed"):
        recompute(write_rows(rows), str(tiny_model))


def test_other_dtypes_are_refused(
    make_completion: Callable[..., Completion], write_rows: Callable[..., Path], tiny_model: Path
) -> None:
    """What stands in a manifest is looked up, and never evaluated."""
    directory = write_rows([make_completion(index, 0) for index in range(2)], dtype="load")
    with pytest.raises(UsageError, match="dtype 'load' cannot be recomputed, only of float32, bfloat16, float16"):
        recompute(directory, str(tiny_model))


@pytest.mark.parametrize("column", ["prompt_token_ids", "token_ids"])
def test_ids_outside_the_vocabulary_are_damage(
    make_row: Callable[..., Row], write_rows: Callable[..., Path], tiny_model: Path, column: str
) -> None:
    """On a GPU the model would trip an assertion that ends the process."""
    rows = [make_row(index, length).completion for index, length in enumerate(LENGTHS)]
    ids = getattr(rows[4], column).copy()
    ids[-1] = VOCAB_SIZE
    rows[4] = replace(rows[4], **{column: ids})
    with pytest.raises(DatasetError, match="'p4', sample 0: a token id is outside the model's vocabulary of 512"):
        recompute(write_rows(rows), str(tiny_model))


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
