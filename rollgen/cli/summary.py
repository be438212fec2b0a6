"""What `rollgen generate` prints on stdout when it is done, for people or (with --json) for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rollgen.inert import LINE, brief
from rollgen.inspect.estimate import describe
from rollgen.inspect.terminal import share

if TYPE_CHECKING:
    from rollgen.inspect.estimate import Estimate
    from rollgen.loop.report import RunStats
    from rollgen.preflight import Preflight

_PROMPT_LINES = 200
"""Lines of the first prompt that a dry run shows."""


def print_summary(out: Path, stats: RunStats, *, as_json: bool) -> None:
    """The totals of a finished run."""
    if as_json:
        typer.echo(json.dumps(_summary_json(out, stats)))
        return
    stored = stats.stored_before + stats.stored
    typer.echo(f"{stored} of {stats.planned} samples stored in {brief(str(out), LINE)}")
    if stats.stored:
        typer.echo(
            f"this run: {stats.stored} samples, {stats.tokens:,} tokens at {stats.tokens_per_second:,.0f} tokens/s, "
            f"{share(stats.length_finishes, stats.stored)} cut at max_tokens"
        )
        if stats.masked_tokens:
            typer.echo(
                f"supports: {stats.mean_support:.1f} ids on average, {stats.resampled} samples asked again because a "
                "tie went past the logprobs returned"
            )
    if stats.restarts:
        typer.echo(f"the engine died or stalled and was started again: {stats.restarts} times")
    if stats.failed or stats.tombstones:
        typer.echo(
            f"{stats.failed} samples failed, {stats.tombstones} of skipped rows: see {brief(str(out), LINE)}/failures/"
        )
    if stats.owed:
        typer.echo(f"{stats.owed} samples are still owed: run the same command with --resume")


def print_dry_run(preflight: Preflight, estimate: Estimate, *, as_json: bool, retried: int = 0) -> None:
    """The resolved configuration, the counts, what it will take, and the first prompt as the model will see it.

    `retried` is the number of samples of a new retry.
    """
    summary, model = preflight.summary, preflight.model
    config = preflight.config.model_dump(mode="json") | {"model": model.name}
    if as_json:
        typer.echo(
            json.dumps(
                {"config": config, "plan": _plan_json(preflight), "estimate": estimate.to_json(), "retried": retried}
            )
        )
        return
    for name, value in config.items():
        typer.echo(f"{name} = {brief(json.dumps(value, ensure_ascii=False))}")
    typer.echo(
        f"\n{summary.prompts - summary.tombstones} prompts, {summary.samples - summary.tombstone_samples} samples, "
        f"{summary.tombstones} rows skipped, "
        f"{summary.clamped} with max_tokens clamped to the context of {model.context_length}"
    )
    typer.echo(
        f"prompt lengths: {summary.shortest} min, {summary.median} median, {summary.p95} p95, {summary.longest} max; "
        f"{summary.prompt_tokens:,} tokens"
    )
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


def _summary_json(out: Path, stats: RunStats) -> dict[str, Any]:
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
