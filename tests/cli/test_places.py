"""Places that a command does not take: the message says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.datasets import write_prompts
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
    assert str(result.exception).startswith("s3://bucket/run: is in object storage; copy it here")


DIRECTORY_COMMANDS = (
    *(["inspect"], ["status"], ["verify"], ["repair", "--dry-run"], ["compact", "--dry-run"]),
    *(["score", "--with", "exact_match", "--field", "answer"], ["export", "--to", "jsonl", "--out", "out"]),
    ["merge", "--out", "out", "--dry-run"],
)


@pytest.mark.parametrize("command", DIRECTORY_COMMANDS, ids=lambda command: command[0])
def test_directories_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """`file://` is a path, with all its slashes; what none can have is one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()

    def problem(place: str) -> str:
        result = CliRunner().invoke(app, [*command, place])
        return result.output or str(result.exception)

    assert problem(f"file://{tmp_path}/a%20b") == problem(f"{tmp_path}/a b")  # there is no dataset in it
    assert problem("file://a/b").startswith("file://a/b: not the URL of a local file")
    assert problem("x" * 256) == f"{256 * 'x'}: cannot be read: File name too long"


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("http://host/run", "http://host/run: no dataset can be written there"),
        ("dir://x", "dir://x: no dataset can be written there"),
        ("s3://", "s3://: names no bucket"),
        ("s3:/bucket/run", "s3:/...: this URL has lost a slash"),
        ("simplecache::s3://bucket/run", "simplecache::...: a chain of storages is refused"),
        ("Memory://run", "Memory://run: is gone when this command ends"),
        ("file://data/run", "file://data/run: not the URL of a local file"),
    ],
)
def test_generate_refuses_what_it_cannot_write(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, out: str, problem: str, dry_run: bool
) -> None:
    """A dry run and a run alike, and no directory is made of it."""
    monkeypatch.chdir(tmp_path)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
    arguments = ["generate", str(prompts), "--model", str(tiny_model), "--out", out, *["--dry-run"] * dry_run]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).startswith(problem)
    assert list(tmp_path.iterdir()) == [prompts]


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
