"""`rollgen merge`: what it prints, its exit codes, and the card that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rollgen
from rollgen.cli.app import app
from rollgen.curate.compact import SHARD_TOKENS
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import JournalLine, list_shards
from rollgen.format.manifest import read_manifest

MakeRun = Callable[..., Path]


@pytest.fixture
def two(tmp_path: Path, make_run: MakeRun) -> list[Path]:
    """Twelve samples each, of 8 and of 9 tokens."""
    return [make_run(tmp_path / name, number) for number, name in enumerate(("base", "step-1"))]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)], standalone_mode=False)


def test_what_is_printed(two: list[Path], tmp_path: Path) -> None:
    """Each run, the whole, and what was not copied; the card is there."""
    out = tmp_path / "out"
    result = run(*two, "--out", out)
    assert result.return_value == 0
    base, step, whole, left = result.stdout.splitlines()
    assert base == "base: 12 samples, 96 tokens of model-0"
    assert step == "step-1: 12 samples, 108 tokens of model-1"
    assert whole.startswith("merged: 24 samples, 204 generated tokens, 1 shard, ")
    assert whole.endswith(f"in {out}")
    assert left == "not copied: plans, retry lists, failures and logs; they stay with the runs"
    assert "24, of 12 prompts" in (out / "README.md").read_text()


def test_what_was_left_is_printed(tmp_path: Path, make_run: MakeRun) -> None:
    """Columns, and samples that are owed: a plan of 16 samples of which a shard with half was retired."""
    first, second = make_run(tmp_path / "a", 0, n=2, support_logprobs=True), make_run(tmp_path / "b", 1)
    lost = list_shards(first)[1]
    with WriterSlot(first, "w0") as slot:
        [line] = [json.loads(text) for text in (first / "journal" / "w0.jsonl").read_text().splitlines()][1:]
        slot.retire(JournalLine(**line))
    lost.unlink()
    lines = run(first, second, "--out", tmp_path / "out", "--drop", "support_logprobs", "--dry-run").stdout.splitlines()
    assert lines[0] == "a: 6 samples, 48 tokens of model-0, owed: 6"
    assert lines[2] == f"would be: 18 samples, 156 generated tokens, 1 shard in {tmp_path / 'out'}"
    assert lines[3:5] == [
        "columns left out: support_logprobs",
        "samples that the runs still owed, and nobody owes any more: 6",
    ]
    assert not (tmp_path / "out").exists()


def test_what_is_worth_knowing_is_printed(two: list[Path], tmp_path: Path, make_run: MakeRun) -> None:
    """Samples that a merged dataset has lost, and that there is no tokenizer to be trusted."""
    merged = tmp_path / "merged"
    run(*two, "--out", merged, "--shard-tokens", 100)
    lost = list_shards(merged)[0]
    [line] = [text for text in (merged / "journal" / "merge.jsonl").read_text().splitlines() if lost.name in text]
    with WriterSlot(merged, "merge") as slot:
        slot.retire(JournalLine(**json.loads(line)))
    lost.unlink()
    (merged / "tokenizer").mkdir()
    (merged / "tokenizer" / "tokenizer.json").write_text("junk")
    lines = run(merged, make_run(tmp_path / "third", 2), "--out", tmp_path / "out").stdout.splitlines()
    assert any(", lost since it was merged before: " in text for text in lines[:2])
    assert "no tokenizer was copied: what there is of one is damaged or behind links" in lines


def test_a_card_without_room(two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a merge that is whole are printed before it is told."""

    def write_nothing(directory: Path) -> None:
        raise DatasetError(f"{directory}/README.md: cannot be written")

    monkeypatch.setattr("rollgen.inspect.card.write_card", write_nothing)
    result = run(*two, "--out", tmp_path / "out")
    assert isinstance(result.exception, DatasetError)
    assert "merged: 24 samples" in result.stdout


def test_what_two_runs_drew_is_printed(two: list[Path], tmp_path: Path, make_run: MakeRun) -> None:
    """With the same seeds from the same model: before anything is written, too."""
    again = make_run(tmp_path / "again", 2, tokens=8, said={"model": read_manifest(two[0]).model})
    lines = run(two[0], again, "--out", tmp_path / "out", "--dry-run").stdout.splitlines()
    assert [line for line in lines if line.startswith("samples of 'again' that 'base' has too, token by token: 12; ")]


@pytest.mark.parametrize("out", ["a\0b", "x" * 300])
def test_an_output_that_cannot_be(two: list[Path], out: str) -> None:
    """It is a wrong use, and nothing else."""
    error = run(*two, "--out", out).exception
    assert isinstance(error, UsageError)
    with pytest.raises(UsageError, match="datasets: give a list of paths, two or more"):
        rollgen.merge(str(two[0]), out)


def test_names_in_order(two: list[Path], tmp_path: Path) -> None:
    """`--as`, once for each."""
    lines = run(*two, "--as", "old", "--as", "new", "--out", tmp_path / "out").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["old", "new"]


def test_json(two: list[Path], tmp_path: Path) -> None:
    """One object, of a dry run without the size; the same as from Python."""
    dry = json.loads(run(*two, "--out", tmp_path / "out", "--dry-run", "--json").stdout)
    done = json.loads(run(*two, "--out", tmp_path / "out", "--json").stdout)
    assert dry == {**done, "dry_run": True, "bytes": None}
    assert done["bytes"] == list_shards(tmp_path / "out")[0].stat().st_size
    merged = rollgen.merge(two, tmp_path / "again", names=["base", "step-1"])
    assert [each["samples"] for each in done["runs"]] == [each.samples for each in merged.runs]
    assert (tmp_path / "again" / "README.md").exists()


def test_help_says_the_default() -> None:
    """Which is stated twice, because help loads no Parquet."""
    assert str(SHARD_TOKENS) in " ".join(run("--help").stdout.split())


def test_exit_codes(two: list[Path], tmp_path: Path) -> None:
    """2 for what does not go together or is in the way, 4 for a live writer, 1 for damage; nothing is made."""
    errors = [run(two[0], "--out", tmp_path / "out").exception, run(*two, "--out", two[0]).exception]
    with WriterSlot(two[0], "w0"):
        errors.append(run(*two, "--out", tmp_path / "out").exception)
    list_shards(two[0])[0].unlink()
    errors.append(run(*two, "--out", tmp_path / "out").exception)
    assert [type(error) for error in errors[:3]] == [UsageError, UsageError, ResumeRefused]
    assert isinstance(errors[3], DatasetError)
    assert [error.exit_code for error in errors] == [2, 2, 4, 1]  # type: ignore[union-attr]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["s3://bucket/run", "missing"])
def test_places_that_are_no_directories(two: list[Path], tmp_path: Path, place: str) -> None:
    """They are told before anything is read."""
    error = run(two[0], place, "--out", tmp_path / "out").exception
    assert isinstance(error, UsageError)
    with pytest.raises(UsageError, match="merge reads and writes directories"):
        rollgen.merge([two[0], "s3://bucket/run"], tmp_path / "out")
