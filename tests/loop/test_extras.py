"""Runs of engines that tell of their weights and experts: what a dataset stores is settled by its first start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from models.fake_engine import FakeEngine
from models.runs import Runs, keys

from rollgen.engines.base import Extras, SampleRequest
from rollgen.errors import ResumeRefused
from rollgen.format.manifest import RoutedExperts, read_manifest
from rollgen.format.schema import FORMAT_VERSION
from rollgen.rollouts import Completion, WeightVersions
from rollgen.verify.dataset import verify_dataset

ALL = Extras(True, RoutedExperts(layers=2, top_k=1, experts=4))


class TellingEngine(FakeEngine):
    """Every completion has what `extras` say."""

    def __init__(self, extras: Extras) -> None:
        super().__init__()
        self.extras = extras

    async def sample(self, request: SampleRequest) -> Completion:
        made = await super().sample(request)
        positions = len(made.prompt_token_ids) + len(made.token_ids) - 1
        experts = self.extras.routed_experts and np.full((positions, 2, 1), request.sample_index, np.int16)
        versions = WeightVersions(("step 1",), (0,)) if self.extras.weight_versions else None
        return replace(made, weight_versions=versions, routed_experts=experts)


@pytest.mark.parametrize("extras", [Extras(), Extras(True), ALL], ids=["nothing", "versions", "all"])
def test_a_new_dataset_stores_what_the_engine_tells(runs: Runs, extras: Extras) -> None:
    """The manifest says so, every shard has the columns, and all of it is sound."""
    runs(TellingEngine(extras))
    manifest = read_manifest(runs.out)
    assert (manifest.format_version, Extras.of(manifest)) == (FORMAT_VERSION, extras)
    names = pq.read_schema(next((runs.out / "data").glob("*.parquet"))).names
    assert ("weight_versions" in names, "weight_version_starts" in names) == (extras.weight_versions,) * 2
    assert ("routed_experts" in names) == (extras.routed_experts is not None)
    assert verify_dataset(runs.out).is_clean


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        pytest.param(Extras(), "weight versions", id="nothing"),
        pytest.param(Extras(True), "routed experts, 1 in each of 2 layers", id="no experts"),
        pytest.param(
            Extras(True, RoutedExperts(layers=3, top_k=1, experts=4)),
            "routed experts, 1 in each of 2",
            id="other layers",
        ),
    ],
)
def test_an_engine_that_lacks_some_is_refused(runs: Runs, lacking: Extras, named: str) -> None:
    """Before it makes anything."""
    runs(TellingEngine(ALL), limit=1)
    with pytest.raises(ResumeRefused, match=f"stores {named}.*, which the engine here does not return"):
        runs(TellingEngine(lacking), resume=True)
    assert runs.engine.asked == []
    runs(TellingEngine(ALL), resume=True)
    assert sorted(runs.stored()) == keys(5, 2)


def test_what_an_engine_tells_beyond_that_is_left_out(runs: Runs) -> None:
    """A dataset that began without stays so: all its shards have the same columns."""
    runs(limit=1)
    runs(TellingEngine(ALL), resume=True)
    assert runs.engine.extras == Extras()  # so that it need not read them, nor fail for them
    schemas = {tuple(pq.read_schema(path).names) for path in (runs.out / "data").glob("*.parquet")}
    assert len(schemas) == 1
    assert sorted(runs.stored()) == keys(5, 2)
    assert verify_dataset(runs.out).is_clean
