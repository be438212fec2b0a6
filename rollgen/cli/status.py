"""`rollgen status`: how far a run is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgen.cli.options import check_dataset_directory


def status(
    directory: Annotated[Path, typer.Argument(help="Dataset directory.", metavar="DIR", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Show how far a run is, who is writing, and how fast.

    What is stored, owed and failed. Changes nothing, and believes the records: whether the data are what they were,
    `rollgen verify` says."""
    import json

    from rich.console import Console

    from rollgen.inspect.status import run_status
    from rollgen.inspect.status_view import render_status

    check_dataset_directory(directory)
    shown = run_status(directory)
    if as_json:
        typer.echo(json.dumps(shown.to_json(), indent=2))
    else:
        render_status(directory.resolve().name, shown, Console(highlight=False))
    return 0
