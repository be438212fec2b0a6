"""What an output directory holds, whether a run may start there, and how it is emptied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollgen.directory import Holds, check_start, clean_directory, inside_dataset, inspect_directory, remove_frame
from rollgen.errors import ResumeRefused, UsageError
from rollgen.format.commit import Part, WriterSlot, start_section
from rollgen.format.layout import CARD_FILE
from rollgen.format.reward_writer import RewardWriter

OWN = ("rollgen.json", "plan.parquet", "data", "journal", "failures", "rewards", "tokenizer", "quarantine", CARD_FILE)


def lay_out(directory: Path, *names: str) -> Path:
    """Make these files, or directories where the name ends in `/`."""
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.touch()
    return directory


@pytest.mark.parametrize(
    ("names", "holds"),
    [
        pytest.param((), Holds.NOTHING, id="empty"),
        pytest.param(("journal/",), Holds.NOTHING, id="another run is just about to begin"),
        pytest.param(("journal/x",), Holds.FOREIGN, id="a journal of something else"),
        pytest.param(("data/", "journal/w0.lock"), Holds.NOTHING, id="the frame of a run that never started"),
        pytest.param((".tmp-w0-plan.parquet", "data/.tmp-w0-000000", "journal/w0.lock"), Holds.NOTHING, id="leftovers"),
        pytest.param(
            ("plan.parquet", "tokenizer/x", "journal/w0.lock"), Holds.NOTHING, id="killed before the manifest"
        ),
        pytest.param(("retry-1.parquet", "journal/w0.lock"), Holds.NOTHING, id="killed while it was cleaned"),
        pytest.param(("plan.parquet", "tokenizer/x", "data/"), Holds.FOREIGN, id="the user's files by the same names"),
        pytest.param(("data/train.jsonl", "journal/w0.lock"), Holds.FOREIGN, id="the user's file among the data"),
        pytest.param(("rollgen.json",), Holds.RUN, id="a manifest"),
        pytest.param(("data/part-w0-000000.parquet", "journal/w0.lock"), Holds.SHARDS, id="a shard without a manifest"),
        pytest.param(("data/part-w0-000000.parquet",), Holds.FOREIGN, id="a file named like a shard"),
        pytest.param(("rollgen.json", "notes.txt"), Holds.RUN, id="a run and the user's own files"),
        pytest.param(("notes.txt",), Holds.FOREIGN, id="a file"),
        pytest.param(("src/",), Holds.FOREIGN, id="a directory"),
        pytest.param((CARD_FILE,), Holds.FOREIGN, id="a README of something else"),
        pytest.param((".git/",), Holds.FOREIGN, id="hidden files"),
    ],
)
def test_what_a_directory_holds(tmp_path: Path, names: tuple[str, ...], holds: Holds) -> None:
    """Only names of the format are ours; looking changes nothing."""
    lay_out(tmp_path, *names)
    before = sorted(tmp_path.rglob("*"))
    assert inspect_directory(tmp_path) is holds
    assert sorted(tmp_path.rglob("*")) == before


def test_another_part_begins_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes its manifest and a shard after we have looked for a manifest: that is a run."""
    lay_out(tmp_path, "journal/start-section.lock")

    def list_shards(directory: Path) -> list[Path]:
        lay_out(directory, "rollgen.json", "data/part-w0-000000.parquet")
        return [directory / "data/part-w0-000000.parquet"]

    monkeypatch.setattr("rollgen.directory.list_shards", list_shards)
    assert inspect_directory(tmp_path) is Holds.RUN


def test_nothing_is_there(tmp_path: Path) -> None:
    """A path that does not exist holds nothing, and is not made."""
    assert inspect_directory(tmp_path / "out") is Holds.NOTHING
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("link", "is a link to nothing"),
        ("a\0b", "cannot be a directory: embedded null"),
        ("x" * 300, "cannot be a directory: File name too long"),
        ("file/out", "cannot be a directory: Not a directory"),
    ],
)
def test_what_cannot_be_a_directory(tmp_path: Path, name: str, expected: str) -> None:
    """It is told before anything is made."""
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"--out .*: {expected}"):
        inspect_directory(tmp_path / name)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """The flag and the path are named."""
    path = lay_out(tmp_path, "out") / "out"
    with pytest.raises(UsageError, match=f"^--out {path}: exists and is not a directory"):
        inspect_directory(path)


@pytest.mark.parametrize(
    ("holds", "resume", "clean"),
    [
        (Holds.NOTHING, False, False),
        (Holds.NOTHING, True, False),
        (Holds.NOTHING, False, True),
        (Holds.RUN, True, False),
        (Holds.RUN, False, True),
        (Holds.SHARDS, False, True),
    ],
)
def test_may_start(holds: Holds, resume: bool, clean: bool) -> None:
    """On nothing always; on a run with the one flag or the other."""
    check_start(Path("out"), holds, resume=resume, clean=clean)


