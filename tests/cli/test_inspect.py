"""`rollgen inspect`: curves in the terminal and in the JSON, and the report that `--html` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollgen.cli.app import app
from rollgen.errors import UsageError


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Twelve samples of eight tokens."""
    return make_dataset(tmp_path / "run")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], standalone_mode=False)


def test_plots(directory: Path) -> None:
    """A line of bars for each curve, eight positions of equal count; it fits 80 columns and a screen."""
    lines = run(directory).stdout.splitlines()
    first = next(line for line in lines if line.startswith("Plots"))
    assert first.split()[1:4] == ["support", "by", "position"]
    assert first.rstrip().endswith(" ids")
    assert "samples by length █ 8 to 8 tokens" in " ".join(" ".join(lines).split())
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80


def test_curves_are_in_the_json(directory: Path) -> None:
    """Beside the figures; 12 tokens at each of 8 positions."""
    curves = json.loads(run(directory, "--json").stdout)["curves"]
    assert [part["tokens"] for part in curves["stretches"]] == [12] * 8


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report(directory: Path, tmp_path: Path, as_json: bool) -> None:
    """One line says what was written, or one object."""
    pytest.importorskip("plotly")
    target = tmp_path / "report.html"
    result = run(directory, "--html", target, *(["--json"] if as_json else []))
    size = target.stat().st_size
    assert (result.return_value, result.stdout.count("\n")) == (0, 1)
    if as_json:
        assert json.loads(result.stdout) == {"file": str(target), "bytes": size, "shown": 12, "samples": 12}
    else:
        assert result.stdout == f"{target}: {size / 1e6:.1f} MB, with 12 of 12 samples\n"


@pytest.mark.parametrize("more", [["--sample", "p0"], ["--at", "0"]])
def test_a_report_is_of_the_whole(directory: Path, tmp_path: Path, more: list[str]) -> None:
    """Not of one sample, and not of one token."""
    result = run(directory, "--html", tmp_path / "report.html", *more)
    assert isinstance(result.exception, UsageError)
    assert "without --sample" in str(result.exception)
