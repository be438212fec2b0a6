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
from rollgen.loader import RolloutStream

MODULE = """
from pathlib import Path
def half(answers):
    print("noise")
    return [ValueError("no") if answer.prompt_id == "p1" else 0.5 for answer in answers]
def one(answers):
    return [1] * len(answers)
def switched(answers):
    bad = Path("switch").exists()
    return [ValueError("no") if bad and answer.prompt_id == "p1" else 1 for answer in answers]
def own_error(answers):
    return [ValueError(f"{answer.prompt_id} {answer.sample_index}") for answer in answers]
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
        "reward 'good' (scorer local_graders:one): 6 samples scored; mean reward 1",
        "to train on them: RolloutStream('run', rewards='good')",
    ]
    again = run("run", "--with", "local_graders:one", "--name", "good")
    assert again.stdout.splitlines()[0].endswith(": 0 samples scored, 6 had a reward; mean reward 1")


def test_some_that_could_not_be(directory: Path) -> None:
    """Exit 3, with the first errors."""
    result = run("run", "--with", "local_graders:half")
    assert result.return_value == 3, result.exception
    assert result.stdout.splitlines() == [
        "reward 'half' (scorer local_graders:half): 4 samples scored; mean reward 0.5",
        "could not be scored: 2; the same command tries them again",
        "  2 x ValueError: no (first p1:0)",
        "if they cannot have a reward, score with a function that returns 0, or leave them out with the filter= of "
        "RolloutStream or RolloutDataset",
    ]
    rescored = run("run", "--with", "local_graders:half", "--rescore")
    assert rescored.return_value == 3
    assert rescored.stdout.splitlines()[-1] == "the rewards from before stay in force until every sample has a new one"


def test_a_rescoring_that_goes_on(directory: Path) -> None:
    """What an earlier attempt has given is not given again; how to have all of it again is said."""
    run("run", "--with", "local_graders:one", "--name", "r")
    switch = directory.with_name("switch")
    switch.touch()
    run("run", "--with", "local_graders:switched", "--name", "r", "--rescore")
    switch.unlink()
    said = run("run", "--with", "local_graders:switched", "--name", "r", "--rescore").stdout.splitlines()
    assert said[0].endswith(
        ": 2 samples scored, 4 had a reward from an earlier attempt at this rescoring; mean reward 1"
    )
    assert said[1] == "to score those of the earlier attempt again too, give the same command once more"
    again = run("run", "--with", "local_graders:switched", "--name", "r", "--rescore").stdout
    assert "): 6 samples scored; mean" in again


def test_more_errors_than_are_told(directory: Path) -> None:
    """Five, and where the others are: here six samples have one each."""
    said = run("run", "--with", "local_graders:own_error").stdout.splitlines()
    assert said[7] == "  1 x other errors: column `error` of rewards/own_error-*.parquet has all of them"


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
    assert result.stdout.startswith("reward 'exact_match' (scorer exact_match): 6 samples scored; mean reward 1\n"), (
        result.exception
    )


def test_the_page(directory: Path) -> None:
    """The function and the commands of `docs/rewards.md` do what it says; no prompt has a `pattern`, which is told."""
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    function = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    Path("rewards_of_the_page.py").write_text(function)
    commands = re.findall(r"^rollgen score rollouts/ (.*?)(?: +#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        options = shlex.split(command.replace("rewards:correct", "rewards_of_the_page:correct"))
        result = run("run", *options)
        if "pattern" in options:
            assert str(result.exception) == "run: no row has a field 'pattern' in its metadata; there are: 'answer'"
        else:
            assert result.return_value == 0, (command, result.exception)


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


def test_nothing_is_stored_yet(tmp_path: Path, directory: Path) -> None:
    """A run whose samples are still to come: said, instead of how to train on them."""
    for path in [*directory.glob("data/*"), *directory.glob("journal/*")]:
        path.unlink()
    result = run("run", "--with", "local_graders:one", "--name", "good")
    assert result.return_value == 0, result.exception
    assert result.stdout.splitlines()[1:] == ["no sample is stored yet; the same command scores those that come"]
    with pytest.raises(UsageError, match="no sample to read"):
        RolloutStream(directory, rewards="good")
