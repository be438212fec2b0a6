"""Samples that were cut, made again as a new generation, with a fake engine that never ends by itself."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from models.fake_engine import FakeEngine
from models.runs import Runs, keys

from rollgen.engines.base import SampleRequest
from rollgen.errors import EngineError, ResumeRefused, UsageError
from rollgen.format.journal import list_shards
from rollgen.format.manifest import read_manifest
from rollgen.loader.dataset import RolloutDataset

RETRY = {"resume": True, "retry": "finish_reason=length"}


def rows(runs: Runs) -> list[tuple[int, int, int, str, int]]:
    """Of every stored row: key, finish reason and max_tokens."""
    names = ["prompt_index", "sample_index", "generation", "finish_reason", "max_tokens"]
    tables = [pq.read_table(path, columns=names) for path in list_shards(runs.out)]
    return sorted(row for table in tables for row in zip(*(table[name].to_pylist() for name in names), strict=True))


@pytest.fixture
def cut(runs: Runs) -> list[tuple[int, int]]:
    """The keys that a first run, of 5 tokens at most, cuts. (The fake engine ends at 1 to 5 tokens.)"""
    runs(max_tokens=5)
    found = [(prompt, sample) for prompt, sample, _, reason, _ in rows(runs) if reason == "length"]
    assert 0 < len(found) < 10
    return found


def test_what_was_cut_is_made_again(runs: Runs, cut: list[tuple[int, int]]) -> None:
    """Shards and rows stay as they are; the cut samples get a second row, in generation 1, with the larger bound."""
    before = {path: path.read_bytes() for path in list_shards(runs.out)}
    stats = runs(**RETRY, max_tokens=9)
    assert sorted(runs.engine.asked) == cut
    assert (stats.planned, stats.stored_before, stats.stored, stats.exit_code) == (10 + len(cut), 10, len(cut), 0)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert [row for row in rows(runs) if row[2]] == [(*key, 1, "length", 9) for key in cut]
    [retry] = read_manifest(runs.out).retries
    assert (retry.generation, retry.where, retry.max_tokens, retry.samples) == (
        1,
        {"finish_reason": "length"},
        9,
        len(cut),
    )
    assert len(RolloutDataset(runs.out)) == 10


def test_a_retry_asked_for_twice_has_nothing_to_do(runs: Runs, cut: list[tuple[int, int]]) -> None:
    """And the run's own max_tokens is still what the other commands say."""
    runs(**RETRY, max_tokens=9)
    stats = runs(**RETRY, max_tokens=9)
    assert (stats.stored, stats.owed, runs.engine.started) == (0, 0, 0)
    assert any("no stored sample was cut at less than 9 tokens" in note for note in runs.reporter.notes)
    assert runs(resume=True, max_tokens=5).owed == 0
    with pytest.raises(ResumeRefused, match=r"max_tokens \(5 -> 9\)"):
        runs(resume=True, max_tokens=9)


def test_a_second_retry_is_a_second_generation(runs: Runs, cut: list[tuple[int, int]]) -> None:
    """Of what the first one cut again."""
    runs(**RETRY, max_tokens=9)
    runs(**RETRY, max_tokens=12)
    assert [row[:3] for row in rows(runs) if row[2] == 2] == [(*key, 2) for key in cut]


def test_a_retry_that_died_is_finished_by_any_resume(runs: Runs, cut: list[tuple[int, int]]) -> None:
    """It belongs to what is planned."""

    async def dies(request: SampleRequest) -> None:
        raise EngineError("out of memory")

    with pytest.raises(EngineError):
        runs(FakeEngine(before=dies), **RETRY, max_tokens=9, max_restarts=0)
    stats = runs(resume=True, max_tokens=5)
    assert (stats.planned, stats.stored) == (10 + len(cut), len(cut))
    assert [row[:2] for row in rows(runs) if row[2]] == cut


def test_growth_and_retry_go_together(runs: Runs, cut: list[tuple[int, int]]) -> None:
    """More samples and more prompts: made with the run's own max_tokens, beside the retry."""
    runs.write_prompts(7)
    stats = runs(**RETRY, max_tokens=9, n=3)
    assert stats.owed == 0
    assert sorted(row[:2] for row in rows(runs) if not row[2]) == keys(7, 3)
    assert {row[4] for row in rows(runs) if not row[2]} == {5}
    assert [row[:2] for row in rows(runs) if row[2]] == cut


def test_a_row_that_sets_its_own_max_tokens_is_left_alone(runs: Runs) -> None:
    """Here as everywhere, --max-tokens is for the others; one that sets the run's number cannot be told from these."""
    given = [{"max_tokens": 5}] * 3 + [{"max_tokens": 6}] * 7 + [{}] * 10
    rows_ = [{"id": f"p{i}", "prompt": f"Prompt {i}"} | own for i, own in enumerate(given)]
    runs.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows_))
    runs(max_tokens=6)
    cut = [row[:2] for row in rows(runs) if row[3] == "length"]
    own = [key for key in cut if key[0] < 3]
    assert own
    assert any(3 <= key[0] < 10 for key in cut)
    assert own != cut
    runs(**RETRY, max_tokens=9)
    assert [row[:2] for row in rows(runs) if row[2]] == [key for key in cut if key not in own]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"retry": "finish_reason=length"}, "--retry: continues the run"),
        ({"retry": "finish_reason=stop", "resume": True}, "only finish_reason=length can be made again"),
        ({"retry": "length", "resume": True}, "only finish_reason=length can be made again"),
    ],
)
def test_what_cannot_be_retried_is_refused(runs: Runs, arguments: dict[str, object], problem: str) -> None:
    """Before anything is made."""
    with pytest.raises(UsageError, match=problem):
        runs(**arguments)
    assert not runs.out.exists()
