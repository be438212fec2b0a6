"""`rollgen verify`: what it prints and its exit codes, also as the real program through a pipe."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollgen.cli.app import app
from rollgen.config import digest
from rollgen.errors import UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import PLANLESS, Manifest, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

HOSTILE = "\x1b]0;owned\x07\u202e\nrollgen: error: nothing"
"""An id that would set a terminal's title, turn the line around and pretend to be an error of its own."""


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Two shards of six samples of eight tokens."""
    return make_dataset(tmp_path / "run")


@pytest.fixture
def hostile(tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Completion]) -> Path:
    """A dataset without a plan of one sample, which has a hostile id and not the number of it."""
    identity = {PLANLESS: True}
    manifest = make_manifest(identity=identity, config_digest=digest(identity))
    directory = tmp_path / "hostile"
    directory.mkdir()
    create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        writer.add(replace(make_completion(), prompt_id=HOSTILE))
    return directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], standalone_mode=False)


def damage(directory: Path) -> None:
    (directory / "data" / "part-w0-000001.parquet").unlink()


def test_a_clean_dataset_is_exit_0(directory: Path) -> None:
    """What was verified, on stdout; nothing is changed and nothing else said."""
    before = sorted(directory.rglob("*"))
    result = run(directory)
    assert result.return_value == 0
    counts, samples, outcome = result.stdout.splitlines()
    assert counts.startswith("2 shards, 12 rows, 96 tokens, ")
    assert samples == "12 planned = 12 stored + 0 owed + 0 skipped"
    assert outcome == "clean: shards, journal and plan are as they were made"
    assert result.stderr == ""
    assert sorted(directory.rglob("*")) == before


def test_a_finding_is_exit_1(directory: Path) -> None:
    """It has a line, and the last ones say what to do."""
    damage(directory)
    result = run(directory)
    assert result.return_value == 1
    finding, total, *hints = result.stdout.splitlines()[2:]
    assert (
        finding
        == "data/part-w0-000001.parquet: missing: not there, though committed; put it back from a copy, or repair"
    )
    assert total == "1 finding: 1 missing"
    assert "put back" in hints[0]
    assert "rollgen repair" in hints[1]


@pytest.mark.parametrize("kind", ["nothing", "file"])
def test_no_directory_is_exit_2(tmp_path: Path, kind: str) -> None:
    """There is nothing to verify."""
    path = tmp_path / "x"
    if kind == "file":
        path.touch()
    error = run(path).exception
    assert isinstance(error, UsageError)
    assert error.exit_code == 2


def test_a_directory_that_is_no_dataset_is_exit_1(tmp_path: Path) -> None:
    """And is left empty."""
    result = run(tmp_path)
    assert result.return_value == 1
    assert "rollgen.json: manifest: not found" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_json(directory: Path, damaged: bool) -> None:
    """One object, and the same exit codes."""
    if damaged:
        damage(directory)
    result = run(directory, "--json")
    outcome = json.loads(result.stdout)
    assert result.return_value == int(damaged)
    assert outcome["clean"] is not damaged
    assert outcome["findings_total"] == len(outcome["findings"]) == int(damaged)
    assert outcome["by_kind"] == ({"missing": 1} if damaged else {})
    assert outcome["samples"] == {"planned": 12, "stored": 12 - 6 * damaged, "owed": 6 * damaged, "skipped": 0}
    assert outcome["recompute"] is None
    assert (outcome["shards"], outcome["rows"], outcome["notes"]) == (2 - damaged, 12 - 6 * damaged, [])


@pytest.mark.parametrize(
    "options",
    [["--limit", 5], ["--device", "cpu"], ["--limit", 0, "--device", "cpu"], ["--recompute", "m", "--limit", -1]],
    ids=["limit", "device", "both", "negative"],
)
def test_options_that_do_nothing_are_refused(directory: Path, options: list[object]) -> None:
    """Before anything is read."""
    error = run(directory, *options).exception
    assert isinstance(error, UsageError)
    assert str(error).startswith("--limit")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_damaged_dataset_is_not_recomputed(directory: Path, as_json: bool) -> None:
    """The model is not even looked for; why not is said on stderr."""
    damage(directory)
    result = run(directory, "--recompute", directory / "no-model", *(["--json"] if as_json else []))
    assert result.return_value == 1
    assert result.stderr == "not recomputed: that needs a dataset in which nothing is wrong; mend it first\n"
    if as_json:
        assert json.loads(result.stdout)["recompute"] is None


def test_hostile_ids_are_inert(hostile: Path) -> None:
    """As text each finding is one line in which nothing acts; as JSON the id is what it is."""
    result = run(hostile)
    assert result.return_value == 1
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    assert "(\\x1b]0;owned\\x07\\u202e\\nrollgen: error: nothing, 0)" in lines[1]
    as_json = run(hostile, "--json").stdout
    assert as_json.isascii()
    assert HOSTILE in json.loads(as_json)["findings"][0]["place"]


def test_the_program_through_a_pipe(hostile: Path) -> None:
    """Plain text without colours or a bar, and no line is broken at 80 columns; a reader that goes away is no error."""
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm-256color"}
    program = f"{sys.executable} -c 'from rollgen.cli.app import main; main()' verify {hostile}"
    finished = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, timeout=180, check=False)
    assert (finished.returncode, finished.stderr) == (1, b"")
    assert finished.stdout.decode().splitlines() == run(hostile).stdout.splitlines()
    assert b"\x1b" not in finished.stdout
    gone = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} | true"], capture_output=True, timeout=180, check=False
    )
    assert gone.stderr == b""


def test_help_fits(directory: Path) -> None:
    """80 columns, every option, and that it changes nothing."""
    result = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, ["verify", "--help"])
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert all(option in result.stdout for option in ("--recompute", "--limit", "--device", "--json"))
    assert "Changes nothing" in " ".join(result.stdout.split())
