"""`rollgen repair`: damage is set aside, and the journal made again from the shards."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory


def repair(
    place: DatasetPlace,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> int:
    """Set damaged shards aside and make the journal again.

    Damaged ones go to quarantine/; the journal is made from the sound ones. Deletes nothing, but completes a compaction
    that was interrupted. Exit 1 when something is left that this cannot mend, and of a dry run when there is something
    to do. Not while a run writes there."""
    directory = dataset_directory(place)
    from rollgen.cli.progress import verifying
    from rollgen.verify.repair import repair_dataset
    from rollgen.verify.terminal import describe_repair

    with verifying() as progress:
        outcome = repair_dataset(directory, dry_run=dry_run, progress=progress)
    typer.echo(json.dumps(outcome.to_json(), indent=2) if as_json else "\n".join(describe_repair(outcome)))
    verification = outcome.verification
    if verification is not None and verification.is_clean and outcome.changes and not dry_run:
        from rollgen.inspect.card import refresh_card

        refresh_card(directory)
    return 0 if outcome.is_settled else 1
