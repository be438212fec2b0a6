"""`logs/<time>-<writer>.log`: what one attempt told its user, a line each, for whoever asks afterwards.

A dataset travels, so lines are impersonal (`rollgen.inert.Discretion`): absolute paths lose their directories, and
nothing of the environment is written. They are inert, so that a log can be shown on a terminal. The lines before the
run is established (a refused one leaves no trace) are held back and written then.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from rollgen.format.files import open_descriptor
from rollgen.format.manifest import Manifest
from rollgen.format.schema import LOGS_DIR
from rollgen.inert import LINE, Discretion, brief
from rollgen.loop.place import Place
from rollgen.loop.report import Phase, Reporter, RunStats
from rollgen.preflight import Preflight

PROGRESS_SECONDS = 60.0


class RunLog:
    """A Reporter that keeps a log and passes everything on. Use as a context manager; an error that leaves is logged.

    The log is for people; that it cannot be written is an OSError like any other of this directory.
    """

    def __init__(self, reporter: Reporter, writer: str, discretion: Discretion) -> None:
        self._reporter = reporter
        self._writer = writer
        self._discretion = discretion
        self._held: list[str] = []
        self._file: IO[str] | None = None
        self._last_progress = 0.0
        self._stats: RunStats | None = None
        self._is_sampling = False

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._stats is not None:
            self._write(_totals(self._stats))
        self._write("ended" if error is None else f"ended: {type(error).__name__}: {error}")
        if self._file is not None:
            self._file.close()

    def phase(self, name: Phase) -> None:
        """See `report.Reporter`; so below."""
        self._write(f"phase: {name}")
        self._is_sampling = name == "generate"
        self._reporter.phase(name)

    def checked(self, prompts: int) -> None:
        self._reporter.checked(prompts)

    def note(self, message: str) -> None:
        self._write(message)
        self._reporter.note(message)

    def started(self, place: Place, preflight: Preflight, manifest: Manifest, stats: RunStats) -> None:
        self._open(place.directory)
        engine = manifest.attempts[-1].engine
        self._write(f"{engine.name} {engine.version} on {engine.device}, {manifest.model.name}, {manifest.capture}")
        self._reporter.started(place, preflight, manifest, stats)

    def progress(self, stats: RunStats) -> None:
        self._stats = stats
        now = time.monotonic()
        if self._is_sampling and now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self._write(_totals(stats))
        self._reporter.progress(stats)

    def grown(self, place: Place) -> None:
        self._reporter.grown(place)

    def _open(self, directory: Path) -> None:
        path = directory / LOGS_DIR / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self._writer}.log"
        path.parent.mkdir(exist_ok=True)
        descriptor = open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
        self._file.writelines(self._held)
        self._held.clear()

    def _write(self, message: str) -> None:
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {brief(self._discretion(message), LINE)}\n"
        if self._file is None:
            self._held.append(line)
        else:
            self._file.write(line)


def _totals(stats: RunStats) -> str:
    return (
        f"stored {stats.stored_before + stats.stored} of {stats.planned}, this attempt {stats.stored} "
        f"({stats.tokens} tokens in {stats.seconds:.0f} s), failed {stats.failed}, restarts {stats.restarts}"
    )
