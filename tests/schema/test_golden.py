"""Every reader finds in the golden datasets what is written beside them, and their script still makes them."""

from __future__ import annotations

import itertools
import json
import runpy
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from rollgen.format.invariants import find_problem
from rollgen.format.reader import open_dataset, read_row_group, verify_shard
from rollgen.inspect.stats import dataset_stats
from rollgen.loader.dataset import RolloutDataset

CONFORMANCE = Path(__file__).parents[2] / "schema" / "conformance"
GOLDEN = CONFORMANCE / "golden"
NAMES = ("masks", "support_logprobs")


def expected(name: str) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / f"{name}.expected.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def script() -> dict[str, Any]:
    """The names of `make_golden.py`."""
    return runpy.run_path(str(CONFORMANCE / "make_golden.py"))


def read_with_pyarrow(directory: Path) -> list[dict[str, Any]]:
    files = sorted((directory / "data").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, page_checksum_verification=True) for file in files]).to_pylist()


def read_with_pyarrow_dataset(directory: Path) -> list[dict[str, Any]]:
    return pa.dataset.dataset(directory / "data", format="parquet").to_table().to_pylist()


def read_with_polars(directory: Path) -> list[dict[str, Any]]:
    return pl.scan_parquet(directory / "data" / "*.parquet").collect().to_dicts()


def read_with_duckdb(directory: Path) -> list[dict[str, Any]]:
    query = duckdb.execute("from read_parquet(?) order by prompt_index, sample_index", [f"{directory}/data/*.parquet"])
    names = [column[0] for column in query.description]
    return [dict(zip(names, row, strict=True)) for row in query.fetchall()]


def read_with_rollgen(directory: Path) -> list[dict[str, Any]]:
    rows = []
    for stored in open_dataset(directory).shards:
        with stored.open() as shard:
            for index in range(len(shard.row_group_rows)):
                rows += read_row_group(shard, index).to_pylist()
    return rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "read", [read_with_pyarrow, read_with_pyarrow_dataset, read_with_polars, read_with_duckdb, read_with_rollgen]
)
def test_reader_finds_the_expected_rows(read: Any, name: str) -> None:
    """All columns of all rows, exactly: ids, float32 values, nulls, NUL and emoji."""
    assert read(GOLDEN / name) == expected(name)["rows"]


@pytest.mark.parametrize("name", NAMES)
def test_plan_is_as_expected(name: str) -> None:
    """Tombstone included."""
    assert pq.read_table(GOLDEN / name / "plan.parquet").to_pylist() == expected(name)["plan"]


@pytest.mark.parametrize("name", NAMES)
def test_loader_finds_the_expected_samples(name: str) -> None:
    """Tensors hold what the rows say; a null support is a row of length 0."""
    dataset = RolloutDataset(GOLDEN / name, allow_unreplayable=True)
    rows = expected(name)["rows"]
    assert len(dataset) == len(rows)
    for rollout, row in zip((dataset[i] for i in range(len(dataset))), rows, strict=True):
        assert (rollout.prompt_id, rollout.sample_index) == (row["prompt_id"], row["sample_index"])
        assert rollout.token_ids.tolist() == row["token_ids"]
        assert rollout.logprobs.tolist() == row["logprobs"]
        offsets = rollout.support.offsets.tolist()
        ids = [rollout.support.ids[a:b].tolist() or None for a, b in itertools.pairwise(offsets)]
        assert ids == row["sampling_mask"]


@pytest.mark.parametrize("name", NAMES)
def test_shards_agree_with_the_journal(name: str) -> None:
    """Sizes, footers, digests and every page."""
    dataset = open_dataset(GOLDEN / name)
    assert [shard.path.name for shard in dataset.shards] == ["part-w0-000000.parquet", "part-w0-000001.parquet"]
    for shard in dataset.shards:
        verify_shard(shard.path, line=shard.line, config_digest=dataset.manifest.config_digest)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_owed(name: str) -> None:
    """Six planned samples, five stored; the stored one's failure line and the tombstone's count for nothing."""
    stats = dataset_stats(GOLDEN / name)
    assert stats.plan is not None
    assert stats.plan.owed == len(expected(name)["owed"]) == 1
    assert stats.failures.by_stage == {"engine": 1, "input": 1}


def test_golden_samples_hold_the_invariants(script: dict[str, Any]) -> None:
    """What the format demands of every row."""
    assert [find_problem(completion, script["VOCAB_SIZE"]) for completion in script["completions"]()] == [None] * 5


def test_script_makes_the_same_values(script: dict[str, Any], tmp_path: Path) -> None:
    """Values, schemas and text files; the bytes of a shard may change with the Parquet library."""
    script["write_golden"](tmp_path)
    for path in sorted(GOLDEN.rglob("*.*")):
        made = tmp_path / path.relative_to(GOLDEN)
        if path.suffix == ".parquet":
            assert pq.read_table(made).equals(pq.read_table(path), check_metadata=True), path
        elif path.parent.name != "journal":
            assert made.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path


def test_golden_is_small() -> None:
    """It lives in the repository."""
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 60_000
