"""The output directory before and between runs: what it holds, whether a run may start there, how it is cleaned.

Only names of the format are ever touched, so a directory that holds anything else is refused, never emptied. What is a
file in the format is removed as one: a directory in its place is somebody's, and refused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path

from rollgen.errors import ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot, start_section
from rollgen.format.journal import list_shards
from rollgen.format.layout import OWN_DIRECTORIES, OWN_FILES, OWN_PLACES
from rollgen.format.locks import is_locked
from rollgen.format.schema import DATA_DIR, JOURNAL_DIR, MANIFEST_FILE, REWARDS_DIR


class Holds(Enum):
    """What an output directory holds."""

    NOTHING = "nothing"
    """It does not exist, is empty, or has only the frame of a run that never got to start."""
    RUN = "a run"
    SHARDS = "shards without a manifest"
    FOREIGN = "other files"


def inspect_directory(directory: Path) -> Holds:
    """Look, and change nothing. Raises UsageError for a path that is not a directory, and cannot become one."""
    try:
        directory.stat()
    except FileNotFoundError:
        if directory.is_symlink():
            raise UsageError(f"--out {directory}: is a link to nothing; make what it links to, or remove it") from None
        return Holds.NOTHING
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL; a file above; a permission
        raise UsageError(f"--out {directory}: cannot be a directory: {getattr(error, 'strerror', error)}") from None
    if not directory.is_dir():
        raise UsageError(f"--out {directory}: exists and is not a directory")
    if (directory / MANIFEST_FILE).exists():
        return Holds.RUN
    names = {path.name for path in directory.iterdir()}
    journal = directory / JOURNAL_DIR
    if not names or (names == {JOURNAL_DIR} and not any(journal.iterdir())):  # or another run is just about to begin
        return Holds.NOTHING
    if not any(journal.glob("*.lock")):  # the first file that a run makes
        return Holds.FOREIGN
    if list_shards(directory):  # or another part has begun since we looked for its manifest
        return Holds.RUN if (directory / MANIFEST_FILE).exists() else Holds.SHARDS
    only_ours = all(name.startswith(".tmp-") or any(fnmatch(name, own) for own in OWN_PLACES) for name in names)
    return Holds.NOTHING if only_ours and not _foreign_data(directory) else Holds.FOREIGN


def inside_dataset(path: Path) -> Path | None:
    """The nearest directory above `path`, links followed, that is a dataset; None where there is none.

    What has no place in a dataset is written elsewhere: a copy of it would take that along, and `--clean` leave it.
    """
    for parent in Path(os.path.realpath(path)).parents:
        if os.path.lexists(parent / MANIFEST_FILE):
            return parent
    return None


def check_start(directory: Path, holds: Holds, *, resume: bool, clean: bool) -> None:
    """Refuse to start where something is in the way. Raises UsageError naming the flag that helps."""
    if resume and clean:
        raise UsageError("--resume and --clean exclude each other")
    if holds is Holds.FOREIGN:
        raise UsageError(f"--out {directory}: holds files that are not a rollgen run; choose another directory")
    if holds is Holds.SHARDS and not clean:
        raise UsageError(
            f"--out {directory}: holds shards but no {MANIFEST_FILE}; put it back from a copy, replace the run with "
            "--clean, or choose another --out"
        )
    if holds is Holds.RUN and not (resume or clean):
        raise UsageError(
            f"--out {directory}: holds a run already; continue it with --resume, replace it with --clean, "
            "or choose another --out"
        )


def clean_directory(directory: Path) -> None:
    """Remove a run's own files and no others. The caller holds the writer's slot, whose lock file stays.

    Raises, having removed nothing, as `check_clean` does.
    """
    check_clean(directory)
    for pattern in OWN_FILES:
        for path in _files(directory, pattern):
            path.unlink()
    for name in OWN_DIRECTORIES:
        emptied = directory / name
        if emptied.is_dir() and not any(emptied.iterdir()):
            emptied.rmdir()


def check_clean(directory: Path) -> None:
    """Raise ResumeRefused while somebody scores what is there, and UsageError for a directory in a file's place."""
    for lock in (directory / REWARDS_DIR).glob("*.lock"):
        if is_locked(lock):
            raise ResumeRefused(f"{lock}: `rollgen score` is at work there; wait for it, or stop it")
    for pattern in OWN_FILES:
        for path in _files(directory, pattern):
            if path.is_dir() and not path.is_symlink():
                raise UsageError(f"{path}: is a directory, where a run has a file; move it out of there")


def _files(directory: Path, pattern: str) -> list[Path]:
    """What has a name of this pattern, but for the directories that runs make."""
    made = {directory / name for name in OWN_DIRECTORIES}
    return [path for path in directory.glob(pattern) if path not in made]


def remove_frame(slot: WriterSlot) -> None:
    """Take the directory away again that a start made which came to nothing, unless it holds something by now.

    Whoever is in the start section is at work there: nobody waits for that one to leave.
    """
    directory = slot.directory
    with suppress(ResumeRefused), start_section(directory, given_up=lambda: True):
        if inspect_directory(directory) is Holds.NOTHING and not slot.others():
            aside = tempfile.mkdtemp(prefix=".tmp-", dir=directory.parent)
            directory.rename(aside)  # at once: whoever starts meanwhile makes a new one
            shutil.rmtree(aside)


def _foreign_data(directory: Path) -> bool:
    """Whether something that is not a shard lies where shards do."""
    data = directory / DATA_DIR
    return data.is_dir() and any(not path.name.startswith(".tmp-") for path in data.iterdir())
