"""The figures of a dataset on a terminal, or as plain text where there is none.

Everything that comes from the data (ids, names, reasons, errors, texts) passes through `rollgen.inert` and is printed
as `rich.text.Text`, never as markup: a dataset cannot move the cursor, set a title, reorder a line or colour it.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich import filesize
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollgen.inert import brief, plain, shorten
from rollgen.inspect.chat import text_of
from rollgen.inspect.provenance import owed_when_merged, provenance, setting
from rollgen.prompts.messages import stored_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollgen.inspect.curves import Curves, LogprobBar
    from rollgen.inspect.failures import FailureStats
    from rollgen.inspect.stats import DatasetStats, Distribution, Example, LogprobStats, SupportStats

Row = tuple[str, RenderableType]
"""A label and what stands beside it."""
Plot = tuple[str, "Sequence[float]", str]
"""What is drawn, its values, and their range."""
_Value = TypeVar("_Value")

SURPLUS: Final = "more than planned: run `rollgen verify`, which says which"

_HUGE: Final = 1e15
_BAR_WIDTH: Final = 32
_SPARK: Final = " ▁▂▃▄▅▆▇█"
"""Heights of a value in a line of them: nothing, then eighths of the largest."""
_SPARK_WIDTH: Final = 20
_COLUMNS: Final = 4
_PROMPT_TAIL: Final = 160
_TEXT_HEAD: Final = 240
_SETTING: Final = 60
_RUNS: Final = 8
"""Runs of a merged dataset that are shown."""
_DOT: Final = " · "


def render(stats: DatasetStats, console: Console, curves: Curves | None = None) -> None:
    """Print the figures, with `curves` small plots too; fits 80 columns and uses more where there are."""
    before, after = (_run, _runs, _progress, _lengths, _supports, _logprobs), (_rewards, _files, _warnings, _examples)
    plots = [] if curves is None else [_plots(curves)]
    told = [*(section(stats) for section in before), *plots, *(section(stats) for section in after)]
    show(console, Text(plain(stats.name), style="bold"), Text(), facts(*told))


def show(console: Console, *shown: RenderableType) -> None:
    """Print these; into a file or a pipe without the blanks that fill the lines of a table."""
    with console.capture() as printed:
        for renderable in shown:
            console.print(renderable)
    text = printed.get()
    console.file.write(text if console.is_terminal else "\n".join(map(str.rstrip, text.split("\n"))))


def facts(*sections: Iterable[Row]) -> Table:
    """Labels and values, an empty row after each section that has any."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for section in sections:
        rows = list(section)
        for label, value in rows:
            table.add_row(label, value)
        if rows:
            table.add_row()
    return table


def share(part: int, whole: int) -> str:
    """A percentage with one decimal."""
    return f"{part / whole:.1%}" if whole else "-"


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def number(value: float) -> str:
    """At most three decimals, thousands separated: 1234.5 is `1,234.5`. A logprob may have 38 digits: `-3e+38`."""
    if abs(value) >= _HUGE:
        return significant(value, 3)
    return f"{value:z,.3f}".rstrip("0").rstrip(".")


def significant(value: float, digits: int = 6) -> str:
    """At most so many significant digits, of a value of any size: `0.0004`, `12,345.7`, `1e+38`."""
    return f"{value:z,.{digits}g}"


def duration(seconds: float) -> str:
    """`0:05:07`, `26 days, 1:00:00`: to the second."""
    return str(timedelta(seconds=round(seconds)))


def planless(owed: int) -> str:
    """Of a dataset without a plan, which owes what its runs owed when it was merged."""
    return f"{counted(owed, 'sample')} owed when merged" if owed else "no plan: nothing is owed"


def failed(failures: FailureStats) -> str:
    """What is stored of samples that failed."""
    again = f"of {failures.retries:,} the earlier row is stored, which could not be made again"
    if not failures.retries:
        return "not stored"
    if failures.retries == failures.samples:
        return "could not be made again; the earlier rows are stored"
    return f"not stored, but {again}"


def line(*parts: str) -> Text:
    """The parts that are not empty, made plain and brief, on one line."""
    return Text(_DOT.join(brief(part) for part in parts if part))


