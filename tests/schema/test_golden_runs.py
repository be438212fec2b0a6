"""Every reader finds in the golden dataset of several runs what is written beside it, and its script still makes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from models.row_readers import read_with_duckdb, read_with_polars, read_with_pyarrow, read_with_rollgen

from rollgen.format.invariants import find_problem
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import open_dataset
from rollgen.inspect.stats import stats_of
from rollgen.loader.dataset import RolloutDataset
from rollgen.verify.dataset import verify_dataset

CONFORMANCE = Path(__file__).parents[2] / "schema" / "conformance"
GOLDEN = CONFORMANCE / "golden" / "runs"
EXPECTED = CONFORMANCE / "golden" / "runs.expected.json"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The module `make_golden_runs`."""
    sys.path.insert(0, str(CONFORMANCE))
    try:
        import make_golden_runs

        yield make_golden_runs
    finally:
        sys.path.remove(str(CONFORMANCE))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What a reader must find."""
    return list(json.loads(EXPECTED.read_text(encoding="utf-8"))["rows"])


@pytest.mark.parametrize("read", [read_with_pyarrow, read_with_polars, read_with_duckdb, read_with_rollgen])
def test_reader_finds_the_expected_rows(read: Any, rows: list[dict[str, Any]]) -> None:
    """All columns of all rows, exactly, `run` among them."""
    assert read(GOLDEN) == rows


def test_loader_finds_the_expected_samples(rows: list[dict[str, Any]]) -> None:
    """Ids that are in both runs are other samples."""
    dataset = RolloutDataset(GOLDEN, allow_unreplayable=True)
    found = [dataset[index] for index in range(len(dataset))]
    keys = [(rollout.run, rollout.prompt_id, rollout.sample_index, rollout.token_ids.tolist()) for rollout in found]
    assert keys == [(row["run"], row["prompt_id"], row["sample_index"], row["token_ids"]) for row in rows]


def test_a_reader_of_1_2_still_finds_unique_keys(rows: list[dict[str, Any]]) -> None:
    """One that ignores `run`: by prompt_index, though not by prompt_id."""
    assert len({(row["prompt_index"], row["sample_index"], row["generation"]) for row in rows}) == len(rows)
    assert len({(row["prompt_id"], row["sample_index"], row["generation"]) for row in rows}) < len(rows)


def test_figures_and_verification() -> None:
    """Five samples of one run and two of the other; everything fits."""
    assert [(run.name, run.samples) for run in stats_of(open_dataset(GOLDEN)).runs] == [("base", 5), ("step-100", 2)]
    outcome = verify_dataset(GOLDEN)
    assert (outcome.findings, outcome.rows) == ((), 7)


def test_golden_samples_hold_the_invariants(script: ModuleType) -> None:
    """What the format demands of every row."""
    assert {find_problem(completion, 64) for completion in script.merged_completions()} == {None}


def test_script_makes_the_same_values(script: ModuleType, tmp_path: Path) -> None:
    """Values and schemas; bytes may change with the Parquet library, and keys with the MINOR that writes them."""
    script.write_golden_runs(tmp_path)
    assert (tmp_path / "runs.expected.json").read_text(encoding="utf-8") == EXPECTED.read_text(encoding="utf-8")
    assert read_manifest(tmp_path / "runs") == read_manifest(GOLDEN)
    for path in sorted(GOLDEN.glob("data/*.parquet")):
        assert pq.read_table(tmp_path / "runs" / "data" / path.name).equals(pq.read_table(path), check_metadata=True)
