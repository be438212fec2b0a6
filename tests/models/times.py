"""When the files of a dataset were written, as far as it matters to who looks at a run."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from rollgen.format.journal import list_shards
from rollgen.format.schema import JOURNAL_DIR, LOGS_DIR, MANIFEST_FILE

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
"""Of the last attempt in the manifest of these datasets."""


def set_times(directory: Path, commits: list[float], *, manifest: float = 0.0) -> None:
    """Set when the manifest and each shard were written, in seconds since the attempt's start."""
    os.utime(directory / MANIFEST_FILE, (STARTED + manifest,) * 2)
    for path, seconds in zip(list_shards(directory), commits, strict=True):
        os.utime(path, (STARTED + seconds,) * 2)


def write_log(directory: Path, writer: str, seconds: float, ended: float | None = None) -> None:
    """Of an attempt that began to sample so many seconds after STARTED, and has `ended` or goes on."""
    began = datetime.fromtimestamp(STARTED + seconds, UTC)
    lines = ["2026-01-02T03:00:00Z phase: load", f"{began:%FT%TZ} phase: generate"]
    if ended is not None:
        lines.append(f"{datetime.fromtimestamp(STARTED + ended, UTC):%FT%TZ} ended")
    path = directory / LOGS_DIR / f"{began:%Y%m%dT%H%M%S}-{writer}.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    os.utime(path, (datetime.fromisoformat(lines[-1].split()[0]).timestamp(),) * 2)


def begin(directory: Path) -> None:
    """Let the writer w0 look as if it had begun: its lock is older than the manifest, which has its attempt."""
    os.utime(directory / JOURNAL_DIR / "w0.lock", (STARTED - 1,) * 2)