def _counts(counts: dict[str, int], whole: int) -> Text:
    return line(*(f"{name} {count:,} ({share(count, whole)})" for name, count in counts.items()))


def _run(stats: DatasetStats) -> Iterator[Row]:
    told = provenance(stats.manifest)
    yield "Model", line(told["model"], told["dtype"], f"context {told['context']}")
    yield "Vocabulary", line(told["vocabulary"])
    if "engine" in told:
        yield "Engine", line(told["engine"], f"truncates by {told['order of truncation']}")
    columns = f"optional columns: {told['optional columns']}"
    yield "Capture", line(told["supports read by"], columns, f"format {told['format']}")
    if stats.settings:
        yield "Settings", line(*_settings(stats.settings))


def _runs(stats: DatasetStats) -> Iterator[Row]:
    """Of a merged dataset."""
    runs = zip(stats.manifest.runs, stats.runs, stats.run_settings, strict=True)
    for run, figures, settings in islice(runs, _RUNS):
        lost, owed = figures.merged - figures.samples, owed_when_merged(run)
        counts = counted(figures.samples, "sample"), counted(figures.generated_tokens, "token")
        yield (
            "Run",
            Group(
                line(
                    run.name,
                    *counts,
                    f"{owed:,} owed when merged" if owed else "",
                    f"{lost:,} more were merged, and are lost" if lost > 0 else "",
                ),
                line(shorten(run.model.name, _SETTING), run.model.dtype, run.capture),
                line(*_settings(settings)),
            ),
        )
    if (hidden := len(stats.runs) - _RUNS) > 0:
        yield "", line(f"{counted(hidden, 'run')} more; --json has all")


def _settings(settings: dict[str, Any]) -> Iterator[str]:
    return (f"{name} {shorten(setting(value), _SETTING)}" for name, value in settings.items())


def _progress(stats: DatasetStats) -> Iterator[Row]:
    samples, plan, failures = stats.samples, stats.plan, stats.failures
    if plan is None:
        held = f"{counted(samples.samples, 'sample')} for {counted(samples.prompts, 'prompt')}"
        yield "Samples", line(held, planless(owed_when_merged(*stats.manifest.runs)))
    else:
        done = f"{samples.samples:,} of {plan.samples:,} ({share(samples.samples, plan.samples)})"
        left = f"{plan.owed:,} owed" if plan.owed else "" if plan.retries_owed or plan.surplus else "complete"
        yield "Samples", line(done, left)
        skipped = f"input rows skipped: {plan.tombstones:,}" if plan.tombstones else ""
        yield "Prompts", line(f"{samples.prompts:,} of {plan.prompts:,} with samples", skipped)
    if samples.superseded or (plan is not None and plan.retries):
        owed = f"{plan.retries_owed:,} owed" if plan is not None and plan.retries_owed else ""
        yield "Made again", line(f"superseded rows, in none of these figures: {samples.superseded:,}", owed)
    if failures.samples:
        yield "Failures", line(*(f"{stage} {count:,}" for stage, count in failures.by_stage.items()), failed(failures))
        for kind in failures.errors:
            yield "", line(f"{kind.samples:,} x {kind.stage}: {shorten(kind.error, _TEXT_HEAD)}")


def _lengths(stats: DatasetStats) -> Iterator[Row]:
    samples = stats.samples
    if samples.prompt_length is None or samples.response_length is None:
        return
    yield "Tokens", line(f"{samples.generated_tokens:,} generated", f"{samples.prompt_tokens:,} of prompts")
    names = ("min", "median", "mean", "p95", "max")
    yield "Prompt", _figures(samples.prompt_length, names, 1, "tokens")
    yield "Response", _figures(samples.response_length, names, 1, "tokens")
    yield "Finish", _counts(samples.finish_reasons, samples.samples)
    if samples.stop_reasons:
        yield "Stopped by", _counts({shorten(k, _SETTING): v for k, v in samples.stop_reasons.items()}, samples.samples)


def _figures(values: Distribution, names: tuple[str, ...], digits: int, unit: str) -> Text:
    figures = [f"{name} {number(round(getattr(values, name), digits))}" for name in names]
    return line(*figures[:-1], f"{figures[-1]} {unit}")


