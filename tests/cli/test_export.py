"""`rollgen export`: what it prints, its exit codes, how options reach an exporter."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from models.rewards import write_rewards
from typer.testing import CliRunner, Result

import rollgen
from rollgen.cli.app import app
from rollgen.errors import DatasetError, UsageError
from rollgen.exporters.export import TRAINERS


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Six prompts, two samples of eight tokens each; the second one of each is right."""
    write_rewards(made := make_dataset(tmp_path / "run"), "correct", lambda row: float(row["sample_index"]))
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], standalone_mode=False)


def test_what_is_printed(directory: Path, tmp_path: Path) -> None:
    """What was written, the columns that are lost, and what the trainer must be told."""
    out = tmp_path / "out"
    options = ("--reward", "correct", "--option", "prompts_per_step=3", "--option", "seq_len=64")
    result = run(directory, "--to", "prime-rl", "--out", out, *options)
    assert result.return_value == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{out}: 12 samples of 6 prompts, ")
    assert lines[0].endswith("for prime-rl (main, September 2026 (#3431; fields as in 0f59b241))")
    lost = "finish_reason, max_tokens, metadata, prompt, prompt_index, seed, text, top_k, top_p"
    assert lines[1] == f"not taken along: {lost} (12 samples)"
    assert "max_steps = 2, model.seq_len >= 64, data ranks: 1" in lines[2]


def test_json(directory: Path, tmp_path: Path) -> None:
    """The same figures as in the record."""
    told = json.loads(run(directory, "--to", "jsonl", "--out", tmp_path / "out", "--json").stdout)
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert told.items() <= record.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--option", "seq_len"), "--option seq_len: not KEY=VALUE", id="no value"),
        pytest.param(("--option", "a=1", "--option", "a=2"), "--option a: given twice", id="twice"),
        pytest.param(
            ("--option", "level=1"), "--option level: not an option of jsonl; it has routed_experts", id="unknown"
        ),
        pytest.param(("--reward", "fluency"), "has no rewards 'fluency' (there are: correct)", id="no such reward"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str, directory: Path, tmp_path: Path) -> None:
    """One line, exit 2, nothing made."""
    error = run(directory, "--to", "jsonl", "--out", tmp_path / "out", *arguments).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(inspect.signature(rollgen.export).parameters.keys() - {"options"}))
def test_arguments_of_the_command_are_no_options(name: str, directory: Path, tmp_path: Path) -> None:
    """`rollgen.export` takes both by name."""
    error = run(directory, "--to", "jsonl", "--out", tmp_path / "out", "--option", f"{name}=x").exception
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"--option {name}: not a setting of the trainer's export; use ")


def test_what_is_owed_is_printed(directory: Path, tmp_path: Path) -> None:
    """A shard is away with its line: two samples of each of three prompts."""
    (directory / "data" / "part-w0-000001.parquet").unlink()
    journal = directory / "journal" / "w0.jsonl"
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    result = run(directory, "--to", "jsonl", "--out", tmp_path / "out")
    owed = "owed: samples of the plan that are yet to be made, or made again: 6; `rollgen generate --resume` makes the"
    assert owed in result.stdout


def test_no_dataset_is_exit_1(tmp_path: Path) -> None:
    """And makes nothing."""
    (tmp_path / "empty").mkdir()
    error = run(tmp_path / "empty", "--to", "jsonl", "--out", tmp_path / "out").exception
    assert isinstance(error, DatasetError)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_help_names_every_trainer() -> None:
    """Which are listed twice, because help loads nothing."""
    text = "".join(run("--help").stdout.split())  # lines break at hyphens
    names = ",".join(name for name in sorted(TRAINERS) if name != "jsonl")
    assert f"jsonl(anytool),{names}." in text
