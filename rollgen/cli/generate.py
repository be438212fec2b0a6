"""`rollgen generate`: prompt files to a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgen.cli.options import given, with_config_options
from rollgen.errors import UsageError

if TYPE_CHECKING:
    from rollgen.config import RunConfig


@with_config_options
def generate(
    files: Annotated[
        list[str],
        typer.Argument(
            help="JSON Lines (also as .gz or .zst) or Parquet: files, directories, quoted patterns, - for stdin.",
            metavar="PROMPTS...",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            help="Dataset: a directory, or a URL like s3://bucket/run. Default: <name of the prompts>-rollouts/.",
            metavar="PATH",
            rich_help_panel="Output",
        ),
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
    retry: Annotated[
        str | None,
        typer.Option(
            help="finish_reason=length: with --resume and a larger --max-tokens, make the samples that were cut again.",
            metavar="CONDITION",
            rich_help_panel="Run",
        ),
    ] = None,
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
    """Sample every prompt with vLLM into a dataset.

    What is stored is Parquet: token ids, logprobs, and the sampling mask of each token: the ids that survived top-k,
    top-p and min-p."""
    from rollgen.config import load_config
    from rollgen.prompts.sources import default_stem

    run_config = load_config(given(options), config)
    place = out or f"{default_stem(files)}-rollouts"
    if place.lower().startswith("memory://"):
        raise UsageError(f"{place}: is gone when this command ends; give a directory, or a URL of object storage")
    command = _dry_run if dry_run else _run
    return command(files, run_config, place, as_json=as_json, resume=resume, clean=clean, retry=retry)


def _run(files: list[str], config: RunConfig, out: str, *, as_json: bool, **start: Any) -> int:
    from rollgen.cli.progress import ConsoleReporter
    from rollgen.cli.summary import print_summary
    from rollgen.crews import make_crew
    from rollgen.loop.run import generate
    from rollgen.loop.stop import Interrupted

    with ConsoleReporter(config.progress, servers=len(config.server)) as reporter:
        try:
            stats = generate(files, config, out, reporter=reporter, make_crew=make_crew, **start)
        except Interrupted as stop:
            reporter.note(str(stop))
            return 128 + stop.signal_number
    print_summary(out, stats, as_json=as_json)
    return stats.exit_code


@contextmanager
def _looked_at(place: str, *, clean: bool) -> Iterator[Path]:
    """The directory that a dry run looks into; of a run in object storage its small files, and shards without content.

    What cannot be done without content then is told as of damaged ones.
    """
    from rollgen.errors import RollgenError
    from rollgen.format.journal import read_journal
    from rollgen.format.schema import DATA_DIR
    from rollgen.remote.objects import is_url, local_path
    from rollgen.remote.workspace import glimpse

    if not is_url(place):
        yield local_path(place)
        return
    with glimpse(place, clean=clean) as directory:
        for line in read_journal(directory).committed.values():
            path = directory / DATA_DIR / line.file
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                file.truncate(line.bytes)
        try:
            yield directory
        except RollgenError as error:  # whoever gave a URL knows nothing of a copy
            error.args = (str(error).replace(str(directory), place),)
            raise


def _dry_run(files: list[str], config: RunConfig, place: str, *, as_json: bool, **start: Any) -> int:
    import tempfile

    from rollgen.cli.summary import print_dry_run
    from rollgen.errors import DatasetError
    from rollgen.format.retries import read_retries
    from rollgen.inert import LINE, brief
    from rollgen.inspect.estimate import estimate_run, free_space, removal, stored_of
    from rollgen.inspect.status import run_status
    from rollgen.loop.parts import part_of
    from rollgen.loop.retry import describe, select
    from rollgen.loop.run import Start
    from rollgen.prompts.plan import Plan
    from rollgen.remote.objects import is_url

    with tempfile.TemporaryDirectory() as scratch, _looked_at(place, clean=start["clean"]) as out:
        preflight, longer = Start(**start).plan(files, config, out, Path(scratch) / "plan.parquet")
        retries = [] if preflight.stored is None else [*read_retries(out, preflight.stored)]
        retried = 0
        if longer:
            try:
                selection = select(out, preflight, longer)
            except DatasetError as error:  # the run itself sets the damage aside first
                reason = brief(str(error).replace(str(out), place), LINE)
                typer.echo(f"rollgen: --retry: how many samples cannot be told yet: {reason}", err=True)
            else:
                retries.append(selection.retries)
                retried = len(selection.retries)
                typer.echo(f"rollgen: {describe(selection, longer)}", err=True)
        part, stored = part_of(config.shard), None if preflight.stored is None else run_status(out)
        estimate = estimate_run(
            Plan(preflight.plan_path),
            retries,
            support_logprobs=config.support_logprobs,
            stored=stored,
            part=part,
            done=None if stored is None else stored_of(out, part, stored, has_shards=not is_url(place)),
            free_bytes=None if is_url(place) else free_space(out),
        )
        removed = removal(out) if start["clean"] else None
        print_dry_run(place, preflight, estimate, as_json=as_json, retried=retried, removed=removed)
    return 0
