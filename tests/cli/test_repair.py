"""`rollgen repair`: what it prints, its exit codes, and the card that it refreshes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollgen.cli.app import app
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards


@pytest.fixture
def directory(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Three shards of six samples of eight tokens."""
    return make_dataset(tmp_path / "run", shards=3, prompts=3, n=2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["repair", *map(str, arguments)], standalone_mode=False)


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 4] ^= 1
    path.write_bytes(damaged)


def break_journal(directory: Path) -> None:
    with (directory / "journal" / "w0.jsonl").open("ab") as file:
        file.write(b"garbage\n")


def test_nothing_to_repair(directory: Path) -> None:
    """And no card is written."""
    result = run(directory)
    assert result.return_value == 0
    assert result.stdout.splitlines() == ["nothing to repair", "clean: 3 shards, 18 rows"]
    assert not (directory / "README.md").exists()


def test_what_is_printed(directory: Path) -> None:
    """What would be done; what was done, what is owed, and what to do next; the card counts what is left."""
    flip(list_shards(directory)[1])
    break_journal(directory)
    shard, journal = "data/part-w0-000001.parquet: ", "journal/w0.jsonl: "
    lines = "without 1 line that is damaged or wrong; as it was, it is in quarantine/"
    foreseen = run(directory, "--dry-run")
    assert foreseen.return_value == 1
    one, two = foreseen.stdout.splitlines()
    assert one.startswith(f"{shard}would go to quarantine/: row group 0: damaged or not a shard: ")
    assert two == f"{journal}would be made again: {lines}"
    result = run(directory)
    assert result.return_value == 0
    one, two, clean, owed = result.stdout.splitlines()
    assert one.startswith(f"{shard}moved to quarantine/: row group 0: damaged or not a shard: ")
    assert two == f"{journal}made again: {lines}"
    assert clean == "clean: 2 shards, 12 rows"
    assert owed == "owed: 6 samples; `rollgen generate ... --resume` makes them"
    assert "in 2 files" in (directory / "README.md").read_text()


def test_what_it_cannot_mend_is_exit_1(directory: Path) -> None:
    """It says what is left, and what to do about it; the rest is done."""
    flip(directory / "plan.parquet")
    break_journal(directory)
    result = run(directory)
    assert result.return_value == 1
    done, *left, advice = result.stdout.splitlines()
    assert done.startswith("journal/w0.jsonl: made again")
    assert left
    assert all(line.startswith("left: plan.parquet: plan: ") for line in left)
    assert advice.startswith("plan: `rollgen generate ... --resume`, as in the last run, makes the same plan again; ")
    assert not (directory / "README.md").exists()
    foreseen = run(directory, "--dry-run")
    assert foreseen.return_value == 1
    assert foreseen.stdout.splitlines() == ["nothing to repair", *left, advice]


def test_what_was_committed_is_left_alone(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Shards that contradict the plan are not what is wrong, if the journal vouches for them: that is said."""
    directory = make_dataset(tmp_path / "run", shards=2, prompts=1, n=1, prompt_id="other")
    result = run(directory)
    assert result.return_value == 1
    *shards, nothing = result.stdout.splitlines()[:3]
    for number, line in enumerate(shards):
        problem = "row group 0, row 0 (other, 0): prompt_id is not the plan's"
        assert line.startswith(
            f"data/part-w0-{number:06d}.parquet: left alone: {problem}; yet it is what was committed"
        )
    assert nothing == "nothing to repair"
    assert result.stdout.splitlines()[-1].startswith(
        "mismatch, seed: shards and records contradict each other: put rollgen.json"
    )


def test_json(directory: Path) -> None:
    """One object; a dry run verifies when there is nothing to do."""
    break_journal(directory)
    foreseen = run(directory, "--json", "--dry-run")
    assert foreseen.return_value == 1
    dry = json.loads(foreseen.stdout)
    done = json.loads(run(directory, "--json").stdout)
    assert [change["action"] for change in done["changes"]] == ["rewritten"]
    same = {key: done[key] for key in ("changes", "changes_by_action", "left", "left_total")}
    assert dry == {"clean": None, "dry_run": True, **same, "verification": None}
    again = run(directory, "--json", "--dry-run")
    assert again.return_value == 0
    assert json.loads(again.stdout)["clean"] is True
    assert (done["clean"], done["dry_run"], done["verification"]["rows"]) == (True, False, 18)


def test_text_from_the_data_is_inert(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """An id that would clear the screen is spelled out."""
    directory = make_dataset(tmp_path / "run", shards=1, prompts=1, n=1, prompt_id="\x1b[2J")
    [line, *_] = run(directory).stdout.splitlines()
    assert r"row group 0, row 0 (\x1b[2J, 0): prompt_id is not the plan's" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_live_writer_is_exit_4(directory: Path, options: tuple[str, ...]) -> None:
    """As for every command that would write there."""
    with WriterSlot(directory, "w0"):
        error = run(directory, *options).exception
    assert isinstance(error, ResumeRefused)
    assert error.exit_code == 4


def test_no_directory_is_exit_2(tmp_path: Path) -> None:
    """And one that holds no dataset exit 1; nothing is made."""
    error = run(tmp_path / "nowhere").exception
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    error = run(tmp_path).exception
    assert isinstance(error, DatasetError)
    assert list(tmp_path.iterdir()) == []
