"""Whose tokenizer a merged dataset gets: the one of the manifests, shown by its hash, and never another silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rollgen.curate.merge import merge
from rollgen.errors import DatasetError
from rollgen.prompts.fingerprint import saved_tokenizer_sha256, tokenizer_sha256

MakeRun = Callable[..., Path]
Save = Callable[[Path], Path]
RIGHT = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def save(tiny_model: Path) -> Save:
    """`save(dataset)`: the tokenizer of the tiny model. Returns where it is."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def saved(directory: Path) -> Path:
        tokenizer.save_pretrained(directory / "tokenizer")
        return directory / "tokenizer"

    return saved


@pytest.fixture
def two(tmp_path: Path, tiny_model: Path, make_run: MakeRun) -> list[Path]:
    """Runs whose manifests say that tokenizer, without its files."""
    said = {"tokenizer_sha256": tokenizer_sha256(AutoTokenizer.from_pretrained(tiny_model))}
    return [make_run(tmp_path / name, number, said=said) for number, name in enumerate(("base", "step-1"))]


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "tokenizer").iterdir()}


def edit(tokenizer: Path, one: str = "a", other: str = "b") -> None:
    """Two tokens have each other's ids."""
    path = tokenizer / "tokenizer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    ids = settings["model"]["vocab"]
    ids[one], ids[other] = ids[other], ids[one]
    path.write_text(json.dumps(settings), encoding="utf-8")


def test_the_hash_of_saved_files(tmp_path: Path, tiny_model: Path, save: Save) -> None:
    """It is that of the tokenizer; of other content another one, and of no tokenizer none."""
    place = save(tmp_path)
    tokenizer, settings = ((place / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json"))
    wanted = tokenizer_sha256(AutoTokenizer.from_pretrained(tiny_model))
    assert saved_tokenizer_sha256(tokenizer, settings) == wanted
    assert saved_tokenizer_sha256(tokenizer, b"{}") != wanted
    for junk in (b"", b"junk", b"{}", b"\xff", b"[1]"):
        assert saved_tokenizer_sha256(junk, settings) is None


def test_one_that_is_right(two: list[Path], tmp_path: Path, save: Save) -> None:
    """Of the second dataset, because the first has none; what else lies there stays behind."""
    (save(two[1]) / ".env").write_text("KEY=1")
    assert merge(two, tmp_path / "out").notes == ()
    assert names(tmp_path / "out") >= RIGHT
    assert ".env" not in names(tmp_path / "out")
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_bytes() == (
        two[1] / "tokenizer/tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("damage", ["edited", "junk"])
def test_the_first_is_wrong(two: list[Path], tmp_path: Path, save: Save, damage: str) -> None:
    """The right one is taken, and the other told."""
    wrong, right = map(save, two)
    edit(wrong) if damage == "edited" else (wrong / "tokenizer.json").write_text("junk")
    [note] = merge(two, tmp_path / "out").notes
    assert note == f"the tokenizer is that of {two[1]}, as its manifest says; others have: {two[0]}"
    assert (tmp_path / "out/tokenizer/tokenizer.json").read_bytes() == (right / "tokenizer.json").read_bytes()


def test_none_is_right(two: list[Path], tmp_path: Path, save: Save) -> None:
    """Those that agree are taken and told; of those that do not, none."""
    first, second = map(save, two)
    edit(first)
    edit(second)
    [note] = merge(two, tmp_path / "same").notes
    assert note == f"the tokenizer is that of {two[0]}, which cannot be shown to be the one of its manifest"
    assert names(tmp_path / "same") >= RIGHT
    edit(second, "c", "d")
    [note] = merge(two, tmp_path / "out").notes
    assert note.startswith("no tokenizer was copied: the datasets have different ones")
    assert not (tmp_path / "out" / "tokenizer").exists()


@pytest.mark.parametrize("linked", ["tokenizer", "tokenizer/tokenizer.json"])
def test_what_is_behind_a_link(two: list[Path], tmp_path: Path, save: Save, linked: str) -> None:
    """It is not of the dataset."""
    place = save(tmp_path / "elsewhere")
    if "/" in linked:
        (two[0] / "tokenizer").mkdir()
    (two[0] / linked).symlink_to(place if linked == "tokenizer" else place / "tokenizer.json")
    [note] = merge(two, tmp_path / "out").notes
    assert note == "no tokenizer was copied: what there is of one is damaged or behind links"
    assert not (tmp_path / "out" / "tokenizer").exists()


def test_what_is_no_tokenizer(two: list[Path], tmp_path: Path, save: Save) -> None:
    """It is not copied, though no other dataset has one."""
    (save(two[0]) / "tokenizer.json").write_text("{}")
    [note] = merge(two, tmp_path / "out").notes
    assert note.startswith("no tokenizer was copied: what there is of one is damaged")
    assert not (tmp_path / "out" / "tokenizer").exists()


def test_one_that_is_too_large(two: list[Path], tmp_path: Path, save: Save) -> None:
    """No tokenizer is: it is an error, which names it."""
    with (save(two[0]) / "tokenizer.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(DatasetError, match=r"tokenizer\.json: larger than 64 MiB"):
        merge(two, tmp_path / "out")
    assert not (tmp_path / "out").exists()
