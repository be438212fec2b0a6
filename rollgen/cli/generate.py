"""`rollgen generate`: prompt files to a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgen.cli.options import given, with_config_options

if TYPE_CHECKING:
    from rollgen.config import RunConfig


@with_config_options
def generate(
    files: Annotated[
        list[Path], typer.Argument(help="Prompt files (JSONL).", metavar="PROMPTS...", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Dataset directory. Default: <first file's stem>-rollouts/.", rich_help_panel="Output"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of these options.", metavar="FILE", rich_help_panel="Run")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --out; starts one if there is none.", rich_help_panel="Run"),
    ] = False,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Replace the run in --out, once all checks have passed.", rich_help_panel="Run"),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything and show what would run; load no model.", rich_help_panel="Run"
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON.", rich_help_panel="Output")
    ] = False,
    **options: Any,
) -> int:
    """Sample every prompt with vLLM and store token ids, logprobs and sampling masks as Parquet shards."""
    from rollgen.config import load_config

    run_config = load_config(given(options), config)
    directory = out or Path(f"{files[0].stem}-rollouts")
    if dry_run:
        return _dry_run(files, run_config, directory, resume=resume, clean=clean, as_json=as_json)
    return _run(files, run_config, directory, resume=resume, clean=clean, as_json=as_json)


def _run(files: list[Path], config: RunConfig, out: Path, *, resume: bool, clean: bool, as_json: bool) -> int:
    from rollgen.cli.card import write_card
    from rollgen.cli.progress import ConsoleReporter
    from rollgen.cli.summary import print_summary
    from rollgen.loop import Interrupted, generate

    with ConsoleReporter(config.progress) as reporter:
        try:
            stats = generate(files, config, out, reporter=reporter, resume=resume, clean=clean)
        except Interrupted as stop:
            reporter.note(str(stop))
            return 128 + stop.signal_number
    if stats.stored:
        write_card(out)
    print_summary(out, stats, as_json=as_json)
    return stats.exit_code


def _dry_run(files: list[Path], config: RunConfig, out: Path, *, resume: bool, clean: bool, as_json: bool) -> int:
    import tempfile

    from rollgen.cli.summary import print_dry_run
    from rollgen.directory import Holds, check_start, inspect_directory
    from rollgen.preflight import plan_run

    holds = inspect_directory(out)
    check_start(out, holds, resume=resume, clean=clean)
    with tempfile.TemporaryDirectory() as scratch:
        continued = out if holds is Holds.RUN and resume else None
        preflight = plan_run(files, config, Path(scratch) / "plan.parquet", continued=continued)
        print_dry_run(preflight, as_json=as_json)
    return 0
