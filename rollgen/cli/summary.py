"""What `rollgen generate` prints on stdout when it is done, for people or (with --json) for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rollgen.cli.settings import describe_settings
from rollgen.inert import LINE, brief
from rollgen.inspect.estimate import describe
from rollgen.inspect.terminal import counted, share

if TYPE_CHECKING:
    from rollgen.inspect.estimate import Estimate, Removal
    from rollgen.loop.report import RunStats
    from rollgen.preflight import Preflight

_PROMPT_LINES = 200
"""Lines of the first prompt that a dry run shows."""


def print_summary(out: str | Path, stats: RunStats, *, as_json: bool) -> None:
    """The totals of a finished run."""
    if as_json:
        typer.echo(json.dumps(_summary_json(out, stats)))
        return
    stored = stats.stored_before + stats.stored
    typer.echo(f"{stored:,} of {counted(stats.planned, 'sample')} stored in {brief(str(out), LINE)}")
    if stats.stored:
        typer.echo(
            f"this run: {counted(stats.stored, 'sample')}, {counted(stats.tokens, 'token')} at "
            f"{stats.tokens_per_second:,.0f} tokens/s, {share(stats.length_finishes, stats.stored)} cut at max_tokens"
        )
        if stats.masked_tokens:
            typer.echo(
                f"supports: {stats.mean_support:.1f} ids on average, {counted(stats.resampled, 'sample')} asked again "
                "because a tie went past the logprobs returned"
            )
    if stats.restarts:
        typer.echo(f"the engine died or stalled and was started again: {counted(stats.restarts, 'time')}")
    if stats.failed or stats.tombstones:
        typer.echo(
            f"{counted(stats.failed, 'sample')} failed, {stats.tombstones:,} of skipped rows: see "
            f"{brief(str(out), LINE)}/failures/"
        )
    if stats.owed:
        typer.echo(f"still owed: {counted(stats.owed, 'sample')}; the same command with --resume makes them")


def print_dry_run(
    out: str,
    preflight: Preflight,
    estimate: Estimate,
    *,
    as_json: bool,
    retried: int = 0,
    removed: Removal | None = None,
) -> None:
    """The resolved configuration, the counts, what it will take, and the first prompt as the model will see it.

    `retried` is the number of samples of a new retry, `removed` what the run would remove first.
    """
    from rollgen.preflight import public_settings

    summary, model = preflight.summary, preflight.model
    config = public_settings(preflight.config)
    if as_json:
        values = {
            "out": out,
            "config": config | {"model": model.name},
            "plan": _plan_json(preflight),
            "estimate": estimate.to_json(),
            "retried": retried,
        }
        typer.echo(json.dumps(values | {"removed": None if removed is None else asdict(removed)}))
        return
    typer.echo(f"# out: {brief(out, LINE)}")
    for line in describe_settings(config | {"model": model.path_or_id}):
        typer.echo(line)
    samples = summary.samples - summary.tombstone_samples
    typer.echo(
        f"\n{counted(summary.prompts - summary.tombstones, 'prompt')}, {counted(samples, 'sample')}, "
        f"{counted(summary.tombstones, 'row')} skipped, "
        f"{summary.clamped:,} with max_tokens clamped to the context of {model.context_length}"
    )
    typer.echo(
        f"prompt lengths: {summary.shortest} min, {summary.median} median, {summary.p95} p95, {summary.longest} max; "
        f"{summary.prompt_tokens:,} tokens"
    )
    if removed is not None:
        typer.echo(f"--clean would remove {removed}")
    for described in describe(estimate):
        typer.echo(described)
    if summary.first is not None:
        typer.echo(f"\nfirst prompt, {brief(summary.first.prompt_id)}, as the model sees it:")
        typer.echo("\n".join(brief(line, LINE) for line in _first_lines(summary.first_text or "")))


def _first_lines(text: str) -> list[str]:
    """The lines of a prompt; of very many those at both ends."""
    lines = text.split("\n")
    if len(lines) <= _PROMPT_LINES:
        return lines
    half = _PROMPT_LINES // 2
    return [*lines[:half], f"… {len(lines) - 2 * half:,} more lines, all of them with --json …", *lines[-half:]]


def _summary_json(out: str | Path, stats: RunStats) -> dict[str, Any]:
    derived = {"owed": stats.owed, "tokens_per_second": stats.tokens_per_second, "mean_support": stats.mean_support}
    return {"out": str(out), **asdict(stats), **derived, "exit_code": stats.exit_code}


def _plan_json(preflight: Preflight) -> dict[str, Any]:
    summary = preflight.summary
    names = (
        "prompts samples tombstones clamped double_bos templated truncated untruncated smallest_top_k largest_top_k "
        "prompt_tokens shortest median p95 longest"
    )
    return {
        **{name: getattr(summary, name) for name in names.split()},
        "first_prompt_id": None if summary.first is None else summary.first.prompt_id,
        "first_text": summary.first_text,
    }
