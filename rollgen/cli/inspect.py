"""`rollgen inspect`: what a dataset holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgen.cli.options import check_dataset_directory
from rollgen.errors import UsageError


def inspect(
    directory: Annotated[Path, typer.Argument(help="Dataset directory.", metavar="DIR", show_default=False)],
    sample: Annotated[
        str | None,
        typer.Option(
            help="Show one completion, token by token: prompt id, sample K (default: the first) and, of one that was "
            "made again, generation G (default: the current one).",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Show what a dataset holds, or one sample token by token.

    Settings, counts, supports (the ids that each token was drawn from), logprobs, sizes. Also while a run is
    writing."""
    check_dataset_directory(directory)
    if sample is not None:
        return _inspect_sample(directory, sample, at, as_json=as_json)
    if at is not None:
        raise UsageError("--at shows a token of one completion: name that with --sample")
    return _inspect_dataset(directory, as_json=as_json)


def _inspect_dataset(directory: Path, *, as_json: bool) -> int:
    import json

    from rich.console import Console

    from rollgen.inspect.stats import dataset_stats
    from rollgen.inspect.terminal import render

    stats = dataset_stats(directory)
    if as_json:
        typer.echo(json.dumps(stats.to_json(), indent=2))
    else:
        render(stats, Console())
    return 0


def _inspect_sample(directory: Path, reference: str, at: int | None, *, as_json: bool) -> int:
    import json

    from rich.console import Console

    from rollgen.inspect.sample import read_sample
    from rollgen.inspect.sample_view import render_sample

    sample = read_sample(directory, reference)
    if as_json:
        typer.echo(json.dumps(sample.to_json(at), indent=2))
    else:
        render_sample(sample, Console(highlight=False), at)
    return 0
