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

from rollgen.errors import DatasetError, UsageError
from rollgen.format.files import fsync_file
from rollgen.format.manifest import fsync_directory


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Where to write; what is there becomes `out` when the block ends without an error.

    Raises UsageError when `out` exists or cannot be made, and DatasetError when the disk does not take what is written.
    """
    temporary = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    if os.path.lexists(out):
        raise UsageError(f"--out {out}: exists; choose another path, or remove it")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made: {error.strerror or error}") from None
    try:
        yield temporary
        _settle(temporary)
        temporary.rename(out)
        fsync_directory(out.parent)
    except OSError as error:
        raise DatasetError(f"{out}: cannot be written: {error.strerror or error}; nothing is left of it") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed, it is not there


def _settle(directory: Path) -> None:
    """All files and directories are on disk on return."""
    for parent, _, names in os.walk(directory, topdown=False):
        for name in names:
            fsync_file(Path(parent, name))
        fsync_directory(Path(parent))