def _supports(stats: DatasetStats) -> Iterator[Row]:
    support = stats.support
    if support is None:
        return
    if (size := support.size) is not None:
        unit = "ids a truncated token" if support.full_vocabulary else "ids a token"
        yield "Support", _figures(size, ("mean", "median", "p99", "max"), 1, unit)
        yield (
            "",
            line(
                f"singletons {share(support.singletons, support.tokens)}",
                f"top_k reached {share(support.top_k_binds, support.tokens)}",
                f"exceeded by ties {share(support.top_k_ties, support.tokens)}",
            ),
        )
    yield "", _histogram(support)


def _histogram(support: SupportStats) -> Table:
    """A bar for each bin of support sizes, and for the untruncated tokens; the longest fills the width."""
    bars = [(str(b.low) if b.low == b.high else f"{b.low:,}-{b.high:,}", b.tokens) for b in support.histogram]
    if support.full_vocabulary:
        bars.append(("full vocabulary", support.full_vocabulary))
    longest = max(tokens for _, tokens in bars)
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(style="cyan", width=_BAR_WIDTH)
    table.add_column(justify="right")
    for label, tokens in bars:
        table.add_row(label, _bar(tokens / longest), share(tokens, support.tokens))
    return table


def _bar(fraction: float) -> Text:
    """`fraction` of the bar's width in eighths of a cell; anything above zero shows."""
    eighths = round(fraction * _BAR_WIDTH * 8) or (fraction > 0)
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip())


def _logprobs(stats: DatasetStats) -> Iterator[Row]:
    logprobs: LogprobStats | None = stats.logprobs
    if logprobs is None:
        return
    yield "Logprob", _figures(logprobs.logprob, ("mean", "median", "p5", "min"), 3, "nats")
    choices = logprobs.surprisal_of_choices
    yield (
        "Surprisal",
        line(
            f"mean {number(logprobs.surprisal)} nats a token",
            f"{number(choices)} where there was a choice" if choices is not None else "",
        ),
    )
    if logprobs.support_entropy is not None:
        mean = f"mean {number(logprobs.support_entropy)} nats a token, exact over the support"
        without = 0 if stats.support is None else stats.support.full_vocabulary
        yield "Entropy", line(mean, f"not of the {counted(without, 'token')} without one" if without else "")


def _plots(curves: Curves) -> Iterator[Row]:
    """Figures as lines of small bars, each from nothing to its largest value."""
    drawn = [*_along_the_response(curves), *_histograms(curves), *_over_time(curves)]
    if not drawn:
        return
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, values, text in drawn:
        table.add_row(name, spark(values), text)
    yield "Plots", table


def _along_the_response(curves: Curves) -> Iterator[Plot]:
    stretches = curves.stretches
    supports = [(part.support.mean, part.support.tokens) for part in stretches if part.support is not None]
    if supports:
        means = _means(supports)
        yield "support by position", means, f"{_range(means, 1)} ids"
    if stretches:
        means = _means([(part.surprisal.mean, part.tokens) for part in stretches])
        yield "surprisal by position", means, f"{_range(means, 2)} nats"


def _histograms(curves: Curves) -> Iterator[Plot]:
    if bars := curves.logprobs:
        yield "tokens by logprob", _sums([bar.tokens for bar in bars]), _reach_of(bars[0])
    if lengths := curves.response_lengths:
        samples = _sums([sum(bar.samples.values()) for bar in lengths])
        yield "samples by length", samples, f"{lengths[0].low:,} to {lengths[-1].high:,} tokens"


def _reach_of(first: LogprobBar) -> str:
    return (
        f"all of at most {number(first.high)}, then to 0 nats"
        if first.low is None
        else f"{number(first.low)} to 0 nats"
    )


def _over_time(curves: Curves) -> Iterator[Plot]:
    if (speed := curves.throughput) is not None:
        rates = _means([(rate, 1) for rate in speed.rates])
        yield "tokens/s over time", rates, f"mean {number(round(speed.mean))} in {duration(speed.seconds)}"


