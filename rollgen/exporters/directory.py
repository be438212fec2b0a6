"""The directory of an export: it appears under its name when everything is in it, and on disk, or not at all.

Files are written into a directory beside it, `.tmp-<name>-*`, that is renamed at the end. An error or Ctrl-C removes
that one; what is killed leaves it, which no trainer takes for an export, and which may be deleted.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollgen.errors import DatasetError, Unreadable, UsageError
from rollgen.format.files import fsync_file
from rollgen.format.manifest import fsync_directory
from rollgen.remote.objects import is_url, local_path


def check_out(out: Path, dataset: str | os.PathLike[str]) -> None:
    """Raise UsageError for an `out` that is there, that is no name of a directory, and that is inside the dataset."""
    if "\0" in str(out):
        raise UsageError(f"--out {str(out)!r}: no path has a NUL in it")
    if os.path.lexists(out):
        raise UsageError(f"--out {out}: exists; choose another path, or remove it")
    if out.name == "..":
        raise UsageError(f"--out {out}: gives the new directory no name; choose another path")
    if not is_url(dataset) and Path(os.path.realpath(out)).is_relative_to(local_path(dataset).resolve()):
        raise UsageError(f"--out {out}: is inside the dataset; choose another path")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Where to write; what is there becomes `out`, which `check_out` has checked, when the block ends without an error.

    Raises UsageError when `out` cannot be made, DatasetError when the disk does not take what is written, and
    Unreadable for another file that the block could not read.
    """
    temporary = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made: {error.strerror or error}") from None
    try:
        yield temporary
        _settle(temporary)
        fsync_directory(out.parent)  # it can be, and what was made above it is known there
        temporary.rename(out)
        fsync_directory(out.parent)
    except OSError as error:
        raise _told(error, out, temporary) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed, it is not there


def _told(error: OSError, out: Path, temporary: Path) -> DatasetError:
    """Of what is written, libraries often name no file."""
    reason = error.strerror or str(error)
    if isinstance(error.filename, str) and not Path(error.filename).is_relative_to(temporary):
        return Unreadable(f"{error.filename}: this machine could not read it: {reason}; nothing is left of {out}")
    return DatasetError(f"{out}: cannot be written: {reason}; nothing is left of it")


def _settle(directory: Path) -> None:
    """All files and directories are on disk on return."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            fsync_file(Path(parent, name))
        fsync_directory(Path(parent))
