"""Weight versions and experts of a loop that is not ours: stored from the first start, or never."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.outputs import plain
from models.runs import Runs
from models.writers import Open, table

from rollgen.engines.base import SampleRequest
from rollgen.errors import CaptureError, ResumeRefused, UsageError
from rollgen.verify.dataset import verify_dataset

SPAN = [{"version": "step 1", "start": 0}]
STORED = {"weight_versions": True, "routed_experts": (2, 1, 4)}
"""Two layers of four experts, one for each token."""


def told(request: SampleRequest) -> dict[str, Any]:
    """An output of an engine that says which weights and experts made it."""
    output = plain(request)
    tokens = len(output["token_ids"])
    experts = np.ones((len(request.prompt.token_ids) + tokens - 1, 2, 1), np.uint8)
    return output | {"weight_versions": [SPAN[0] | {"end": tokens}], "routed_experts": experts}


@pytest.mark.parametrize("kind", ["planned", "planless"])
def test_weights_and_experts_are_stored(runs: Runs, request: pytest.FixtureRequest, kind: str) -> None:
    """With a plan and without: columns of the dataset from its first start, also after it is opened again."""
    opener = request.getfixturevalue(kind)
    for part in range(2):
        with opener(**STORED) as writer:
            requests = list(writer.owed())[:5] if kind == "planned" else [writer.request(f"p{part}", [1, 2, 3])]
            for one in requests:
                writer.add(one, told(one))
    rows = table(runs.out).to_pylist()
    assert len(rows) == (10 if kind == "planned" else 2)
    for row in rows:
        assert (row["weight_versions"], row["weight_version_starts"]) == (["step 1"], [0])
        assert row["routed_experts"] == [1] * 2 * (row["prompt_length"] + row["response_length"] - 1)
    assert verify_dataset(runs.out).is_clean


@pytest.mark.parametrize("kind", ["planned", "planless"])
@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (STORED, {}, "stores weight versions, which the engine here does not return"),
        (STORED, {"weight_versions": True}, "stores routed experts, 1 in each of 2 layers, which the engine"),
        ({}, STORED, "stores no weight versions: it began without"),
        ({"weight_versions": True}, STORED, "stores no routed experts, 1 in each of 2 layers: it began without"),
    ],
)
def test_what_is_stored_does_not_change(
    request: pytest.FixtureRequest, kind: str, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    """A dataset is continued as it began."""
    opener = request.getfixturevalue(kind)
    with opener(**first):
        pass
    with pytest.raises(ResumeRefused, match=message):
        opener(**then)


def test_an_output_without_what_is_stored_is_a_failure(runs: Runs, planned: Open) -> None:
    """It stays owed, and the next one may be right."""
    with planned(**STORED) as writer:
        first, *_ = writer.owed()
        with pytest.raises(CaptureError, match="the dataset stores weight versions, but the output has none"):
            writer.add(first, plain(first))
        with pytest.raises(CaptureError, match=r"routed experts are \[1, 2, 1\], not"):
            writer.add(first, told(first) | {"routed_experts": [[[1], [1]]]})
        writer.add(first, told(first))
    assert len(table(runs.out)) == 1


@pytest.mark.parametrize("wrong", [(2, 1), (0, 1, 4), (2, 1, 1 << 16), "2,1,4", (2.0, 1, 4)])
def test_wrong_layouts_of_experts_are_refused(planned: Open, wrong: Any) -> None:
    """Three whole numbers."""
    with pytest.raises(UsageError, match=r"^routed_experts: .* is not \(layers, experts a token takes, experts of"):
        planned(routed_experts=wrong)
