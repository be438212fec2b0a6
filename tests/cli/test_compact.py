"""`rollgen compact`: what it prints, its exit codes, and the card that it refreshes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollgen.cli.app import app
from rollgen.curate.compact import SHARD_TOKENS
from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Three shards of six samples of eight tokens."""
    return make_dataset(tmp_path / "run", shards=3, prompts=3, n=2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compact", *map(str, arguments)], standalone_mode=False)


def test_what_is_printed(directory: Path) -> None:
    """Before and after, and that nothing else has changed; then that there is nothing to do."""
    result = run(directory)
    assert result.return_value == 0
    before, after, rewritten = result.stdout.splitlines()
    assert before.startswith("before: 3 shards, ")
    assert after.startswith("after: 1 shard, ")
    assert rewritten == "rewritten: 3 shards as 1; the 18 rows, 144 generated tokens, are as they were"
    assert run(directory).stdout.startswith("nothing to do: 1 shard, ")


def test_the_card_counts_the_new_shards(directory: Path) -> None:
    """It is written anew once something was done."""
    assert run(directory, "--dry-run").stdout.splitlines()[1] == "would be: 1 shard; no prompt in several"
    assert not (directory / "README.md").exists()
    run(directory)
    assert "in 1 file" in (directory / "README.md").read_text()


def test_json(directory: Path) -> None:
    """One object; `bytes_after` is not known of a dry run."""
    dry = json.loads(run(directory, "--dry-run", "--json").stdout)
    done = json.loads(run(directory, "--json", "--keep").stdout)
    assert dry == {**done, "dry_run": True, "bytes_after": None}
    assert (done["replaced"], done["written"], done["rows"]) == (3, 1, 18)
    assert done["bytes_after"] == list_shards(directory)[0].stat().st_size
    assert len(list((directory / "retired").iterdir())) == 3


def test_help_says_the_default() -> None:
    """Which is stated twice, because help loads no Parquet."""
    assert str(SHARD_TOKENS) in " ".join(run("--help").stdout.split())


def test_a_live_writer_is_exit_4(directory: Path) -> None:
    """As for every command that would write there."""
    with WriterSlot(directory, "w0"):
        error = run(directory).exception
    assert isinstance(error, ResumeRefused)
    assert error.exit_code == 4


def test_no_dataset_is_exit_1(tmp_path: Path) -> None:
    """And makes nothing."""
    error = run(tmp_path).exception
    assert isinstance(error, DatasetError)
    assert list(tmp_path.iterdir()) == []
