"""Supports and log-probabilities that do not fit the model: recomputing them shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models.sampled import LENGTHS, VOCAB_SIZE, Row, log_softmax

from rollgen.rollouts import Completion
from rollgen.verify.recompute import describe, recompute


def _without_masks(row: Completion) -> Completion:
    """The same logprobs, said to be of the full vocabulary."""
    sampling = replace(row.sampling, top_k=0)
    return replace(row, mask_ids=row.mask_ids[:0], mask_offsets=np.zeros_like(row.mask_offsets), sampling=sampling)


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
        logprobs.append(float(log_softmax(of_mask[kept])[masks[-1] == token][0]))
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