@pytest.mark.parametrize(
    ("holds", "resume", "clean", "expected"),
    [
        (Holds.RUN, False, False, "--out out: holds a run already; continue it with --resume, replace it with --clean"),
        (Holds.SHARDS, False, False, "--out out: holds shards but no rollgen.json; put it back from a copy"),
        (Holds.SHARDS, True, False, "holds shards but no rollgen.json"),
        (Holds.FOREIGN, False, False, "--out out: holds files that are not a rollgen run; choose another directory"),
        (Holds.FOREIGN, True, False, "holds files that are not a rollgen run"),
        (Holds.FOREIGN, False, True, "holds files that are not a rollgen run"),
        (Holds.RUN, True, True, "--resume and --clean exclude each other"),
        (Holds.NOTHING, True, True, "--resume and --clean exclude each other"),
    ],
)
def test_may_not_start(holds: Holds, resume: bool, clean: bool, expected: str) -> None:
    """Foreign files are never cleaned away, whatever is asked."""
    with pytest.raises(UsageError) as raised:
        check_start(Path("out"), holds, resume=resume, clean=clean)
    assert expected in str(raised.value)


def test_clean_removes_the_run_and_nothing_else(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """The user's own files stay, and so does the lock of the writer that cleans."""
    directory = make_dataset(tmp_path / "out")
    lay_out(
        directory,
        "failures/w0.jsonl",
        "tokenizer/tokenizer.json",
        "tokenizer/additional_chat_templates/tools.jinja",
        "retry-1.parquet",
        "quarantine/part-w0-000009.parquet",
        "retired/part-w0-000008.parquet",
        "rewards/correct-000000.parquet",
        "rewards/.tmp-correct-000001",
        "rewards/correct.lock",
        "journal/replacement.json",
        CARD_FILE,
        "notes.txt",
        "data/mine.txt",
    )
    assert set(OWN) < {path.name for path in directory.iterdir()}
    with WriterSlot(directory, "w0", afresh=True):
        clean_directory(directory)
    left = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    assert left == ["data", "data/mine.txt", "journal", "journal/start-section.lock", "journal/w0.lock", "notes.txt"]


@pytest.mark.parametrize("name", ["tokenizer/notes/", "data/part-mine.parquet/", "rollgen.json/"])
def test_a_directory_in_a_files_place(tmp_path: Path, name: str) -> None:
    """It is somebody's: nothing of the run is removed."""
    directory = lay_out(tmp_path / "out", "plan.parquet", name, f"{name}mine.txt")
    with pytest.raises(UsageError, match=f"{name[:-1]}: is a directory, where a run has a file"):
        clean_directory(directory)
    assert (directory / "plan.parquet").exists()
    assert (directory / name / "mine.txt").exists()


def test_clean_while_somebody_scores(tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """What is scored stays, and so do the rewards that there are."""
    directory = make_dataset(tmp_path / "out")
    with (
        RewardWriter(directory, "correct", "digest"),
        pytest.raises(ResumeRefused, match=r"correct\.lock: `rollgen score` is at work there"),
    ):
        clean_directory(directory)
    assert inspect_directory(directory) is Holds.RUN
    clean_directory(directory)
    assert not (directory / "rewards").exists()


def test_clean_of_half_a_run(tmp_path: Path) -> None:
    """What is not there need not be removed: a clean that was killed can be repeated."""
    with WriterSlot(tmp_path, "w0"):
        clean_directory(tmp_path)
    assert inspect_directory(tmp_path) is Holds.NOTHING


def test_an_empty_frame_is_taken_away(tmp_path: Path) -> None:
    """What a start made that came to nothing, but not what another writer is using, or what holds something."""
    directory = tmp_path / "out"
    with WriterSlot(directory, "w0", Part(0, 2)) as slot:
        with WriterSlot(directory, "w1", Part(1, 2)):
            remove_frame(slot)
            assert directory.exists()
        (directory / "notes.txt").touch()
        remove_frame(slot)
        assert directory.exists()
        (directory / "notes.txt").unlink()
        remove_frame(slot)
        assert not directory.exists()


@pytest.mark.timeout(180)
def test_a_frame_that_somebody_starts_in(tmp_path: Path) -> None:
    """It is left to whom is in the start section, who is not waited for."""
    with WriterSlot(tmp_path / "out", "w0") as slot, start_section(slot.directory):
        remove_frame(slot)
        assert slot.directory.exists()


def test_what_is_inside_a_dataset(tmp_path: Path) -> None:
    """At any depth, by a link too; a dataset itself, or what stands beside it, is not."""
    directory = lay_out(tmp_path / "run", "rollgen.json", "data/")
    (tmp_path / "link").symlink_to(directory / "data")
    for path in ("run/new", "run/data/a/new", "link/new"):
        assert inside_dataset(tmp_path / path) == directory
    assert inside_dataset(directory) is None
    assert inside_dataset(tmp_path / "new") is None
