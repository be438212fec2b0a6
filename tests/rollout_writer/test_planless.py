"""A loop that is not ours whose prompts come one by one: its requests are checked like rows, and known by their ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.outputs import plain
from models.runs import Runs
from models.writers import Open, ids, table

from rollgen.errors import ResumeRefused, UsageError
from rollgen.format.manifest import read_manifest
from rollgen.inspect.status import run_status
from rollgen.prompts.single import id_number
from rollgen.rollouts import sample_seed


def test_planless_is_continued(runs: Runs, planless: Open) -> None:
    """No plan, nothing owed; what is stored is known after a restart; seeds and numbers derive from the id."""
    with planless() as writer:
        request = writer.request("a", [1], 3)
        assert not writer.is_stored("a", 3)
        writer.add(request, plain(request))
        assert writer.is_stored("a", 3)
    assert not (runs.out / "plan.parquet").exists()
    with planless(writer="other") as writer:
        assert (writer.is_stored("a", 3), writer.is_stored("a"), writer.is_stored("b", 3)) == (True, False, False)
        with pytest.raises(UsageError, match=r"^\(a, 3\) is stored already"):
            writer.request("a", [1], 3)
        request = writer.request("b", [2])
        writer.add(request, plain(request))
    rows = table(runs.out).to_pylist()
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == [("a", 3), ("b", 0)]
    assert [row["seed"] for row in rows] == [sample_seed(0, "a", 3), sample_seed(0, "b", 0)]
    # 63 bits of sha256("a") = ca978112ca1bbdca...: the first 8 bytes shifted right by one bit.
    assert rows[0]["prompt_index"] == id_number("a") == 0xCA978112CA1BBDCA >> 1
    assert len(read_manifest(runs.out).attempts) == 2


def test_many_short_samples(planless: Open, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some 100 kB in all. 200 times what a dictionary holds is up to 800 kB, 200 times all of them twice as much."""
    monkeypatch.setattr("rollgen.format.parquet.MAX_DECODED_BYTES", 1_000_000)
    with planless() as writer:
        for number in range(200):
            request = writer.request(f"p{number}", [1], prompt=f"What is {number}?", metadata={"answer": number})
            writer.add(request, plain(request))
    assert len(ids(runs.out)) == 200


def test_given_numbers_are_kept(runs: Runs, planless: Open) -> None:
    """A seed of the loop's own, sampling of the request's own, max_tokens clamped to the context."""
    with planless() as writer:
        request = writer.request("a", [1] * 250, seed=7, temperature=0.5, top_k=4, stop="x")
        assert request.sampling_params == {
            "seed": 7,
            "temperature": 0.5,
            "top_p": 0.95,
            "top_k": 4,
            "min_p": 0.0,
            "max_tokens": 6,  # of a context of 256
            "stop": ["x"],
            "stop_token_ids": [],
        }
        writer.add(request, plain(request))
    [row] = table(runs.out).to_pylist()
    assert (row["seed"], row["temperature"], row["top_k"]) == (7, 0.5, 4)
    status = run_status(runs.out)
    assert (status.planned, status.owed, status.stored, status.state) == (None, None, 1, "stopped")


def test_each_way_has_its_own_methods(planned: Open, planless: Open) -> None:
    """And a dataset is of one kind for good."""
    with planned() as writer:
        for call in (lambda: writer.request("a", [1]), lambda: writer.is_stored("a"), lambda: writer.owns("a")):
            with pytest.raises(UsageError, match="this dataset has a plan; take requests from owed"):
                call()
    with pytest.raises(ResumeRefused, match="has a plan; give the prompts"):
        planless()


def test_planless_has_no_owed(runs: Runs, planned: Open, planless: Open) -> None:
    """Nor can it be planned later, by a loop or by the command."""
    with planless() as writer, pytest.raises(UsageError, match="owed: nothing is owed without a plan"):
        writer.owed()
    with pytest.raises(ResumeRefused, match="has no plan: its prompts came one by one"):
        planned()
    with pytest.raises(ResumeRefused, match="has no plan"):
        runs(resume=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"prompt_id": ""}, "prompt_id must be a non-empty string, got ''"),
        ({"prompt_id": 7}, "prompt_id must be a non-empty string, got 7"),
        ({"prompt_id": "\ud800"}, "prompt_id holds half of a surrogate pair"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [512]}, "id 512 is outside the model's vocabulary, 0 to 511"),
        ({"prompt_token_ids": [-1]}, "id -1 is outside the model's vocabulary"),
        ({"prompt_token_ids": [1.5]}, "must be a list of whole numbers"),
        ({"prompt_token_ids": [[1], [2, 3]]}, "must be a list of whole numbers"),
        ({"prompt_token_ids": [1] * 256}, "the prompt fills the context: 256 tokens of 256"),
        ({"sample_index": -1}, "sample_index must be a whole number from 0 to 2147483647, got -1"),
        ({"sample_index": 2**31}, "sample_index must be a whole number"),
        ({"seed": 2**63}, "seed must be a whole number from 0 to 9223372036854775807"),
        ({"metadata": {"a": object()}}, "metadata: a: a object is not a JSON value"),
        ({"metadata": {"a": float("nan")}}, "metadata: NaN is not JSON (in a)"),
        ({"metadata": {1: 0, "1": 0}}, "key 1 is not text"),
        ({"prompt": 7}, "prompt must be a string, got 7"),
        ({"temperature": 0}, "temperature must be a number above 0"),
        ({"temperature": np.float32(3)}, "temperature must be a number above 0"),
        ({"top_k": 0, "top_p": 0.5}, "top_p and min_p need a top_k"),
        ({"stop_token_ids": [999]}, "id 999 is outside"),
        ({"n": 2}, "n is not a sampling parameter of a request"),
        ({"presence_penalty": 1.0}, "presence_penalty is not a sampling parameter of a request"),
    ],
)
def test_requests_are_checked_like_rows(planless: Open, arguments: dict[str, Any], expected: str) -> None:
    """What no prompt file could hold makes no request."""
    with planless() as writer, pytest.raises(UsageError) as raised:
        writer.request(**({"prompt_id": "a", "prompt_token_ids": [1]} | arguments))
    assert expected in str(raised.value)


def test_all_problems_of_a_request_come_together(planless: Open) -> None:
    """One error, one line."""
    with planless() as writer, pytest.raises(UsageError) as raised:
        writer.request("a", [], top_k=-7, prompt=3)
    assert str(raised.value).startswith("prompt 'a': prompt must be a string, got 3; prompt_token_ids is empty; top_k ")


def test_arrays_are_token_ids_too(planless: Open) -> None:
    """Of any integer dtype."""
    with planless() as writer:
        request = writer.request("a", np.array([1, 2], np.uint16))
    assert request.prompt.token_ids.dtype == np.int32
    assert request.prompt.token_ids.tolist() == [1, 2]


def test_a_dataset_that_never_truncates_takes_no_support(planless: Open) -> None:
    """Its manifest says that all supports are null; more samples without truncation are welcome."""
    with planless(top_k=0, top_p=1.0) as writer:
        with pytest.raises(UsageError, match="this dataset began without top_k, top_p and min_p"):
            writer.request("a", [1], top_k=5)
        request = writer.request("a", [1])
        writer.add(request, plain(request))
