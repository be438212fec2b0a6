"""Many short samples: what a shard of them comes to is far below what its dictionaries might be looked up for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.datasets import read_rows

from rollgen.config import digest
from rollgen.curate.compact import compact
from rollgen.curate.merge import merge
from rollgen.curate.score import score
from rollgen.format import parquet
from rollgen.format.manifest import PLANLESS, Manifest, ModelRecord
from rollgen.format.parquet import CheckedParquet
from rollgen.prompts.single import id_number
from rollgen.rollouts import Completion

SAMPLES = 400
LIMIT = 4_000_000
"""Bytes. They come to 100 kB; 400 times a dictionary is less, 400 times all of them is more."""


@pytest.fixture(autouse=True)
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Columns whose true size was asked for, where row groups have such a limit."""
    found: list[str] = []
    real = CheckedParquet._looked_up_bytes

    def noted(file: CheckedParquet, index: int, name: str) -> int:
        found.append(name)
        return real(file, index, name)

    monkeypatch.setattr(CheckedParquet, "_looked_up_bytes", noted)
    monkeypatch.setattr(parquet, "MAX_DECODED_BYTES", LIMIT)
    return found


@pytest.fixture
def make_run(
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_completion: Callable[..., Completion],
    store: Callable[..., Path],
) -> Callable[..., Path]:
    """`make_run(number, shards, samples=400)`: of two tokens, each of a prompt that no other has."""

    def make(number: int, shards: int, samples: int = SAMPLES) -> Path:
        identity = {PLANLESS: True, "seed": number}
        model = ModelRecord(name="m", revision=None, fingerprint=str(number), dtype="float32", context_length=256)
        manifest = make_manifest(identity=identity, config_digest=digest(identity), plan_sha256=None, model=model)
        rows = [make_completion(number * samples + prompt, tokens=2) for prompt in range(samples)]
        rows = [replace(row, prompt_index=id_number(row.prompt_id)) for row in rows]
        size = samples // shards
        return store(tmp_path / str(number), manifest, [rows[at : at + size] for at in range(0, samples, size)])

    return make


def test_they_are_committed(make_run: Callable[..., Path], looked_up: list[str]) -> None:
    """By a writer that reads its shard back."""
    assert len(read_rows(make_run(0, 1))) == SAMPLES
    assert looked_up


def test_they_are_compacted(make_run: Callable[..., Path], looked_up: list[str]) -> None:
    """Shards that are within all bounds become one that is not."""
    directory = make_run(0, 8)
    rows, before = read_rows(directory), len(looked_up)
    assert compact(directory).shards_after == 1
    assert len(looked_up) > before
    assert read_rows(directory) == rows


def test_they_are_merged(tmp_path: Path, make_run: Callable[..., Path], looked_up: list[str]) -> None:
    """The same of several runs."""
    sources = [make_run(number, 4, SAMPLES // 2) for number in range(2)]
    before = len(looked_up)
    assert merge(sources, tmp_path / "merged").samples == SAMPLES
    assert len(looked_up) > before


@pytest.fixture
def fails_in_many_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A scorer whose errors differ in each sample."""
    source = "def score(answers):\n    return [ValueError(f'no {answer.prompt_id}') for answer in answers]\n"
    (tmp_path / "scorers_that_fail.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "scorers_that_fail:score"
    sys.modules.pop("scorers_that_fail", None)


def test_they_are_scored(make_run: Callable[..., Path], looked_up: list[str], fails_in_many_ways: Any) -> None:
    """An error of each of them, told once."""
    directory = make_run(0, 8)
    before = len(looked_up)
    assert score(directory, fails_in_many_ways, processes=1).failed == SAMPLES
    assert len(looked_up) > before
