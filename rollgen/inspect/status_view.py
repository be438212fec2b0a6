"""The status of a run on a terminal. What comes from the data is inert: see `terminal.py`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich import filesize
from rich.table import Table
from rich.text import Text

from rollgen.format.commit import WHOLE_NAME
from rollgen.inspect.find import ranges
from rollgen.inspect.speed import is_task
from rollgen.inspect.status import WriterStatus
from rollgen.inspect.terminal import SURPLUS, counted, duration, facts, line, planless, share, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from rollgen.inspect.status import Division, RunStatus
    from rollgen.inspect.terminal import Row

_WRITERS: Final = 50
_NAMES: Final = 3
_MISSING: Final = 50
"""Parts that nobody has begun: of more than these it is not told which."""


def render_status(name: str, status: RunStatus, console: Console) -> None:
    """Print the status of the run in a directory called `name`."""
    headline = Text(line(name, status.state).plain, style="bold")
    writers = [_writers(status)] if status.writers else []
    show(console, headline, Text(), facts(_samples(status), _speed(status), _problems(status)), *writers)


def _samples(status: RunStatus) -> Iterator[Row]:
    if status.planned is None or status.owed is None or status.skipped is None:
        has_no_plan = status.attempts or status.runs
        yield "Stored", line(counted(status.stored, "sample"), planless(status.owed_when_merged) if has_no_plan else "")
    else:
        wanted = status.planned - status.skipped + status.retries
        again = f"{status.retries:,} of these are retries" if status.retries else ""
        what = "rows" if status.retries else "samples"
        yield "Stored", line(f"{status.stored:,} of {wanted:,} {what} ({share(status.stored, wanted)})", again)
        next_step = "--resume continues" if status.owed and status.state == "stopped" else ""
        yield "Owed", line(f"{status.owed:,}", next_step)
    if status.runs:
        more = f"and {len(status.runs) - _NAMES:,} more" if len(status.runs) > _NAMES else ""
        yield "Merged", line(f"from {counted(len(status.runs), 'run')}", *status.runs[:_NAMES], more)
    if status.failed:
        stages = (f"{stage} {count:,}" for stage, count in status.failed_by_stage.items())
        yield "Failed", line(f"{status.failed:,}, owed again", *stages)
    if status.skipped:
        yield "Skipped", line(f"{status.skipped:,} of bad input rows")
    yield "Size", line(counted(status.tokens, "generated token"), filesize.decimal(status.bytes))


def _speed(status: RunStatus) -> Iterator[Row]:
    if status.division is not None:
        yield from _division(status.division)
    elif status.started_at is not None:
        yield "Started", line(_time(status.started_at), f"attempt {status.attempts:,}")
    if status.tokens_per_second is not None:
        yield "Speed", line(f"{status.tokens_per_second:,.0f} tokens/s at the last commits")
    if status.seconds_left is not None:
        yield "Left", line(f"about {duration(status.seconds_left)}, if the rest is as long as what is stored")


def _division(division: Division) -> Iterator[Row]:
    started, of = len(division.started), division.of
    again = f"{division.attempts:,} starts" if division.attempts > started else ""
    yield "Started", line(_time(division.since), f"{started:,} of {of:,} parts", again)
    if 0 < of - started <= _MISSING:
        missing = sorted({*range(of)} - {*division.started})
        yield "", line(f"not begun: {'part' if len(missing) == 1 else 'parts'} {ranges(missing)}")


def _time(text: str) -> str:
    """A time of the records, in UTC and without its zone: what it says, where it is none."""
    try:
        return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return text


def _problems(status: RunStatus) -> Iterator[Row]:
    if status.quarantined:
        yield "Set aside", _named(status.quarantined, "damaged shard", "in quarantine/")
    if status.lost:
        again = "merge again to have what they held" if status.runs else "--resume makes what they held again"
        text = f"missing or not readable: {again}"
        yield "Lost", _named(status.lost, "shard", text)
    if status.surplus:
        yield "Too many", Text(f"{counted(status.surplus, 'row')} {SURPLUS}", style="yellow")


def _named(names: tuple[str, ...], noun: str, what: str) -> Text:
    more = f"and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
    return Text(line(f"{counted(len(names), noun)} {what}", *names[:_NAMES], more).plain, style="yellow")


def _writers(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    table.add_column("writer", overflow="fold")
    for name in ("alive", "shards", "samples", "tokens", "size", "last commit"):
        numeric = name in ("shards", "samples", "tokens", "size")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    alive_first = sorted(_summed(status.writers), key=lambda writer: not writer.alive)
    for writer in alive_first[:_WRITERS]:
        counts = (f"{writer.shards:,}", f"{writer.samples:,}", f"{writer.tokens:,}", filesize.decimal(writer.bytes))
        alive = "yes" if writer.alive else "no"
        table.add_row(
            line(writer.name), alive, *counts, "none yet" if writer.last_commit is None else _time(writer.last_commit)
        )
    if len(alive_first) > _WRITERS:
        table.add_row(f"and {len(alive_first) - _WRITERS:,} more")
    return table


def _summed(writers: Sequence[WriterStatus]) -> list[WriterStatus]:
    """With the tasks of a cluster as one, which lives as long as their driver."""
    tasks = [writer for writer in writers if is_task(writer.name)]
    if not tasks:
        return [*writers]
    others = [writer for writer in writers if not is_task(writer.name)]
    alive = any(writer.alive for writer in others if writer.name == WHOLE_NAME)
    rest = [writer for writer in others if writer.name != WHOLE_NAME or writer.shards]
    commits = [task.last_commit for task in tasks if task.last_commit is not None]
    counts = {name: sum(getattr(task, name) for task in tasks) for name in ("shards", "samples", "tokens", "bytes")}
    last = max(commits, default=None)
    return [*rest, WriterStatus(f"Ray tasks: {len(tasks):,}", alive=alive, last_commit=last, **counts)]
