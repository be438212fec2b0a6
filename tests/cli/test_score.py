"""`rollgen score`: what it prints, its exit codes, and where it finds a function."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollgen.cli.app import app
from rollgen.curate.score import BATCH_SIZE, TIMEOUT_SECONDS
from rollgen.errors import ResumeRefused, UsageError

MODULE = """
def half(answers):
    print("noise")
    return [ValueError("no") if answer.prompt_id == "p1" else 0.5 for answer in answers]
def one(answers):
    return [1] * len(answers)
def cents(answers):
    return [0.0004] * len(answers)
"""


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six samples; the current directory has `local_graders.py`."""
    (tmp_path / "local_graders.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "local_graders", raising=False)
    return make_dataset(tmp_path / "run", shards=1)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["score", *map(str, arguments), "--processes", "1"], standalone_mode=False)


def test_all_scored(directory: Path) -> None:
    """Exit 0, and how to train on them; then that nothing was left to do."""
    result = run("run", "--with", "local_graders:one", "--name", "good")
    assert result.return_value == 0, result.exception
    assert result.stdout.splitlines() == [
        "good by local_graders:one: 6 samples scored; mean reward 1",
        'to train on them: RolloutStream("run", rewards="good")',
    ]
    again = run("run", "--with", "local_graders:one", "--name", "good")
    assert again.stdout.startswith("good by local_graders:one: 0 samples scored, 6 had a reward; mean reward 1\n")


def test_some_that_could_not_be(directory: Path) -> None:
    """Exit 3, with the first errors."""
    result = run("run", "--with", "local_graders:half")
    assert result.return_value == 3, result.exception
    assert result.stdout.splitlines() == [
        "half by local_graders:half: 4 samples scored; mean reward 0.5",
        "could not be scored: 2; the same command tries them again",
        "  2 x ValueError: no (first p1:0)",
    ]
    rescored = run("run", "--with", "local_graders:half", "--rescore")
    assert rescored.return_value == 3
    assert rescored.stdout.splitlines()[-1] == "the rewards from before stay in force until every sample has a new one"


def test_json(directory: Path) -> None:
    """One object, and nothing else on stdout."""
    said = json.loads(run("run", "--with", "local_graders:half", "--json").stdout)
    assert said == {
        "name": "half",
        "scorer": "local_graders:half",
        "samples": 6,
        "scored": 4,
        "kept": 0,
        "failed": 2,
        "mean": 0.5,
        "in_force": True,
        "errors": [{"prompt_id": "p1", "sample_index": 0, "error": "ValueError: no", "samples": 2}],
    }


def test_built_in(directory: Path) -> None:
    """With its options."""
    result = run("run", "--with", "exact_match", "--field", "answer", "--extract", r"(\d+)\.")
    assert result.stdout.startswith("exact_match by exact_match: 6 samples scored; mean reward 1\n"), result.exception


def test_the_page(directory: Path) -> None:
    """The function and the commands of `docs/rewards.md` do what it says; no prompt has a `pattern`."""
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    function = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    Path("rewards_of_the_page.py").write_text(function)
    commands = re.findall(r"^rollgen score rollouts/ (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        options = shlex.split(command.replace("rewards:correct", "rewards_of_the_page:correct"))
        result = run("run", *options)
        assert result.return_value == (3 if "pattern" in options else 0), (command, result.exception)


def test_refusals(directory: Path) -> None:
    """With exit codes 2 and 4."""
    assert isinstance(run("run", "--with", "no_such_module:f").exception, UsageError)
    assert isinstance(run("nowhere", "--with", "local_graders:one").exception, UsageError)
    run("run", "--with", "local_graders:one", "--name", "r")
    assert isinstance(run("run", "--with", "local_graders:half", "--name", "r").exception, ResumeRefused)


def test_help_says_the_defaults() -> None:
    """Which are stated twice, because help loads neither Parquet nor pebble."""
    words = " ".join(run("--help").stdout.split())
    assert f"[{BATCH_SIZE}]" in words
    assert f"[{TIMEOUT_SECONDS:g}]" in words


def test_small_rewards_are_not_nothing(directory: Path) -> None:
    """Figures of rewards have six digits wherever the point is."""
    assert run(directory, "--with", "local_graders:cents").stdout.splitlines()[0].endswith("mean reward 0.0004")
