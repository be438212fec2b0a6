"""`failures/<writer>.jsonl`: one line for each sample that could not be made, so that nothing is missing in silence.

Stages: `input` (a bad row that the user chose to skip: a tombstone, never tried again), `engine`, `capture` and
`invariant` (owed again by `--resume`). A stored key (prompt_id, sample_index, generation) wins over its failure lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from rollgen.errors import DatasetError
from rollgen.format.jsonlines import (
    Count,
    Count32,
    append_line,
    line_files,
    parse_lines,
    read_lines,
    truncate_torn_tail,
)
from rollgen.format.schema import FAILURES_DIR

Stage = Literal["input", "engine", "capture", "invariant"]
_TOMBSTONE: Final = b'"input"'
"""In the line of a skipped input row."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One sample that could not be made."""

    prompt_id: str
    prompt_index: Count
    sample_index: Count32
    stage: Stage
    error: str
    time: str
    """UTC, ISO 8601."""
    generation: Count32 = 0
    """Of a retry: which one."""


class FailureLog:
    """Appends to one writer's failure file. The caller holds the writer's slot."""

    def __init__(self, directory: Path, writer: str) -> None:
        self._path = directory / FAILURES_DIR / f"{writer}.jsonl"
        self._path.parent.mkdir(exist_ok=True)
        truncate_torn_tail(self._path)

    def record(
        self, prompt_id: str, prompt_index: int, sample_index: int, stage: Stage, error: str, *, generation: int = 0
    ) -> None:
        """Append one line. Raises DatasetError when it cannot be written."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = error.encode(errors="backslashreplace").decode()  # whatever an engine says must be readable again
        failure = Failure(prompt_id, prompt_index, sample_index, stage, text, now, generation)
        try:
            append_line(self._path, failure, durable=False)
        except OSError as problem:
            raise DatasetError(f"{self._path}: cannot be written: {problem.strerror}") from problem


def read_failures(directory: Path) -> Iterator[Failure]:
    """All failure lines of all writers. Raises DatasetError, naming file and line, for a damaged one."""
    for path in line_files(directory / FAILURES_DIR):
        for _, failure in read_lines(path, Failure):
            yield failure


def skipped_prompts(directory: Path) -> frozenset[int]:
    """Numbers of the prompts that have a line as tombstones. A damaged line says nothing, and keeps nobody from work.

    Raises DatasetError for anything but a regular file.
    """
    lines = (
        line for path in line_files(directory / FAILURES_DIR) for _, line in parse_lines(path, Failure, _TOMBSTONE)
    )
    return frozenset(line.prompt_index for line in lines if line is not None and line.stage == "input")
