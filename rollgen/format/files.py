"""Opening what should be a regular file, and reading no more of it than there should be.

In the place of a file a dataset from elsewhere may hold a pipe, which lets nobody open it until someone writes, a
device, which never ends, or gigabytes. To read, a link is followed: caches of downloads are made of them. To write it
is not, because its target may be anything on the machine: whoever writes into a dataset calls `refuse_links` first,
and opens files by `new_file` or, to add to them, by `open_descriptor`.

What is finished gets its final name by a hard link (`link`), which never takes the place of anything. Whoever will do
that sees first that it can be done (`check_hard_links`).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from rollgen.errors import DatasetError, UsageError
from rollgen.format.schema import (
    DATA_DIR,
    FAILURES_DIR,
    JOURNAL_DIR,
    LOGS_DIR,
    MANIFEST_FILE,
    PLAN_FILE,
    QUARANTINE_DIR,
    RETIRED_DIR,
    RETRY_FILES,
    REWARDS_DIR,
    TOKENIZER_DIR,
)

STAGE: Final = ".tmp-merge"
"""Directory in a dataset's: what is merged, until it becomes the dataset."""
_NAMED: Final = 40
"""Characters of a name in a temporary one, which may not be longer than 255 bytes either."""
_WRITES: Final = os.O_WRONLY | os.O_RDWR
_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""What file systems say that have none: exFAT, some of FUSE, shares of Windows."""
_ELSEWHERE: Final = "write to another directory (copy there what is to be continued), or to s3://bucket/run"


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; with flags to write, not of one behind a link.

    Raises OSError, and DatasetError for anything but a regular file.
    """
    if flags & _WRITES:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # not to wait for a pipe's other end
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and flags & _WRITES):
            raise _irregular(path) from None  # a pipe that nobody reads or a socket; a link
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


def _irregular(path: Path) -> DatasetError:
    return DatasetError(f"{path}: not a regular file; put the file there, or take this away")


def new_file(path: Path) -> BinaryIO:
    """A new regular file, open for writing, in place of whatever has this name: a temporary one. Raises OSError."""
    try:
        return path.open("xb")
    except FileExistsError:  # a link is one too, wherever it leads
        path.unlink()
        return path.open("xb")


def link(path: Path, name: Path, *, fix: str = _ELSEWHERE) -> None:
    """Give a file a second name, which must be free. Raises OSError, and DatasetError where there are no hard links."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno in _NO_HARD_LINKS:
            raise DatasetError(f"{name.parent}: this file system has no hard links; {fix}") from error
        raise


def check_hard_links(temporary: Path, *, fix: str = _ELSEWHERE) -> None:
    """Raise UsageError where `link` cannot work. Makes a file of this name, and takes it away. Raises OSError."""
    second = temporary.with_name(f"{temporary.name}-2")
    with ExitStack() as on_exit:
        for path in 2 * (temporary, second):  # again, where Ctrl-C has come instead of it
            on_exit.callback(path.unlink, missing_ok=True)
        second.unlink(missing_ok=True)
        new_file(temporary).close()
        try:
            link(temporary, second, fix=fix)
        except DatasetError as error:
            raise UsageError(str(error)) from error


def temporary_beside(path: Path) -> Path:
    """A new name in the same directory, of which a long one has the beginning: to be renamed to `path`."""
    return path.with_name(f".tmp-{path.name[:_NAMED]}-{secrets.token_hex(4)}")


def remove_leftover(path: Path) -> None:
    """Take away what was being made: a file or a link, or the stage of a merge with all that is in it."""
    if path.name == STAGE and path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_durably(path: Path, content: bytes) -> None:
    """A new file (`new_file`), on disk on return. Raises OSError."""
    with new_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_file(path: Path) -> None:
    """The bytes of a closed file are on disk on return. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def refuse_links(directory: Path) -> None:
    """Raise UsageError for a link among what a writer of a dataset may add to, rename onto or write into.

    A shard may be one, because a shard is never written again; so may the directory itself.
    """
    for path in _written_places(directory):
        if path.is_symlink():
            raise UsageError(
                f"{path}: is a link, and what is written into a dataset must not go elsewhere; put the file or "
                "directory itself there, or take the link away"
            )


def _written_places(directory: Path) -> Iterator[Path]:
    names = (DATA_DIR, JOURNAL_DIR, FAILURES_DIR, LOGS_DIR, REWARDS_DIR, TOKENIZER_DIR, QUARANTINE_DIR, RETIRED_DIR)
    yield from (directory / name for name in (*names, MANIFEST_FILE, PLAN_FILE))
    yield from directory.glob(RETRY_FILES)
    for place, pattern in ((TOKENIZER_DIR, "*"), (JOURNAL_DIR, "*"), (FAILURES_DIR, "*"), (REWARDS_DIR, "*.lock")):
        yield from (directory / place).glob(pattern)


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
