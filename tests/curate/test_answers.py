"""What a scoring function gets, and what its results come to."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from rollgen.curate.answers import Answer, Score, StoredAnswer, as_answers, as_scores, failed, listed
from rollgen.errors import UsageError


class Mute(Exception):
    """Whose text cannot be had."""

    def __str__(self) -> str:
        return {}["text"]


def stored(**changes: Any) -> StoredAnswer:
    row = StoredAnswer(
        prompt_id="p",
        prompt_index=3,
        sample_index=1,
        generation=0,
        tokens_crc32=5,
        prompt="What?",
        text="42",
        prompt_token_ids=np.array([1, 2], np.int32),
        token_ids=np.array([4, 2], np.int32),
        finish_reason="stop",
        stop_reason=None,
        max_tokens=8,
        metadata='{"answer": "42"}',
    )
    return row._replace(**changes)


def test_an_answer() -> None:
    """Plain values, metadata parsed."""
    assert as_answers([stored()]) == [
        Answer("p", 1, 0, "What?", "42", [1, 2], [4, 2], "stop", None, 8, {"answer": "42"}),
    ]


def test_metadata_is_parsed_once() -> None:
    """Samples of a prompt share it; without, it is empty."""
    first, second, none = as_answers([stored(), stored(sample_index=2), stored(metadata=None)])
    assert first.metadata is second.metadata
    assert none.metadata == {}


@pytest.mark.parametrize(
    ("results", "values"),
    [
        pytest.param([1.5, 0], [{"reward": 1.5}, {"reward": 0.0}], id="numbers"),
        pytest.param([True, False], [{"reward": 1.0}, {"reward": 0.0}], id="booleans"),
        pytest.param(np.array([0.5, 2], np.float32), [{"reward": 0.5}, {"reward": 2.0}], id="an array"),
        pytest.param(torch.tensor([0.5, 2]), [{"reward": 0.5}, {"reward": 2.0}], id="a tensor"),
        pytest.param([np.bool_(True), np.array(2)], [{"reward": 1.0}, {"reward": 2.0}], id="of NumPy"),
        pytest.param([3.4e38, -3.4e38], [{"reward": 3.4e38}, {"reward": -3.4e38}], id="the largest"),
        pytest.param((n for n in (1, 2)), [{"reward": 1.0}, {"reward": 2.0}], id="a generator"),
        pytest.param([{"reward": 1, "style": 0.5}, 3], [{"reward": 1.0, "style": 0.5}, {"reward": 3.0}], id="mappings"),
    ],
)
def test_results(results: object, values: list[dict[str, float]]) -> None:
    """They become plain floats, by name."""
    assert as_scores(listed(results, 2), 2) == [Score(each) for each in values]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        pytest.param(math.nan, "the function returned nan for 'reward', not a finite number", id="nan"),
        pytest.param(-math.inf, "the function returned -inf for 'reward', not a finite number", id="infinity"),
        pytest.param(None, "the function returned None for 'reward', not a number", id="none"),
        *[
            pytest.param(
                value, "the function returned a number for 'reward' that float32 cannot hold: beyond 3.4e38", id=name
            )
            for value, name in ((1e39, "large"), (-(10**5000), "beyond float64"))
        ],
        pytest.param(Mute(), "Mute: (what it says cannot be told: KeyError)", id="an exception that cannot be told"),
        pytest.param("1.0", "the function returned a value of type str for 'reward', not a number", id="text"),
        pytest.param(
            Decimal(1), "the function returned a value of type Decimal for 'reward', not a number", id="decimal"
        ),
        pytest.param(
            torch.ones(2), "the function returned a value of type Tensor for 'reward', not a number", id="tensor"
        ),
        pytest.param({"score": 1.0}, 'the function returned a mapping without "reward"', id="no reward"),
        pytest.param(
            {"reward": 1.0, "x": math.nan}, "the function returned nan for 'x', not a finite number", id="further"
        ),
        pytest.param(
            {"reward": 1.0, 7: 1.0}, "the function returned a mapping with a value of type int as a name", id="key"
        ),
        pytest.param(ValueError("no\nbox"), r"ValueError: no\nbox", id="exception"),
    ],
)
def test_a_wrong_result_costs_one_answer(result: object, error: str) -> None:
    """It says which, on one line; the others stand."""
    assert as_scores([1.0, result], 2) == [Score({"reward": 1.0}), Score(None, error)]


@pytest.mark.parametrize(
    ("results", "error"),
    [
        pytest.param([1.0], "returned 1 results for 2 answers", id="too few"),
        pytest.param([1.0] * 3, "returned more than 2 results for 2 answers", id="too many"),
        pytest.param(1.0, "returned a value of type float, not a list", id="a number"),
        pytest.param(None, "returned None, not a list", id="nothing"),
        pytest.param({"p": 1.0, "q": 2.0}, "returned a value of type dict, not a list", id="a mapping"),
        pytest.param("12", "returned a value of type str, not a list", id="a text"),
        pytest.param(bytearray(b"12"), "returned a value of type bytearray, not a list", id="bytes"),
        pytest.param({1.0, 0.0}, "returned a value of type set, not a list", id="a set, which has no order"),
        pytest.param(itertools.count(), "returned more than 2 results for 2 answers", id="no end"),
    ],
)
def test_results_that_cannot_be_told_apart(results: object, error: str) -> None:
    """Nothing is known of any answer."""
    with pytest.raises(UsageError, match=error):
        as_scores(listed(results, 2), 2)


def test_errors_are_fit_to_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brief, inert, without directories and secrets."""
    error = failed("\x1b[31m /home/me/secret/file.txt hf_abcdefghijklmnop " + "x" * 5000).error
    assert error is not None
    assert error.startswith(r"\x1b[31m file.txt (secret)")
    assert len(error) < 500
    monkeypatch.setenv("JUDGE_API_KEY", "correct horse battery staple")
    told = failed("x" * 290 + "correct horse battery staple" + "y" * 5000).error
    assert told is not None
    assert "$JUDGE" in told, "also where a text is cut: before that, and as the environment is now"
