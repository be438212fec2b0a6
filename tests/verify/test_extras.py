"""Each single thing that can be wrong with stored weights and experts is found, in its row and in no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from models.plain_rows import LAYOUTS

from rollgen.format.columns import build_table
from rollgen.format.journal import list_shards
from rollgen.format.manifest import Manifest, read_manifest, replace_manifest
from rollgen.format.schema import shard_schema
from rollgen.rollouts import Completion
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.extras import check_extras

SCHEMA = shard_schema(support_logprobs=False, weight_versions=True, routed_experts=True)
IDS = 6
"""Numbers of a token: 3 layers, 2 experts each, of 8."""
ROW = 2
"""The row that is changed: prompt 2, so 3 tokens and 6 more, 8 positions."""


@pytest.fixture
def table(make_completion: Callable[..., Completion]) -> pa.Table:
    """Four rows of 6 tokens, each of weights that change at token 3."""
    return build_table([make_completion(index, 0, tokens=6, extras=True) for index in range(4)], SCHEMA)


@pytest.fixture
def manifest(make_manifest: Callable[..., Manifest]) -> Manifest:
    """That says so."""
    return make_manifest(extras=True)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sound_rows_are_passed(table: pa.Table, manifest: Manifest, layout: Any) -> None:
    """However they are cut into chunks; none, too."""
    assert list(check_extras(layout(table), manifest)) == []
    assert list(check_extras(table.slice(0, 0), manifest)) == []


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "versions too few": ({"weight_versions": ["a"]}, "lengths", "weight_version_starts has another length"),
    "an empty version": ({"weight_versions": ["a", ""]}, "extras", "a weight version is empty"),
    "no versions": ({"weight_versions": [], "weight_version_starts": []}, "extras", "do not start at 0"),
    "a late start": ({"weight_version_starts": [1, 3]}, "extras", "do not start at 0 and rise"),
    "a fall": ({"weight_version_starts": [0, 0]}, "extras", "do not start at 0 and rise"),
    "beyond the tokens": ({"weight_version_starts": [0, 6]}, "extras", "rise below the tokens"),
    "a negative start": ({"weight_version_starts": [-1, 0]}, "extras", "do not start at 0"),
    "a position short": ({"routed_experts": [1] * 7 * IDS}, "lengths", "not 6 for each token of prompt and response"),
    "a position more": ({"routed_experts": [1] * 9 * IDS}, "lengths", "not 6 for each token of prompt and response"),
    "beyond the experts": ({"routed_experts": [8] * 8 * IDS}, "extras", "a number of an expert is not below 8"),
    "a negative expert": ({"routed_experts": [-1] * 8 * IDS}, "extras", "or negative"),
    "none recorded": ({"routed_experts": [1] * 7 * IDS + [0] * IDS}, "extras", "expert 0 alone in all layers"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("changes", "kind", "problem"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_found(
    table: pa.Table, manifest: Manifest, layout: Any, changes: dict[str, Any], kind: str, problem: str
) -> None:
    """One row of four, as one violation."""
    rows = table.to_pylist()
    rows[ROW] |= changes
    changed = layout(pa.Table.from_pylist(rows, SCHEMA))
    (violation,) = check_extras(changed, manifest)
    assert (violation.kind, violation.row, violation.token, violation.count) == (kind, ROW, None, 1)
    assert problem in violation.problem


def test_zeros_are_experts_where_each_token_has_one(table: pa.Table, manifest: Manifest) -> None:
    """With top_k 1, expert 0 in all layers is as good as any."""
    rows = [row | {"routed_experts": [0] * (row["prompt_length"] + 5) * 3} for row in table.to_pylist()]
    of_one = manifest.model_copy(update={"routed_experts": manifest.routed_experts.model_copy(update={"top_k": 1})})
    assert list(check_extras(pa.Table.from_pylist(rows, SCHEMA), of_one)) == []


def test_a_dataset_with_them_is_clean(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """As the writer writes it."""
    assert verify_dataset(make_dataset(tmp_path / "run", extras=True)).is_clean


@pytest.mark.parametrize("column", ["weight_versions", "routed_experts"])
@pytest.mark.parametrize("extras", [False, True])
def test_manifest_and_shards_contradict(
    tmp_path: Path, make_dataset: Callable[..., Path], make_manifest: Callable[..., Manifest], column: str, extras: bool
) -> None:
    """A column that one has and the other one has not."""
    directory = make_dataset(tmp_path / "run", extras=extras)
    claimed = {column: getattr(make_manifest(extras=not extras), column)}
    replace_manifest(directory, read_manifest(directory).model_copy(update=claimed))
    verification = verify_dataset(directory)
    assert {(finding.kind, finding.file) for finding in verification.findings} == {
        ("footer", f"data/{path.name}") for path in list_shards(directory)
    }
    assert all(f"the column {column}" in finding.problem for finding in verification.findings)


def test_an_older_minor_has_none(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Format 1.1 says nothing of weights and experts."""
    directory = make_dataset(tmp_path / "run", extras=True)
    replace_manifest(directory, read_manifest(directory).model_copy(update={"format_version": "1.1"}))
    problems = [finding.problem for finding in verify_dataset(directory).findings if finding.kind == "manifest"]
    assert problems == ["there are weight versions or routed experts, which format 1.1 has not"]


def test_the_experts_of_a_long_row_are_not_those_of_the_next(
    make_completion: Callable[..., Completion], manifest: Manifest
) -> None:
    """The first token of a row is where the one before ends."""
    rows = [make_completion(index, 0, tokens=2, extras=True) for index in range(3)]
    experts = rows[1].routed_experts
    assert experts is not None
    rows[1] = replace(rows[1], routed_experts=np.concatenate([np.zeros_like(experts[:1]), experts[1:]]))
    (violation,) = check_extras(build_table(rows, SCHEMA), manifest)
    assert violation.row == 1
