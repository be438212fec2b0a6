"""The dataset card that a command has changed a dataset for is replaced in the start section, as section 6 says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rollgen
from rollgen.cli.app import app
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards
from rollgen.format.locks import is_locked
from rollgen.inspect import card
from rollgen.inspect.stats import DatasetStats


def command(*arguments: object) -> None:
    result = CliRunner().invoke(app, [*map(str, arguments)], standalone_mode=False)
    assert result.exception is None


def compact(directory: Path, _: Path) -> Path:
    command("compact", directory)
    return directory


def repair(directory: Path, _: Path) -> Path:
    list_shards(directory)[0].write_bytes(b"damage")
    command("repair", directory)
    return directory


def merge(directory: Path, other: Path) -> Path:
    out = directory.with_name("merged")
    command("merge", directory, other, "--out", out)
    return out


def merge_from_python(directory: Path, other: Path) -> Path:
    rollgen.merge([directory, other], out := directory.with_name("merged"))
    return out


@pytest.mark.parametrize("change", [compact, repair, merge, merge_from_python])
def test_the_card_is_replaced_in_the_start_section(
    tmp_path: Path,
    make_run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, Path], Path],
) -> None:
    """Nobody comes to life, and nobody else writes one, meanwhile."""
    held: list[bool] = []
    text_of = card.dataset_card

    def watched(stats: DatasetStats) -> str:
        held.append(is_locked(tmp_path / stats.name / "journal" / "start-section.lock"))
        return text_of(stats)

    monkeypatch.setattr(card, "dataset_card", watched)
    directory = change(make_run(tmp_path / "one", 0), make_run(tmp_path / "two", 1))
    assert held == [True]
    assert (directory / "README.md").exists()


def test_a_writer_that_is_alive_writes_it(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """When it leaves; a card that tells of shards is written anew when none is left."""
    directory = make_run(tmp_path / "run", 0)
    with WriterSlot(directory, "w1"):
        card.refresh_card(directory)
        assert not (directory / "README.md").exists()
    card.refresh_card(directory)
    assert "in 2 files" in (directory / "README.md").read_text()
    for shard in list_shards(directory):
        shard.write_bytes(b"damage")
    CliRunner().invoke(app, ["repair", str(directory)], standalone_mode=False)
    assert "in 0 files" in (directory / "README.md").read_text()
