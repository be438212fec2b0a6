"""The directory of an export: it appears under its name when everything is in it, and on disk, or not at all.

Files are written into a directory beside it, `.tmp-<name>-*` (of a long name the beginning), that is renamed at the
end. What somebody made there meanwhile is not replaced, unless it is an empty directory. An error or Ctrl-C removes the
temporary one; what is killed leaves it, which no trainer takes for an export, and which may be deleted.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollgen.directory import inside_dataset
from rollgen.errors import DatasetError, Unreadable, UsageError
from rollgen.format.files import fsync_file, temporary_beside
from rollgen.format.manifest import fsync_directory
from rollgen.remote.objects import is_url, local_path


def new_path(out: str | os.PathLike[str]) -> Path:
    """Where the directory will be. Raises UsageError where there is something, in a dataset, and where none can be."""
    if is_url(out):
        raise UsageError(f"--out {out}: an export is a directory; give a path, and copy what is there to the storage")
    path = local_path(out)
    _check_free(path)
    if path.name == "..":
        raise UsageError(f"--out {path}: gives the new directory no name; choose another path")
    for parent in path.parents:
        if parent.is_symlink() and not parent.exists():
            raise UsageError(f"--out {path}: {parent} is a link to nothing; make what it links to, or remove it")
    if (dataset := inside_dataset(path)) is not None:
        raise UsageError(f"--out {path}: is inside the dataset {dataset}; choose another path")
    return path


def _check_free(path: Path) -> None:
    """Raise UsageError unless nothing has this name, and something could have it."""
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except ValueError:
        raise UsageError(f"--out {str(path)!r}: no path has a NUL in it, or half a character") from None
    except OSError as error:  # a name that is too long, a file above, a loop of links, a permission
        raise UsageError(f"--out {path}: cannot be made: {error.strerror or error}") from None
    raise UsageError(f"--out {path}: exists; choose another path, or remove it")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Where to write; what is there becomes `out`, a `new_path`, when the block ends without an error.

    Raises UsageError when `out` cannot be made, or is there by then, DatasetError when the disk does not take what is
    written, and Unreadable for another file that the block could not read.
    """
    temporary = temporary_beside(out)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made: {error.strerror or error}") from None
    try:
        yield temporary
        _settle(temporary)
        fsync_directory(out.parent)  # it can be, and what was made above it is known there
        _rename(temporary, out)
        fsync_directory(out.parent)
    except OSError as error:
        raise _told(error, out, temporary) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed, it is not there


def _rename(temporary: Path, out: Path) -> None:
    """Raises UsageError where there is something by now; an empty directory is replaced."""
    try:
        temporary.rename(out)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise UsageError(f"--out {out}: somebody else made it meanwhile; choose another path") from None
        raise


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
