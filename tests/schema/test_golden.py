"""Every reader finds in the golden datasets what is written beside them, and their script still makes them."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
import shutil
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from models.row_readers import (
    read_with_duckdb,
    read_with_polars,
    read_with_pyarrow,
    read_with_pyarrow_dataset,
    read_with_rollgen,
)

from rollgen.format.failures import read_failures
from rollgen.format.invariants import find_problem
from rollgen.format.keys import read_rows
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import open_dataset, verify_shard
from rollgen.format.retries import read_retries
from rollgen.format.rewards import rewards_in_force, stored_checksums
from rollgen.inspect.stats import stats_of
from rollgen.loader.dataset import RolloutDataset

CONFORMANCE = Path(__file__).parents[2] / "schema" / "conformance"
GOLDEN = CONFORMANCE / "golden"
SPEC = (CONFORMANCE.parent / "SPEC.md").read_text(encoding="utf-8")
FIRST = ("masks", "support_logprobs")
"""Of format 1.0, without generations."""
NAMES = (*FIRST, "generations", "extras", "rewards")


def expected(name: str) -> dict[str, Any]:
    return dict(json.loads((GOLDEN / f"{name}.expected.json").read_text(encoding="utf-8")))


def current_rows(name: str) -> list[dict[str, Any]]:
    superseded = expected(name).get("superseded", [])
    return [row for place, row in enumerate(expected(name)["rows"]) if place not in superseded]


@pytest.fixture(scope="session")
def script() -> dict[str, Any]:
    """The names of `make_golden.py`."""
    return runpy.run_path(str(CONFORMANCE / "make_golden.py"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("read", [read_with_pyarrow, read_with_pyarrow_dataset, read_with_polars, read_with_duckdb])
def test_reader_finds_the_expected_rows(read: Any, name: str) -> None:
    """All columns of all rows, exactly: ids, float32 values, nulls, NUL and emoji."""
    assert read(GOLDEN / name) == expected(name)["rows"]


@pytest.mark.parametrize("name", NAMES)
def test_rollgen_finds_the_expected_rows(name: str) -> None:
    """The same; rows of 1.0 are those of generation 0."""
    assert read_with_rollgen(GOLDEN / name) == [{"generation": 0} | row for row in expected(name)["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_plan_is_as_expected(name: str) -> None:
    """Tombstone included."""
    assert pq.read_table(GOLDEN / name / "plan.parquet").to_pylist() == expected(name)["plan"]


@pytest.mark.parametrize("name", NAMES)
def test_loader_finds_the_expected_samples(name: str) -> None:
    """Tensors hold what the current rows say; a null support is a row of length 0."""
    dataset = RolloutDataset(GOLDEN / name, allow_unreplayable=True)
    rows = current_rows(name)
    assert len(dataset) == len(rows)
    for rollout, row in zip((dataset[i] for i in range(len(dataset))), rows, strict=True):
        key = (row["prompt_id"], row["sample_index"], row.get("generation", 0))
        assert (rollout.prompt_id, rollout.sample_index, rollout.generation) == key
        assert rollout.token_ids.tolist() == row["token_ids"]
        assert rollout.logprobs.tolist() == row["logprobs"]
        offsets = rollout.support.offsets.tolist()
        ids = [rollout.support.ids[a:b].tolist() or None for a, b in itertools.pairwise(offsets)]
        assert ids == row["sampling_mask"]


def test_loader_finds_weights_and_experts() -> None:
    """Spans as they are stored, and tensors of the shape that the manifest says."""
    dataset = RolloutDataset(GOLDEN / "extras", allow_unreplayable=True, routed_experts=True)
    for index, row in enumerate(expected("extras")["rows"]):
        rollout = dataset[index]
        assert rollout.weight_versions == (tuple(row["weight_versions"]), tuple(row["weight_version_starts"]))
        assert rollout.routed_experts is not None
        assert rollout.routed_experts.shape == (row["prompt_length"] + row["response_length"] - 1, 3, 2)
        assert rollout.routed_experts.flatten().tolist() == row["routed_experts"]


@pytest.mark.parametrize("name", NAMES)
def test_shards_agree_with_the_journal(name: str) -> None:
    """Sizes, footers, digests and every page."""
    dataset = open_dataset(GOLDEN / name)
    assert len(dataset.shards) == (3 if name == "generations" else 2)
    for shard in dataset.shards:
        verify_shard(shard.path, line=shard.line, config_digest=dataset.manifest.config_digest)


@pytest.mark.parametrize("name", [*FIRST, "extras", "rewards"])
def test_what_is_owed(name: str) -> None:
    """Six planned samples, five stored; the stored one's failure line and the tombstone's count for nothing."""
    stats = stats_of(open_dataset(GOLDEN / name))
    assert stats.plan is not None
    assert (stats.plan.owed, stats.plan.retries) == (len(expected(name)["owed"]), 0) == (1, 0)
    assert stats.failures.by_stage == {"engine": 1, "input": 1}


def test_what_is_owed_of_a_retry() -> None:
    """All six planned samples are stored; of the two that are made again one is, and the other one failed."""
    stats = stats_of(open_dataset(GOLDEN / "generations"))
    assert stats.plan is not None
    assert (stats.plan.owed, stats.plan.retries, stats.plan.retries_owed) == (0, 2, 1)
    assert stats.failures.by_stage == {"engine": 1, "input": 1}
    assert (stats.samples.samples, stats.samples.superseded) == (6, 1)


def test_retry_list_is_as_expected() -> None:
    """As every Parquet reader sees it, and as rollgen does: it agrees with the manifest."""
    rows = expected("generations")["retries"]
    assert pq.read_table(GOLDEN / "generations" / "retry-1.parquet").to_pylist() == rows
    (retries,) = read_retries(GOLDEN / "generations", read_manifest(GOLDEN / "generations"))
    assert retries.max_tokens.tolist() == [row["max_tokens"] for row in rows]


def test_all_generations_on_request() -> None:
    """In the order of the shards, superseded rows included."""
    dataset = RolloutDataset(GOLDEN / "generations", allow_unreplayable=True, all_generations=True)
    rows = expected("generations")["rows"]
    assert [dataset[i].token_ids.tolist() for i in range(len(dataset))] == [row["token_ids"] for row in rows]


def rewards_by_the_spec(directory: Path, name: str) -> dict[str, dict[tuple[int, int, int], Any]]:
    """By column and key, as section 14 of the specification says, with pyarrow alone."""
    files = sorted((directory / "rewards").glob(f"{name}-*.parquet"))
    tables = [pq.read_table(file, page_checksum_verification=True) for file in files]
    records = [json.loads(table.schema.metadata[b"rollgen.rewards"]) for table in tables]
    closed = [record["scoring"] for record in records if record["closes"]]
    scoring = max(closed) if closed else min(record["scoring"] for record in records)
    tokens = {(row["prompt_index"], row["sample_index"], 0): row["token_ids"] for row in read_with_pyarrow(directory)}
    found: dict[str, dict[tuple[int, int, int], Any]] = {}
    for table, record in zip(tables, records, strict=True):
        if record["scoring"] != scoring:
            continue
        for row in table.to_pylist():
            key = (row["prompt_index"], row["sample_index"], row["generation"])
            stands = row["tokens_crc32"] == zlib.crc32(np.array(tokens[key], "<i4").tobytes())
            for column in ("reward", *record["columns"]):
                found.setdefault(column, dict.fromkeys(tokens))
            for column in found:
                found[column][key] = row.get(column) if stands else None
    return found


@pytest.mark.parametrize("name", ["correct", "other"])
def test_rewards_are_as_expected(name: str) -> None:
    """Those in force, of tokens that are stored: as rollgen reads them, and as the specification says."""
    directory, wanted = GOLDEN / "rewards", expected("rewards")["rewards"][name]
    dataset = open_dataset(directory)
    rewards = rewards_in_force(directory, name, dataset.manifest.config_digest, None)
    found = rewards.of(read_rows(dataset.shards).keys, stored_checksums(dataset.shards))
    nulls = {column: [None if math.isnan(value) else value for value in values] for column, values in found.items()}
    assert nulls == wanted
    by_the_spec = rewards_by_the_spec(directory, name)
    assert {column: list(values.values()) for column, values in by_the_spec.items()} == wanted


def examples(language: str) -> list[str]:
    """The fenced examples of the specification."""
    return re.findall(rf"```{language}\n(.*?)```", SPEC, flags=re.DOTALL)


def by_key(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((row["prompt_id"], row["sample_index"], row["generation"], row["token_ids"]) for row in rows)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """The same rows as in `generations`, their first shards as 1.0 wrote them."""
    directory = tmp_path / "mixed"
    shutil.copytree(GOLDEN / "generations" / "data", directory / "data")
    for number in range(2):
        path = directory / "data" / f"part-w0-{number:06d}.parquet"
        pq.write_table(pq.read_table(path).drop_columns("generation"), path)
    (directory / "data" / "part-w0-000002.parquet").rename(directory / "data" / "part-w0-000009.parquet")
    return directory


def test_sql_of_the_spec(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the current rows, also where some shards have no generation."""
    (query,) = examples("sql")
    wanted = by_key(current_rows("generations"))
    for directory in (GOLDEN / "generations", mixed):
        monkeypatch.chdir(directory)
        found = duckdb.sql(query).fetchall()
        names = duckdb.sql(query).columns
        rows = [{**dict(zip(names, row, strict=True))} for row in found]
        assert by_key([row | {"generation": row["generation"] or 0} for row in rows]) == wanted


