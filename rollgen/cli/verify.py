"""`rollgen verify`: is a dataset what it was when it was made?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory
from rollgen.errors import UsageError


def verify(
    place: DatasetPlace,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Compute the log-probabilities of stored samples again with this Hugging Face model, a directory or "
            "an id: the proof that the dataset replays, with masks and, beside it, without.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Of how many samples that is done; 0 is all. Default: 64.", metavar="N", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where that runs: cpu, cuda, cuda:1. Default: CUDA if there is a device.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> int:
    """Check every byte and every token of a dataset.

    That is its shards, journal, manifest and plan. Changes nothing. Exit 1 when anything is wrong."""
    directory = dataset_directory(place)
    _check_recompute(recompute, limit, device)
    from rollgen.cli.progress import verifying
    from rollgen.inert import brief
    from rollgen.verify.dataset import verify_dataset
    from rollgen.verify.terminal import describe

    with verifying() as progress:
        outcome = verify_dataset(directory, progress=progress)
    if not as_json:
        typer.echo("\n".join(describe(outcome)))
    recomputed = None
    if recompute is not None and outcome.is_clean:
        from rollgen.verify import recompute as again

        recomputation = again.recompute(
            directory, recompute, limit=64 if limit is None else limit or None, device=device
        )
        recomputed = recomputation.to_json()
        outcome = outcome.with_problem("recompute", recomputation.problem())
        if not as_json:
            typer.echo("\n".join(map(brief, again.describe(recomputation))))
    if as_json:
        typer.echo(json.dumps(outcome.to_json() | {"recompute": recomputed}, indent=2))
    if recompute is not None and recomputed is None:
        typer.echo("not recomputed: that needs a dataset in which nothing is wrong; mend it first", err=True)
    return 0 if outcome.is_clean else 1


def _check_recompute(recompute: str | None, limit: int | None, device: str | None) -> None:
    """Raise UsageError for options that would do nothing, or cannot be."""
    if recompute is None and not (limit is None and device is None):
        raise UsageError("--limit and --device are for --recompute MODEL")
    if limit is not None and limit < 0:
        raise UsageError("--limit: give a number of samples, or 0 for all")
