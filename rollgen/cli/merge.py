"""`rollgen merge`: datasets of several models or runs become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from rollgen.cli.options import dataset_directory

if TYPE_CHECKING:
    from rollgen.curate.merge import Merged

_NAME: Final = 60
"""Characters of a model's."""


def merge(
    places: Annotated[list[str], typer.Argument(help="Two dataset directories or more.", metavar="DIR...")],
    out: Annotated[
        str,
        typer.Option("--out", help="Directory of the merged dataset; a new one.", metavar="DIR", show_default=False),
    ],
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            help="What a dataset's run is called, once for each in their order. Default: as its directory.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave an optional column out, one that not all have: support_logprobs, weight_versions, "
            "routed_experts. May be repeated.",
            metavar="COLUMN",
            show_default=False,
        ),
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option(
            help="Generated tokens of a shard, at most about. [8000000]", metavar="INTEGER", min=1, show_default=False
        ),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Replace the dataset that --out holds.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be merged; write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Make one dataset of several, of other models or runs too.

    A column `run` says where a row is from, and the manifest keeps what each run was. Current rows are taken; the
    sources stay as they are. They need the same tokenizer and vocabulary. A merge that was interrupted is begun again
    by the same command."""
    import json
    from dataclasses import asdict

    directories = [dataset_directory(place) for place in places]
    from rollgen.curate.compact import SHARD_TOKENS
    from rollgen.curate.merge import merge as run

    merged = run(
        directories,
        out,
        names=names,
        drop=drop or (),
        shard_tokens=shard_tokens or SHARD_TOKENS,
        clean=clean,
        dry_run=dry_run,
    )
    typer.echo(
        json.dumps(asdict(merged) | {"dry_run": dry_run}) if as_json else _describe(merged, out, dry_run=dry_run)
    )
    if not dry_run:
        from rollgen.inspect.card import refresh_card
        from rollgen.remote.objects import local_path

        refresh_card(local_path(out))
    return 0


def _describe(merged: Merged, out: str, *, dry_run: bool) -> str:
    from rich import filesize

    from rollgen.inert import brief, plain, shorten
    from rollgen.inspect.terminal import counted

    lines = []
    for each in merged.runs:
        left = f", superseded rows left out: {each.superseded:,}" if each.superseded else ""
        owed = f", owed: {each.owed:,}" if each.owed else ""
        lost = f", lost since it was merged before: {each.lost:,}" if each.lost else ""
        lines.append(
            f"{brief(each.name)}: {counted(each.samples, 'sample')}, {counted(each.tokens, 'token')} of "
            f"{brief(shorten(each.model, _NAME))}{left}{owed}{lost}"
        )
    size = "" if merged.bytes is None else f", {filesize.decimal(merged.bytes)}"
    total = f"{counted(merged.samples, 'sample')}, {counted(merged.tokens, 'generated token')}"
    lines.append(
        f"{'would be' if dry_run else 'merged'}: {total}, {counted(merged.shards, 'shard')}{size} in {plain(out)}"
    )
    if merged.dropped:
        lines.append(f"columns left out: {', '.join(merged.dropped)}")
    if merged.rewards:
        lines.append(f"rewards carried over: {', '.join(merged.rewards)}")
    if merged.rewards_left:
        left = ", ".join(merged.rewards_left)
        lines.append(
            f"rewards not carried over, which not all have by the same scorer, or with too many columns: {left}"
        )
    if merged.owed:
        lines.append(f"samples that the runs still owed, and nobody owes any more: {merged.owed:,}")
    lines += map(brief, merged.notes)
    lines.append("not copied: plans, retry lists, failures and logs; they stay with the runs")
    return "\n".join(lines)
