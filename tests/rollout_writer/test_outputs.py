"""What an engine of a loop that is not ours has answered: each shape is the same row, and what is none is owed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models.fake_engine import VOCAB_SIZE
from models.outputs import plain, sglang, vllm
from models.runs import Runs
from models.writers import Open, table

from rollgen.engines.base import SampleRequest
from rollgen.errors import CaptureError, IncompleteSupport, RollgenError, UnfitEngine, UsageError
from rollgen.format.failures import read_failures


@pytest.mark.parametrize("shape", [plain, sglang, vllm])
def test_every_shape_makes_the_same_row(runs: Runs, planless: Open, shape: Callable[[SampleRequest], object]) -> None:
    """Against the arrays that the shape was made of."""
    with planless() as writer:
        request = writer.request("a", [1, 2, 3], prompt="abc", metadata={"answer": 7})
        writer.add(request, shape(request))
    [row] = table(runs.out).to_pylist()
    expected = plain(request)
    assert row["token_ids"] == expected["token_ids"].tolist()
    assert row["sampling_mask"] == expected["mask_ids"].reshape(-1, 2).tolist()
    assert row["logprobs"] == expected["logprobs"].tolist()
    assert (row["prompt"], row["metadata"], row["prompt_token_ids"]) == ("abc", '{"answer": 7}', [1, 2, 3])


def test_several_sequences_of_one_output(runs: Runs, planless: Open) -> None:
    """They become consecutive samples, with the seeds that vLLM gives the children of a request: seed + j."""
    with planless() as writer:
        request = writer.request("a", [1], 2, seed=100)
        parts = [dataclasses.replace(request, given_seed=100 + j) for j in range(3)]
        writer.add(request, vllm(*parts))
    rows = table(runs.out).to_pylist()
    assert [(row["sample_index"], row["seed"]) for row in rows] == [(2, 100), (3, 101), (4, 102)]
    assert [row["token_ids"] for row in rows] == [plain(part)["token_ids"].tolist() for part in parts]


def test_several_sequences_of_a_planned_prompt(runs: Runs, planned: Open) -> None:
    """Only the first would have the seed of the plan, by which a retry finds its random stream again."""
    with planned() as writer:
        first = next(writer.owed())
        with pytest.raises(UsageError, match=r"an output of 2 sequences: .* one sample each"):
            writer.add(first, vllm(first, first))
    assert runs.stored() == []


@pytest.mark.parametrize(
    ("change", "kind", "expected"),
    [
        ({"finish_reason": "abort"}, CaptureError, "'abort' is not one of"),
        ({"token_ids": np.array([], np.int32)}, CaptureError, "no token was generated"),
        ({"mask_ids": np.array([1], np.int32), "mask_offsets": np.array([0, 1])}, CaptureError, "sampling masks of 1"),
    ],
    ids=["aborted", "empty", "misaligned"],
)
def test_refused_outputs_are_recorded_and_owed(
    runs: Runs, planned: Open, change: dict[str, Any], kind: type[RollgenError], expected: str
) -> None:
    """Nothing is stored of them; a failure line says why; the same request may be added when it is made again."""
    with planned(limit=1, n=1) as writer:
        [request] = writer.owed()
        with pytest.raises(kind, match=expected):
            writer.add(request, plain(request) | change)
        [failure] = read_failures(runs.out)
        assert (failure.prompt_id, failure.sample_index, failure.stage) == ("p0", 0, "capture")
        assert expected in failure.error
        assert runs.stored() == []
        writer.add(request, plain(request))
    assert runs.stored() == [(0, 0)]


def test_broken_invariants_are_refused(runs: Runs, planned: Open) -> None:
    """An id outside its support passes no writer."""
    with planned(limit=1, n=1) as writer:
        [request] = writer.owed()
        output = plain(request)
        with pytest.raises(CaptureError, match=r"\(p0, 0\): token 0: the sampled id \d+ is not in its support"):
            writer.add(request, output | {"token_ids": (output["token_ids"] + 2) % VOCAB_SIZE})
        [failure] = read_failures(runs.out)
        assert failure.stage == "invariant"


def test_incomplete_support_says_ask_again(runs: Runs, planned: Open) -> None:
    """With logprobs capture, a table whose last id is still finite is never taken for a whole support."""
    with planned(limit=1, n=1, capture="logprobs") as writer:
        [request] = writer.owed()
        half = np.log(0.5)
        most_likely = {5: half, 6: half}
        output = {"token_ids": [5], "logprobs": [most_likely], "finish_reason": "stop"}
        with pytest.raises(IncompleteSupport):
            writer.add(request, output)
        most_likely[7] = -np.inf
        writer.add(request, output)
    [row] = table(runs.out).to_pylist()
    assert row["sampling_mask"] == [[5, 6]]


def test_an_engine_without_masks_is_unfit(planned: Open) -> None:
    """Native capture, and no mask came: no row, whatever else is there."""
    with planned() as writer:
        request = next(iter(writer.owed()))
        with pytest.raises(UnfitEngine, match="returned no sampling mask although sampling truncates"):
            writer.add(request, {"token_ids": [5], "logprobs": [-0.5], "finish_reason": "stop"})
