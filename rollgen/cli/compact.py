"""`rollgen compact`: few large shards instead of many small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory

if TYPE_CHECKING:
    from rollgen.curate.compact import Compaction


def compact(
    place: DatasetPlace,
    shard_tokens: Annotated[
        int | None,
        typer.Option(
            help="Generated tokens of a new shard, about. [8000000]", metavar="INTEGER", min=1, show_default=False
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Move the replaced files to retired/ instead of deleting them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Rewrite many small shards as few large ones.

    The samples of each prompt come together. Every row is compared before the old files go, and an interruption is
    finished by the same command. Not while a run writes there or a trainer reads."""
    import json
    from dataclasses import asdict

    directory = dataset_directory(place)
    from rollgen.curate.compact import SHARD_TOKENS
    from rollgen.curate.compact import compact as run

    done = run(directory, shard_tokens=shard_tokens or SHARD_TOKENS, keep=keep, dry_run=dry_run)
    typer.echo(json.dumps(asdict(done) | {"dry_run": dry_run}) if as_json else _describe(done, dry_run=dry_run))
    if not dry_run and (done.replaced or done.completed_earlier):
        from rollgen.inspect.card import refresh_card

        refresh_card(directory)
    return 0


def _describe(done: Compaction, *, dry_run: bool) -> str:
    from rich import filesize

    from rollgen.inspect.terminal import counted

    lines = ["an interrupted compaction has been completed"] if done.completed_earlier else []
    before = f"{counted(done.shards_before, 'shard')}, {filesize.decimal(done.bytes_before)}"
    if not done.replaced:
        return "\n".join([*lines, f"nothing to do: {before}, the samples of each prompt together"])
    rows = f"the {counted(done.rows, 'row')}, {counted(done.tokens, 'generated token')}"
    size = "" if done.bytes_after is None else f", {filesize.decimal(done.bytes_after)}"
    return "\n".join(
        [
            *lines,
            f"before: {before}; prompts in several shards: {done.split_prompts:,}",
            f"{'would be' if dry_run else 'after'}: {counted(done.shards_after, 'shard')}{size}; no prompt in several",
            f"{'to be rewritten' if dry_run else 'rewritten'}: {counted(done.replaced, 'shard')} as {done.written:,}; "
            f"{rows}, {'stay as they are' if dry_run else 'are as they were'}",
        ]
    )
