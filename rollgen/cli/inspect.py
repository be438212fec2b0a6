"""`rollgen inspect`: what a dataset holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgen.errors import UsageError


def inspect(
    directory: Annotated[Path, typer.Argument(help="Dataset directory.", metavar="DIR", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Show what a dataset holds: config, counts, supports, logprobs, sizes. Also while a run is writing."""
    import json

    from rich.console import Console

    from rollgen.inspect.stats import dataset_stats
    from rollgen.inspect.terminal import render

    if not directory.is_dir():
        raise UsageError(f"{directory}: not a directory; name the one that holds rollgen.json")
    stats = dataset_stats(directory)
    if as_json:
        typer.echo(json.dumps(stats.to_json(), indent=2))
    else:
        render(stats, Console())
    return 0
