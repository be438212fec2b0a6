"""Everything that a page says of a dataset, as one JSON object: `report_content(dataset, stats, curves)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import filesize

from rollgen.inert import brief
from rollgen.inspect.decoding import load_decoder
from rollgen.inspect.provenance import owed_when_merged, provenance, setting
from rollgen.inspect.report.figures import figures
from rollgen.inspect.report.samples import IDS, samples_json
from rollgen.inspect.terminal import counted, failed, notes, number, planless, share, significant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollgen.format.manifest import Manifest
    from rollgen.format.reader import StoredDataset
    from rollgen.format.rewards import Rewards
    from rollgen.inspect.curves import Curves
    from rollgen.inspect.stats import DatasetStats, PlanStats

Fact = tuple[str, str]
"""A label and its value."""


def report_content(
    dataset: StoredDataset, stats: DatasetStats, curves: Curves, rewards: Mapping[str, Rewards]
) -> dict[str, Any]:
    """JSON-able. `stats` and `curves` are those of `dataset` with these rewards. Raises DatasetError for damage."""
    return {
        "name": stats.name,
        "vocab_size": stats.manifest.vocab_size,
        "shown_ids": IDS,
        "headline": [{"label": label, "value": value, "more": more} for label, value, more in _headline(stats)],
        "notes": list(notes(stats)),
        "figures": [figure.to_json() for figure in figures(stats, curves)],
        "samples": samples_json(dataset, load_decoder(dataset.directory), rewards),
        "configuration": [{"title": title, "rows": list(rows)} for title, rows in _configuration(stats)],
    }


def _headline(stats: DatasetStats) -> Iterator[tuple[str, str, str]]:
    """Label, figure, and what else belongs to it."""
    samples, plan, support, logprobs = stats.samples, stats.plan, stats.support, stats.logprobs
    yield "Model", brief(stats.manifest.model.name), brief(stats.manifest.model.dtype)
    if runs := stats.manifest.run_names:
        yield "Runs", f"{len(runs):,}", brief(", ".join(runs))
    else:
        yield "Sampling", *_sampling(stats)
    told = planless(owed_when_merged(*stats.manifest.runs)) if plan is None else _planned(plan)
    yield "Samples", f"{samples.samples:,}", told
    each = f"{samples.samples / max(1, samples.prompts):.3g}"
    yield "Prompts", f"{samples.prompts:,}", f"{each} sample{'' if each == '1' else 's'} each"
    if samples.response_length is not None:
        length = samples.response_length
        yield "Tokens", _short(samples.generated_tokens), f"median {number(length.median)} a response"
    cut = samples.finish_reasons.get("length", 0)
    if samples.samples:
        yield "Cut at max_tokens", share(cut, samples.samples), f"{counted(cut, 'sample')} finished by length"
    if support is not None and support.size is not None:
        others = f"; {share(support.full_vocabulary, support.tokens)} not truncated" if support.full_vocabulary else ""
        largest = number(support.size.max)
        yield "Support", number(round(support.size.mean, 1)), f"ids a token; largest {largest}{others}"
        yield "Singletons", share(support.singletons, support.tokens), "tokens without a choice"
    if logprobs is not None:
        yield "Surprisal", number(round(logprobs.surprisal, 3)), "nats a token, on average"
    for rewards in stats.rewards:
        if (known := rewards.figures) is not None:
            missing = f"{rewards.not_scored:,} not scored" if rewards.not_scored else "all scored"
            yield f"Reward {rewards.name}", significant(known.mean, 4), f"on average, {missing}"
    if stats.failures.samples:
        yield "Failed", f"{stats.failures.samples:,}", failed(stats.failures)
    yield "Disk", filesize.decimal(stats.files.bytes), counted(stats.files.shards, "shard")


def _planned(plan: PlanStats) -> str:
    """What is owed of a plan and, if there are any, of its retries, whose earlier rows are stored."""
    owed = f"of {plan.samples:,} planned, {f'{plan.owed:,}' if plan.owed else 'none'} owed"
    return f"{owed}; {plan.retries_owed:,} owed again, as retries" if plan.retries_owed else owed


def _sampling(stats: DatasetStats) -> tuple[str, str]:
    """The temperature, and what else belongs to it."""
    settings = stats.settings
    told = ", ".join(
        f"{name} {brief(setting(settings[name]))}" for name in ("top_k", "top_p", "min_p", "n") if settings.get(name)
    )
    temperature = settings.get("temperature")
    return "by row" if temperature is None else f"T {brief(setting(temperature))}", told


def _short(count: int) -> str:
    """`2,441`, `12.3 million`."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,}"


def _configuration(stats: DatasetStats) -> Iterator[tuple[str, list[Fact]]]:
    """Sections of the resolved configuration; of a merged dataset those of each run."""
    manifest = stats.manifest
    for run in manifest.runs:
        yield from _sections(manifest.of_run(run), f"Run {brief(run.name)}: ")
    if not manifest.runs:
        yield from _sections(manifest, "")


def _sections(manifest: Manifest, of: str) -> Iterator[tuple[str, list[Fact]]]:
    yield f"{of}Model and supports", [(label, brief(text)) for label, text in provenance(manifest).items()]
    yield f"{of}What decides the data", _settings(manifest.identity)
    for attempt in manifest.attempts[-1:]:
        started = {"started_at": attempt.started_at, "n": attempt.n, "limit": attempt.limit}
        yield f"{of}The last attempt", _settings(started)
        if attempt.operational:
            yield f"{of}How it ran", _settings(attempt.operational)


def _settings(values: Mapping[str, object]) -> list[Fact]:
    return sorted((brief(name), brief(setting(value))) for name, value in values.items())
