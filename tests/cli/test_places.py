"""Places that a command does not take: the message says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.fake_engine import FakeEngine
from models.runs import Runs
from typer.testing import CliRunner

import rollgen
from rollgen.cli.app import app
from rollgen.errors import UsageError


@pytest.mark.parametrize("command", ["inspect", "status", "verify", "repair", "compact"])
def test_commands_look_into_directories(command: str) -> None:
    """A URL is no directory that is missing: exit 2, with the way out."""
    result = CliRunner().invoke(app, [command, "s3://bucket/run"])
    assert isinstance(result.exception, UsageError)
    assert "is in object storage; copy it here" in str(result.exception)


def test_a_writer_writes_into_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And makes none that is called s3:."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^s3://bucket/run: RolloutWriter writes into directories"):
        rollgen.RolloutWriter("s3://bucket/run", model="any")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ray": "local", "shard": "0/2"}, "--ray and --shard exclude each other"),
        (
            {"server": ["http://localhost:1"], "replicas": 2},
            "--replicas: for engines that rollgen starts, not for a --server",
        ),
        ({"server": ["http://localhost:1"], "ray": "auto"}, "--ray: for engines that rollgen starts"),
        (
            {"server": ["http://localhost:1"], "engine_arg": {"seed": 1}},
            "--engine-arg: for engines that rollgen starts",
        ),
    ],
)
def test_ways_that_exclude_each_other(runs: Runs, settings: dict[str, object], problem: str) -> None:
    """Before a model loads or a server is asked."""
    with pytest.raises(UsageError, match=problem):
        runs(FakeEngine(), **settings)
    assert runs.engine.started == 0
