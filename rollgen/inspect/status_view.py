"""The status of a run on a terminal. What comes from the data is inert: see `terminal.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import filesize
from rich.table import Table
from rich.text import Text

from rollgen.inspect.terminal import SURPLUS, counted, duration, facts, line, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from rollgen.inspect.status import RunStatus
    from rollgen.inspect.terminal import Row

_WRITERS: Final = 50
_NAMES: Final = 3


def render_status(name: str, status: RunStatus, console: Console) -> None:
    """Print the status of the run in a directory called `name`."""
    console.print(line(name, status.state), style="bold", end="\n\n")
    console.print(facts(_samples(status), _speed(status), _problems(status)))
    if status.writers:
        console.print(_writers(status))


def _samples(status: RunStatus) -> Iterator[Row]:
    if status.planned is None or status.owed is None or status.skipped is None:
        yield "Stored", line(counted(status.stored, "sample"), "no plan: nothing is owed" if status.attempts else "")
    else:
        wanted = status.planned - status.skipped + status.retries
        again = f"{status.retries:,} of these are retries" if status.retries else ""
        what = "rows" if status.retries else "samples"
        yield "Stored", line(f"{status.stored:,} of {wanted:,} {what} ({share(status.stored, wanted)})", again)
        next_step = "--resume continues" if status.owed and status.state == "stopped" else ""
        yield "Owed", line(f"{status.owed:,}", next_step)
    if status.failed:
        stages = (f"{stage} {count:,}" for stage, count in status.failed_by_stage.items())
        yield "Failed", line(f"{status.failed:,}, owed again", *stages)
    if status.skipped:
        yield "Skipped", line(f"{status.skipped:,} of bad input rows")
    yield "Size", line(counted(status.tokens, "generated token"), filesize.decimal(status.bytes))


def _speed(status: RunStatus) -> Iterator[Row]:
    if status.started_at is not None:
        yield "Started", line(status.started_at, f"attempt {status.attempts:,}")
    if status.tokens_per_second is not None:
        yield "Speed", line(f"{status.tokens_per_second:,.0f} tokens/s at the last commits")
    if status.seconds_left is not None:
        yield "Left", line(f"about {duration(status.seconds_left)}, if the rest is as long as what is stored")


def _problems(status: RunStatus) -> Iterator[Row]:
    if status.quarantined:
        yield "Set aside", _named(status.quarantined, "damaged shard", "in quarantine/")
    if status.lost:
        text = "missing or not readable: --resume makes what they held again"
        yield "Lost", _named(status.lost, "shard", text)
    if status.surplus:
        yield "Too many", Text(f"{counted(status.surplus, 'row')} {SURPLUS}", style="yellow")


def _named(names: tuple[str, ...], noun: str, what: str) -> Text:
    more = f"and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
    return Text(line(f"{counted(len(names), noun)} {what}", *names[:_NAMES], more).plain, style="yellow")


def _writers(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for name in ("writer", "alive", "shards", "samples", "tokens", "size", "last commit"):
        table.add_column(name, justify="right" if name in ("shards", "samples", "tokens", "size") else "left")
    alive_first = sorted(status.writers, key=lambda writer: not writer.alive)
    for writer in alive_first[:_WRITERS]:
        counts = (f"{writer.shards:,}", f"{writer.samples:,}", f"{writer.tokens:,}", filesize.decimal(writer.bytes))
        alive = "yes" if writer.alive else "no"
        table.add_row(line(writer.name), alive, *counts, writer.last_commit or "none yet")
    if len(alive_first) > _WRITERS:
        table.add_row(f"and {len(alive_first) - _WRITERS:,} more")
    return table
