"""Models, arguments and rows with which nothing can be recomputed: refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.sampled import LENGTHS, VOCAB_SIZE, Row

from rollgen.errors import DatasetError, UsageError
from rollgen.rollouts import Completion
from rollgen.verify.recompute import recompute


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
