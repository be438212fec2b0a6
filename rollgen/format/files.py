"""Opening what should be a regular file, and reading no more of it than there should be.

In the place of a file a dataset from elsewhere may hold a pipe, which lets nobody open it until someone writes, a
device, which never ends, or gigabytes. A link is followed: caches of downloads are made of them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from rollgen.errors import DatasetError


def open_descriptor(path: Path) -> int:
    """A descriptor to read a regular file. Raises OSError, and DatasetError for anything but a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not to wait for a pipe's writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatasetError(f"{path}: not a regular file; put the file there, or take this away")
    return descriptor


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises OSError, and DatasetError for anything but a regular file."""
    return os.fdopen(open_descriptor(path), "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All of a regular file. Raises OSError, and DatasetError for anything else or one that is larger."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DatasetError(f"{path}: larger than {max_bytes >> 20} MiB, which no such file is; put it back from a copy")
    return content