def test_polars_of_the_spec(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain example, and the one for a dataset that was begun as 1.0 in front of its last line."""
    plain, older = examples("python")
    scan, keep = plain.strip().splitlines()
    for directory, code in ((GOLDEN / "generations", f"{scan}\n{keep}"), (mixed, f"{older}{keep}")):
        monkeypatch.chdir(directory)
        names: dict[str, Any] = {"pl": pl}
        exec(code, names)
        assert by_key(names["current"].collect().to_dicts()) == by_key(current_rows("generations"))


def test_golden_samples_hold_the_invariants(script: dict[str, Any]) -> None:
    """What the format demands of every row."""
    for golden in script["datasets"]().values():
        assert {find_problem(completion, script["VOCAB_SIZE"]) for completion in golden.rows} == {None}


def test_script_makes_the_same_values(script: dict[str, Any], tmp_path: Path) -> None:
    """Values and schemas; bytes may change with the Parquet library, and keys with the MINOR that writes them."""
    script["write_golden"](tmp_path)
    for path in sorted(GOLDEN.rglob("*.*")):
        if path.relative_to(GOLDEN).parts[0].partition(".")[0] == "runs":  # of a script of its own
            continue
        made = tmp_path / path.relative_to(GOLDEN)
        if path.suffix == ".parquet":
            assert pq.read_table(made).equals(pq.read_table(path), check_metadata=True), path
        elif path.name == "rollgen.json":
            assert read_manifest(made.parent) == read_manifest(path.parent)
        elif path.parent.name == "failures":
            assert list(read_failures(made.parents[1])) == list(read_failures(path.parents[1]))
        elif path.parent.name != "journal":
            assert made.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path


def test_golden_is_small() -> None:
    """It lives in the repository."""
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 250_000
