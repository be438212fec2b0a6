"""`rollgen score`: rewards for the samples of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory

if TYPE_CHECKING:
    from rollgen.curate.score import Progress, Scored


_WITH = typer.Option(
    "--with",
    help="The scoring function, of a module in the current directory or an installed one; or exact_match or "
    "regex, with --field.",
    metavar="MODULE:FUNCTION",
    show_default=False,
)
_FIELD = typer.Option(
    help="Field of the prompts' metadata that holds the right answer (exact_match) or a regular expression "
    "that the text must match (regex).",
    metavar="FIELD",
    show_default=False,
)


def score(
    place: DatasetPlace,
    scorer: Annotated[str, _WITH],
    name: Annotated[
        str | None,
        typer.Option(help="What the rewards are called. [the function's name]", metavar="NAME", show_default=False),
    ] = None,
    field: Annotated[str | None, _FIELD] = None,
    extract: Annotated[
        str | None,
        typer.Option(
            help="Of exact_match: the answer is what this regular expression finds last in the text, its first group "
            "if it has one. [the whole text]",
            metavar="REGEX",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Processes that score. [one for each core]", metavar="N", min=1, show_default=False),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Answers that the function is given at a time. [64]", metavar="N", min=1, show_default=False),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that it may take for them. A batch that takes longer is scored again one by one. [600]",
            metavar="SECONDS",
            show_default=False,
        ),
    ] = None,
    rescore: Annotated[
        bool,
        typer.Option(
            "--rescore",
            help="Score all samples again, or go on with that where it was interrupted. The rewards that there are "
            "stay in force until all have a new one.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Score the samples that have no reward yet.

    Rewards go to rewards/NAME-*.parquet; nothing else in the dataset changes. The same command continues after an
    interruption, scores what a run has added, and tries again what could not be scored: then it exits with 3."""
    import json
    import sys
    from dataclasses import asdict

    directory = dataset_directory(place)
    from rollgen.curate.score import BATCH_SIZE, TIMEOUT_SECONDS
    from rollgen.curate.score import score as run

    sys.path.append(str(Path.cwd()))  # at the end: a dataset that is looked at from inside cannot replace a module
    with _scoring() as progress:
        done = run(
            directory,
            scorer,
            name=name,
            field=field,
            extract=extract,
            processes=processes,
            batch_size=batch_size or BATCH_SIZE,
            timeout=TIMEOUT_SECONDS if timeout is None else timeout,
            rescore=rescore,
            progress=progress,
        )
    typer.echo(json.dumps(asdict(done)) if as_json else _describe(done, directory, rescore=rescore))
    return 3 if done.failed else 0


@contextmanager
def _scoring() -> Iterator[Progress]:
    """A bar of samples on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("scoring"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _describe(done: Scored, directory: Path, *, rescore: bool) -> str:
    from rollgen.format.rewards import UNREWARDABLE
    from rollgen.inert import brief
    from rollgen.inspect.terminal import counted, significant

    since = " from an earlier attempt at this rescoring" if rescore else ""
    before = f", {done.kept:,} had a reward{since}" if done.kept else ""
    mean = "" if done.mean is None else f"; mean reward {significant(done.mean)}"
    lines = [f"reward {done.name!r} (scorer {done.scorer}): {counted(done.scored, 'sample')} scored{before}{mean}"]
    if done.failed:
        lines.append(f"could not be scored: {done.failed:,}; the same command tries them again")
        lines += [
            f"  {each.samples:,} x {each.error} (first {each.prompt_id}:{each.sample_index})" for each in done.errors
        ]
        if others := done.failed - sum(each.samples for each in done.errors):
            lines.append(
                f"  {others:,} x other errors: column `error` of rewards/{done.name}-*.parquet has all of them"
            )
        lines.append(UNREWARDABLE)
    if rescore and done.kept and done.in_force:
        lines.append("to score those of the earlier attempt again too, give the same command once more")
    if not done.in_force:
        lines.append("the rewards from before stay in force until every sample has a new one")
    if done.mean is None and not done.failed:
        lines.append("no sample is stored yet; the same command scores those that come")
    elif not done.failed:
        lines.append(f"to train on them: RolloutStream({str(directory)!r}, rewards={done.name!r})")
    return "\n".join(map(brief, lines))
