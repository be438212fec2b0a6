"""`rollgen export`: what it prints, its exit codes, how options reach an exporter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from models.rewards import write_rewards
from typer.testing import CliRunner, Result

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
    """What was written, a line for each column that is lost, and what the trainer must be told."""
    out = tmp_path / "out"
    options = ("--reward", "correct", "--option", "prompts_per_step=3", "--option", "seq_len=64")
    result = run(directory, "--to", "prime-rl", "--out", out, *options)
    assert result.return_value == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{out}: 12 samples of 6 prompts, ")
    assert lines[0].endswith("for prime-rl (main, September 2026 (after #3431))")
    lost = [line for line in lines if line.startswith("lost: ")]
    assert "lost: finish_reason of 12 samples" in lost
    assert not any("sampling_mask" in line for line in lost)
    assert "max_steps = 2, model.seq_len >= 64, data ranks: 1" in lines[len(lost) + 1]


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
