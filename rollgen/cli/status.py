"""`rollgen status`: how far a run is."""

from __future__ import annotations

from typing import Annotated

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory


def status(
    place: DatasetPlace,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Show how far a run is, who is writing, and how fast.

    What is stored, owed and failed. Changes nothing, and believes the records: whether the data are what they were,
    `rollgen verify` says."""
    directory = dataset_directory(place)
    import json

    from rich.console import Console

    from rollgen.inspect.status import run_status
    from rollgen.inspect.status_view import render_status

    shown = run_status(directory)
    if as_json:
        typer.echo(json.dumps(shown.to_json(), indent=2))
    else:
        render_status(directory.resolve().name, shown, Console(highlight=False))
    return 0
