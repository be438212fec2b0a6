"""A writer is opened: with which settings, on which directory, and what is refused before anything is made."""

from __future__ import annotations

from typing import Any

import pytest
from models.runs import Runs
from models.writers import ENGINE, Open

from rollgen.config import RunConfig
from rollgen.errors import ResumeRefused, UsageError
from rollgen.format.commit import live_writers
from rollgen.rollout_writer import RolloutWriter


@pytest.mark.parametrize(
    ("settings", "capture"),
    [
        ({}, "native"),
        ({"capture": "native"}, "native"),
        ({"capture": "logprobs"}, "logprobs"),
        ({"top_k": 0, "top_p": 1.0}, "none"),
    ],
)
@pytest.mark.parametrize("kind", ["planned", "planless"])
def test_auto_capture_means_native(
    request: pytest.FixtureRequest, settings: dict[str, Any], capture: str, kind: str
) -> None:
    """Unless the run truncates nothing; a continued dataset keeps what it has."""
    opener = request.getfixturevalue(kind)
    for again in (settings, {name: value for name, value in settings.items() if name != "capture"}):
        with opener(**again) as writer:
            assert writer.manifest.capture == capture


def test_identity_is_checked_key_by_key(planned: Open, planless: Open, runs: Runs) -> None:
    """As by `--resume`; operational settings may change."""
    planned().close()
    planned(commit_interval=1.0).close()
    with pytest.raises(ResumeRefused, match=r"other settings: top_k \(8 -> 9\);"):
        planned(top_k=9)
    with pytest.raises(ResumeRefused, match="dtype"):
        planned(dtype="float16")
    runs.out = runs.out.with_name("open")
    planless().close()
    with pytest.raises(ResumeRefused, match=r"other settings: seed \(0 -> 1\);"):
        planless(seed=1)


def test_config_or_settings(runs: Runs) -> None:
    """One or the other; wrong settings are named without the environment."""
    config = RunConfig(model=str(runs.model))
    with RolloutWriter(runs.out, config, engine=ENGINE) as writer:
        assert writer.manifest.identity["top_k"] == 50
    with pytest.raises(UsageError, match=r"^n: give a config or single settings, not both"):
        RolloutWriter(runs.out, config, engine=ENGINE, n=2)
    with pytest.raises(UsageError, match="settings: unknown key 'topk'"):
        RolloutWriter(runs.out, topk=2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"writer": "a-b"}, "writer: 'a-b' is no name for a writer; use letters, digits and underscores"),
        ({"writer": ""}, "is no name for a writer"),
        ({"part": (2, 2)}, r"part: \(2, 2\) is none of 2 parts"),
        ({"part": (-1, 2)}, r"part: \(-1, 2\) is none"),
        ({"engine": "no_such_engine"}, "engine: 'no_such_engine' is not installed here"),
    ],
)
def test_arguments_are_checked_before_anything_is_made(
    runs: Runs, planless: Open, arguments: dict[str, Any], expected: str
) -> None:
    """No directory then."""
    with pytest.raises(UsageError, match=expected):
        planless(**arguments)
    assert not runs.out.exists()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_start_leaves_nothing(runs: Runs, planned: Open, exists: bool) -> None:
    """A bad row: the directory is as it was, and free."""
    if exists:
        runs.out.mkdir()
    runs.write_prompts(2, bad=[1])
    with pytest.raises(UsageError, match="no prompt"):
        planned()
    assert runs.out.exists() is exists
    assert not exists or live_writers(runs.out) == frozenset()
    assert not list(runs.out.rglob("*.parquet"))


def test_foreign_directories_are_left_alone(runs: Runs, planless: Open) -> None:
    """Not even a lock is made."""
    runs.out.mkdir()
    (runs.out / "notes.txt").touch()
    with pytest.raises(UsageError, match="holds files that are not a rollgen run"):
        planless()
    assert [path.name for path in runs.out.iterdir()] == ["notes.txt"]
