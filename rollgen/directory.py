"""The output directory before and between runs: what it holds, whether a run may start there, how it is cleaned.

Only names of the format are ever touched, so a directory that holds anything else is refused, never emptied.
"""

from __future__ import annotations

import shutil
from enum import Enum
from pathlib import Path

from rollgen.errors import UsageError
from rollgen.format.commit import list_shards
from rollgen.format.schema import (
    DATA_DIR,
    FAILURES_DIR,
    JOURNAL_DIR,
    MANIFEST_FILE,
    PLAN_FILE,
    QUARANTINE_DIR,
    TOKENIZER_DIR,
)

CARD_FILE = "README.md"
_OWN_NAMES = frozenset(
    {MANIFEST_FILE, PLAN_FILE, DATA_DIR, JOURNAL_DIR, FAILURES_DIR, TOKENIZER_DIR, QUARANTINE_DIR, CARD_FILE}
)


class Holds(Enum):
    """What an output directory holds."""

    NOTHING = "nothing"
    """It does not exist, is empty, or has only the empty frame of a run that never got to start."""
    RUN = "a run"
    FOREIGN = "other files"


def inspect_directory(directory: Path) -> Holds:
    """Look, and change nothing. Raises UsageError for a path that is not a directory."""
    if not directory.exists():
        return Holds.NOTHING
    if not directory.is_dir():
        raise UsageError(f"--out {directory}: exists and is not a directory")
    if (directory / MANIFEST_FILE).exists() or list_shards(directory):
        return Holds.RUN
    names = {path.name for path in directory.iterdir() if not path.name.startswith(".tmp-")}
    return Holds.NOTHING if names <= _OWN_NAMES - {CARD_FILE} else Holds.FOREIGN


def check_start(directory: Path, holds: Holds, *, resume: bool, clean: bool) -> None:
    """Refuse to start where something is in the way. Raises UsageError naming the flag that helps."""
    if resume and clean:
        raise UsageError("--resume and --clean exclude each other")
    if holds is Holds.FOREIGN:
        raise UsageError(f"--out {directory}: holds files that are not a rollgen run; choose another directory")
    if holds is Holds.RUN and not (resume or clean):
        raise UsageError(
            f"--out {directory}: holds a run already; continue it with --resume, replace it with --clean, "
            "or choose another --out"
        )


def clean_directory(directory: Path) -> None:
    """Remove a run. The caller holds the writer's slot, whose lock file stays."""
    for name in _OWN_NAMES - {JOURNAL_DIR}:
        path = directory / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in (directory / JOURNAL_DIR).glob("*.jsonl"):
        path.unlink()
    (directory / DATA_DIR).mkdir()
