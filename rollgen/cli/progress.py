"""How a run shows itself on stderr: a live bar on a terminal, log lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from rollgen.inert import LINE, brief
from rollgen.inspect.card import begin_card, refresh_card
from rollgen.inspect.terminal import counted

if TYPE_CHECKING:
    from rollgen.format.manifest import Manifest
    from rollgen.loop.place import Place
    from rollgen.loop.report import Phase, RunStats
    from rollgen.preflight import Preflight

LOG_SECONDS = 10.0
_PHASES = {"check": "checking prompts", "load": "loading the model", "generate": "sampling"}
"""But for `probe`."""


class ConsoleReporter:
    """`loop.report.Reporter` on stderr. Use as a context manager."""

    def __init__(self, style: Literal["auto", "bar", "log", "none"], *, servers: int = 0) -> None:
        """`servers`: how many the run has."""
        self._console = Console(stderr=True)
        self._style = ("bar" if self._console.is_terminal else "log") if style == "auto" else style
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
        )
        self._task: TaskID | None = None
        self._last_log = 0.0
        self._is_sampling = False
        self._servers = servers

    def __enter__(self) -> Self:
        if self._style == "bar":
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._style == "bar":
            self._bar.stop()

    def phase(self, name: Phase) -> None:
        """See `loop.report.Reporter`; so below."""
        self._is_sampling = name == "generate"
        description = f"probing {counted(self._servers, 'server')}" if name == "probe" else _PHASES[name]
        if self._style == "log":
            self._print(description)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(description, total=None, figures="")

    def checked(self, prompts: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, figures=f"{prompts:,} prompts")

    def note(self, message: str) -> None:
        if self._style != "none":
            self._print(message)

    def started(self, place: Place, preflight: Preflight, manifest: Manifest, stats: RunStats) -> None:
        if place.remote is None:
            begin_card(place.directory)  # measuring all of it again can wait for the end
        summary, shard = preflight.summary, preflight.config.shard
        what = f"{counted(summary.samples, 'sample')} of {counted(summary.prompts, 'prompt')} to {place}"
        if shard is not None:
            what = f"part {shard.replace('/', ' of ')}: {stats.planned:,} of the {what}"
        self.note(f"{manifest.model.name} ({manifest.model.dtype}), capture {manifest.capture}: {what}")

    def grown(self, place: Place) -> None:
        refresh_card(place.directory, remote=place.remote)

    def progress(self, stats: RunStats) -> None:
        if not self._is_sampling:
            return
        stored = stats.stored_before + stats.stored
        figures = _figures(stats)
        if self._task is not None:
            self._bar.update(self._task, total=stats.planned - stats.tombstones, completed=stored, figures=figures)
        now = time.monotonic()
        if self._style == "log" and now - self._last_log >= LOG_SECONDS:
            self._last_log = now
            self._print(figures)

    def _print(self, message: str) -> None:
        self._console.print(Text(f"rollgen: {brief(message, LINE)}"), soft_wrap=True)


def _figures(stats: RunStats) -> str:
    stored, total = stats.stored_before + stats.stored, stats.planned - stats.tombstones
    figures = f"{stored}/{total} samples, {stats.tokens_per_second:,.0f} tokens/s"
    if stats.stored:
        left = stats.owed * stats.seconds / stats.stored
        figures += f", {_duration(left)} left, {stats.mean_support:.1f} ids a support"
    return figures + (f", {stats.failed} failed" if stats.failed else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def verifying() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on a terminal, nothing elsewhere: call what this gives with those that are done, and all."""
    columns = (TextColumn("verifying"), BarColumn(bar_width=24), DownloadColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
