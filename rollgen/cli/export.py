"""`rollgen export`: a dataset as the files that a trainer loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from rollgen.cli.options import DatasetPlace, dataset_directory
from rollgen.errors import UsageError

if TYPE_CHECKING:
    from rollgen.exporters.export import Exported

_FLAGS: Final = ("to", "out", "reward", "advantages", "allow_unreplayable", "allow_incomplete")
_OWN: Final = {"directory": "DIR", **{name: f"--{name.replace('_', '-')}" for name in _FLAGS}}
"""Arguments of `rollgen.export` that are no settings of an exporter, as the command has them."""


def export(
    place: DatasetPlace,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="For which trainer: jsonl (any tool), miles, prime-rl, skyrl, slime, trl, verl.",
            metavar="TRAINER",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option("--out", help="Directory to make.", metavar="PATH", show_default=False)],
    reward: Annotated[
        str | None,
        typer.Option(help="Stored reward, made by `rollgen score`.", metavar="NAME", show_default=False),
    ] = None,
    advantages: Annotated[
        Literal["mean", "mean_std", "leave_one_out"] | None,
        typer.Option(
            help="How that reward becomes advantages, in each group of samples of a prompt; for trainers that do not "
            "make their own. [mean]",
            metavar="mean|mean_std|leave_one_out",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help="Setting of that trainer's export, as seq_len=4096; again and again. docs/export.md has them.",
            metavar="KEY=VALUE",
            show_default=False,
        ),
    ] = None,
    allow_unreplayable: Annotated[
        bool,
        typer.Option(
            "--allow-unreplayable", help="Take samples with penalties or biases too: their ratios will be off."
        ),
    ] = False,
    allow_incomplete: Annotated[
        bool,
        typer.Option("--allow-incomplete", help="Train on groups of which some samples are yet to be made."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> int:
    """Write a dataset as the files that a trainer loads.

    With sampling masks, where the trainer replays them. What it has no place for is listed, and noted in export.json;
    what it would train on wrongly is refused. docs/export.md says what each trainer gets, and how it loads that."""
    import json
    from dataclasses import asdict

    directory = dataset_directory(place)
    from rollgen.exporters.export import export as run

    done = run(
        directory,
        to,
        out,
        reward=reward,
        advantages=advantages,
        allow_unreplayable=allow_unreplayable,
        allow_incomplete=allow_incomplete,
        **_parse_options(option or []),
    )
    typer.echo(json.dumps(asdict(done)) if as_json else _describe(done, out))
    return 0


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE as a mapping. Raises UsageError."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--option {pair}: not KEY=VALUE")
        if name in _OWN:
            raise UsageError(f"--option {name}: not a setting of the trainer's export; use {_OWN[name]}")
        if name in options:
            raise UsageError(f"--option {name}: given twice")
        options[name] = value
    return options


def _describe(done: Exported, out: str) -> str:
    from rich import filesize

    from rollgen.inert import plain
    from rollgen.inspect.terminal import counted

    written = f"{counted(done.files, 'file')}, {filesize.decimal(done.bytes)}"
    lines = [
        f"{plain(out)}: {counted(done.samples, 'sample')} of {counted(done.prompts, 'prompt')}, "
        f"{counted(done.tokens, 'token')}, {written}, for {done.trainer} ({done.follows})"
    ]
    counts = sorted(set(done.lost.values()), reverse=True)
    names = {count: ", ".join(name for name, samples in done.lost.items() if samples == count) for count in counts}
    if names:
        listed = "; ".join(f"{names[count]} ({counted(count, 'sample')})" for count in counts)
        lines.append(f"not taken along: {listed}")
    return "\n".join([*lines, *map(plain, done.advice)])
