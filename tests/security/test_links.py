"""A dataset from elsewhere may hold links and pipes in any place: nothing behind a link changes, nobody waits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgen.curate.compact import compact
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.journal import list_shards
from rollgen.inspect.card import write_card
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.repair import repair_dataset


def resume(directory: Path) -> None:
    """What everyone does who comes back."""
    with WriterSlot(directory, "w0"):
        FailureLog(directory, "w0").record("p0", 0, 0, "engine", "died")


COMMANDS: dict[str, Callable[[Path], object]] = {
    "compact": compact,
    "repair": repair_dataset,
    "repair --dry-run": lambda directory: repair_dataset(directory, dry_run=True),
    "resume": resume,
}


@pytest.fixture
def dataset(make_dataset: Callable[..., Path], tmp_path: Path) -> Path:
    """Two shards that compaction would replace; all directories are there."""
    directory = make_dataset(tmp_path / "run")
    resume(directory)
    for name in ("logs", "tokenizer", "quarantine", "retired"):
        (directory / name).mkdir()
    return directory


def content(path: Path) -> dict[str, bytes]:
    """Of all files at or below a place."""
    return {str(each): each.read_bytes() for each in [path, *path.rglob("*")] if each.is_file()}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    "name",
    ["data", "journal", "failures", "quarantine", "journal/w0.jsonl", "journal/w0.lock", "failures/w0.jsonl"],
)
def test_nothing_behind_a_link_changes(
    dataset: Path, tmp_path: Path, name: str, command: Callable[[Path], object]
) -> None:
    """Torn lines, leftovers and shards would be cut, removed and replaced there. To read it is no different."""
    outside = tmp_path / "outside"
    (dataset / name).rename(outside)
    (dataset / name).symlink_to(outside)
    if outside.is_dir():
        (outside / ".tmp-compact-000000").write_bytes(b"precious")
    else:
        outside.write_bytes(outside.read_bytes() + b"precious, without a newline")
    before = content(outside)
    with pytest.raises(UsageError, match=rf"/{name}: is a link, and what is written into a dataset must not"):
        command(dataset)
    assert content(outside) == before
    assert verify_dataset(dataset).is_clean


@pytest.mark.parametrize("name", ["compact.jsonl", "compact.lock", "repair.lock", "start-section.lock"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_nothing_is_made_behind_a_link(dataset: Path, name: str, command: Callable[[Path], object]) -> None:
    """Of files that a dataset need not have."""
    (dataset / "journal" / name).unlink(missing_ok=True)
    (dataset / "journal" / name).symlink_to(dataset.parent / "outside")
    with pytest.raises(UsageError, match=rf"/{name}: is a link"):
        command(dataset)
    assert not (dataset.parent / "outside").exists()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_templates_behind_a_link_stay(dataset: Path, tmp_path: Path, command: Callable[[Path], object]) -> None:
    """A tokenizer may have a directory of them, which `--clean` empties: not somebody's."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "own.jinja").write_text("precious")
    (dataset / "tokenizer" / "additional_chat_templates").symlink_to(outside)
    with pytest.raises(UsageError, match=r"/additional_chat_templates: is a link"):
        command(dataset)
    assert (outside / "own.jinja").exists()


def test_linked_shards_are_replaced(dataset: Path, tmp_path: Path) -> None:
    """As in caches of downloads: the links go, what they point to stays."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for shard in list_shards(dataset):
        shard.rename(cache / shard.name)
        shard.symlink_to(cache / shard.name)
    before = content(cache)
    assert compact(dataset).replaced == len(before) == 2
    assert content(cache) == before
    assert verify_dataset(dataset).is_clean


@pytest.mark.parametrize("where", ["data/.tmp-w0-000002", "data/.tmp-compact-000000", ".tmp-rollgen.json-1"])
def test_leftovers_that_are_links(dataset: Path, tmp_path: Path, where: str) -> None:
    """They are removed, as those of a crash are."""
    (tmp_path / "outside").write_bytes(b"precious")
    (dataset / where).symlink_to(tmp_path / "outside")
    resume(dataset)
    assert not os.path.lexists(dataset / where)
    assert (tmp_path / "outside").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["journal/start-section.lock", "journal/w0.lock", "journal/w0.jsonl"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_pipes(dataset: Path, name: str, command: Callable[[Path], object]) -> None:
    """Nobody waits for the other end. A look at who is alive does not need the section's lock."""
    (dataset / name).unlink()
    os.mkfifo(dataset / name)
    if name == "journal/start-section.lock" and command is COMMANDS["repair --dry-run"]:
        command(dataset)
        return
    with pytest.raises(DatasetError, match=rf"/{name}: not a regular file"):
        command(dataset)


@pytest.mark.parametrize("kind", ["pipe", "link", "link to nothing", "directory"])
def test_a_card_that_is_none(dataset: Path, tmp_path: Path, kind: str) -> None:
    """It is somebody's, and stays."""
    card = dataset / "README.md"
    write_card(dataset)
    written = card.read_bytes()
    if kind == "link":
        shutil.move(card, tmp_path / "outside")
        card.symlink_to(tmp_path / "outside")
    else:
        card.unlink()
        {"pipe": os.mkfifo, "directory": os.mkdir}.get(kind, lambda path: path.symlink_to("/nowhere"))(card)
    write_card(dataset)
    assert card.is_symlink() is kind.startswith("link")
    assert not card.is_file() or card.read_bytes() == written
