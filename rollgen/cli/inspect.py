"""`rollgen inspect`: what a dataset holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory
from rollgen.errors import UsageError


def inspect(
    place: DatasetPlace,
    sample: Annotated[
        str | None,
        typer.Option(
            help="Show one completion, token by token: prompt id (of a merged dataset RUN/ID), sample K (default: the "
            "first) and, of one that was made again, generation G (default: the current one).",
            metavar="ID:K@G",
            show_default=False,
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            help="Of that completion, show the support of token T: from 0, or from the end.",
            metavar="T",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write figures and samples to one HTML file, for a browser; it needs no network.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Show what a dataset holds, or one sample token by token.

    Settings, counts, supports (the ids that each token was drawn from), logprobs, sizes. Also while a run is
    writing."""
    directory = dataset_directory(place)
    if html is not None:
        if sample is not None or at is not None:
            raise UsageError("--html shows the whole dataset, with a browser of samples: give it without --sample")
        return _write_report(directory, html, as_json=as_json)
    if sample is not None:
        return _inspect_sample(directory, sample, at, as_json=as_json)
    if at is not None:
        raise UsageError("--at shows a token of one completion: name that with --sample")
    return _inspect_dataset(directory, as_json=as_json)


def _inspect_dataset(directory: Path, *, as_json: bool) -> int:
    import json

    from rich.console import Console

    from rollgen.format.reader import open_dataset
    from rollgen.inspect.curves import curves_of
    from rollgen.inspect.rewards import stored_rewards
    from rollgen.inspect.stats import stats_of
    from rollgen.inspect.terminal import render

    dataset = open_dataset(directory)
    stats = stats_of(dataset, stored_rewards(dataset))
    curves = curves_of(dataset, stats)
    if as_json:
        typer.echo(json.dumps(stats.to_json() | {"curves": curves.to_json()}, indent=2, allow_nan=False))
    else:
        render(stats, Console(), curves)
    return 0


def _write_report(directory: Path, target: Path, *, as_json: bool) -> int:
    import json
    from dataclasses import asdict

    from rich import filesize

    from rollgen.inert import plain
    from rollgen.inspect.report import write_report

    report = write_report(directory, target)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        samples = f"{report.shown:,} of {report.samples:,} samples"
        typer.echo(f"{plain(report.file)}: {filesize.decimal(report.bytes)}, with {samples}")
    return 0


def _inspect_sample(directory: Path, reference: str, at: int | None, *, as_json: bool) -> int:
    import json

    from rich.console import Console

    from rollgen.inspect.sample import read_sample
    from rollgen.inspect.sample_view import render_sample

    sample = read_sample(directory, reference)
    if as_json:
        typer.echo(json.dumps(sample.to_json(at), indent=2, allow_nan=False))
    else:
        render_sample(sample, Console(highlight=False), at)
    return 0