def spark(values: Sequence[float]) -> str:
    """A character for each value of at least 0; anything above 0 shows."""
    largest = max(values)
    return "".join(_SPARK[round(value / largest * 8) or 1] if value > 0 else " " for value in values)


def _range(values: Sequence[float], digits: int) -> str:
    return f"{number(round(min(values), digits))}-{number(round(max(values), digits))}"


def _parts(values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """The values in at most _SPARK_WIDTH runs of the same length, but for the last."""
    size = -(-len(values) // _SPARK_WIDTH)
    return (values[start : start + size] for start in range(0, len(values), size))


def _means(values: Sequence[tuple[float, int]]) -> list[float]:
    """Means of runs of (value, weight)."""
    parts = list(_parts(values))
    return [sum(value * weight for value, weight in part) / sum(weight for _, weight in part) for part in parts]


def _sums(values: Sequence[int]) -> list[int]:
    return [sum(part) for part in _parts(values)]


def _rewards(stats: DatasetStats) -> Iterator[Row]:
    label = "Rewards"
    for each in stats.rewards:
        missing = f"{each.not_scored:,} not scored" if each.not_scored else ""
        yield label, line(shorten(f"{each.name} by {each.scorer}", _SETTING), f"{each.scored:,} scored", missing)
        label = ""
        if (figures := each.figures) is not None:
            told = f"mean {significant(figures.mean, 4)}", f"std {significant(figures.std, 4)}"
            span = f"{significant(figures.min)} to {significant(figures.max)}"
            yield "", line(*told, span, f"no gradient {share(figures.equal_prompts, figures.prompts)} of prompts")


def _files(stats: DatasetStats) -> Iterator[Row]:
    files, per_token = stats.files, stats.column_bytes_per_token
    counts = counted(files.shards, "shard"), counted(files.row_groups, "row group")
    yield "Disk", line(filesize.decimal(files.bytes), *counts)
    if per_token:
        largest = dict(list(per_token.items())[:_COLUMNS])
        others = sum(per_token.values()) - sum(largest.values())
        figures = [f"{name} {value:.2f}" for name, value in largest.items()]
        yield "Bytes/token", line(f"{sum(per_token.values()):.2f}", *figures, f"others {others:.2f}")


def notes(stats: DatasetStats) -> Iterator[str]:
    """What a reader of the figures should know besides: rows that should not be there, samples that loaders refuse."""
    if stats.plan is not None and stats.plan.surplus:
        yield f"{counted(stats.plan.surplus, 'row')} {SURPLUS}"
    if stats.samples.unreplayable:
        yield f"samples that cannot be replayed (loaders refuse them): {stats.samples.unreplayable:,}"
    support = stats.support
    if support is not None and (support.beyond_tokenizer or support.sampled_beyond_tokenizer):
        where = " (from the full vocabulary too)" if support.full_vocabulary else ""
        yield (
            f"ids beyond the tokenizer: in the supports of {counted(support.beyond_tokenizer, 'token')}, sampled as "
            f"{support.sampled_beyond_tokenizer:,}{where}; size trainers by the model's vocabulary"
        )


def _warnings(stats: DatasetStats) -> Iterator[Row]:
    for note in notes(stats):
        yield "Note", Text(note, style="yellow")


def _examples(stats: DatasetStats) -> Iterator[Row]:
    for example in stats.examples:
        yield "Example", _example(example)


def _example(example: Example) -> Group:
    run = "" if example.run is None else f"{example.run} / "
    title = f"{run}{example.prompt_id} / {example.sample_index}"
    prompt = "(given as token ids)" if example.prompt is None else last_turn(example.prompt)
    text = "(not decoded)" if example.text is None else example.text
    return Group(
        line(shorten(title, _SETTING), f"{example.response_length:,} tokens", example.finish_reason),
        Text(plain(shorten(prompt.strip(), _PROMPT_TAIL, tail=True)), style="dim"),
        Text(plain(shorten(text.strip(), _TEXT_HEAD))),
    )


def last_turn(prompt: str) -> str:
    """The text of a chat's last message, where `prompt` is messages as JSON text; else `prompt` itself."""
    chat = stored_messages(prompt)
    return prompt if chat is None else text_of(chat[-1])
