"""The figures of a dataset as plotly.js draws them: `figures(stats, curves)`.

A figure is JSON: traces and a layout of plotly.js, a sentence that says what to see in it, and its numbers as a table
for those who do not see it. Colours are names (`@blue`) that the page replaces by those of its theme; what they tell
apart, patterns, dashes or labels tell apart too. Text from the data is brief and escaped: plotly reads markup.
"""

from __future__ import annotations

import html
import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich import filesize

from rollgen.inert import brief
from rollgen.inspect.terminal import counted, failed, number, share, significant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollgen.inspect.curves import Curves, LengthBar, Quartiles, Stretch
    from rollgen.inspect.failures import FailureStats
    from rollgen.inspect.rewards import RewardFigures, RewardStats
    from rollgen.inspect.stats import DatasetStats, SupportStats
    from rollgen.inspect.throughput import Throughput

Trace = dict[str, Any]
Cell = str | int | float

_LABEL: Final = 60
"""Characters of a label that comes from the data."""
_LINE: Final = 24
"""Characters of a line of a label beside a bar."""
_COLUMNS: Final = 12
"""Columns whose bytes are shown, the largest ones."""
_FILLS: Final = (("@blue", ""), ("@orange", "/"), ("@green", "x"), ("@purple", "."), ("@grey", "-"))
"""Colour and pattern of each group of stacked bars."""
_FEW_LENGTHS: Final = 10
"""Of which each is written on the axis."""
_EDGES: Final = 4
"""Of so many bars of rewards one has its edge on the axis."""
_PERCENT: Final = 100.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the page."""

    key: str
    """Its id on the page."""
    title: str
    sentence: str
    """What to see in it."""
    data: list[Trace]
    layout: dict[str, Any]
    head: tuple[str, ...]
    """Of the table of its numbers."""
    rows: Sequence[tuple[Cell, ...]]

    def to_json(self) -> dict[str, Any]:
        """JSON-able, names as here."""
        return {name: getattr(self, name) for name in self.__slots__}


def figures(stats: DatasetStats, curves: Curves) -> list[Figure]:
    """Those that the dataset has something to show in."""
    return [
        *_support_sizes(stats),
        *_supports_by_position(curves),
        *_surprisal_by_position(curves),
        *_logprobs(curves),
        *_lengths(curves),
        *_speed(curves),
        *_bytes(stats),
        *_failures(stats.failures),
        *_rewards(stats),
    ]


def label(text: str, limit: int = _LABEL) -> str:
    """Text from the data as a label: brief, inert, and no markup to plotly."""
    return html.escape(brief(text, limit), quote=False)


def _wrapped(text: str) -> str:
    """A label of several short lines, which leaves room for bars beside it."""
    lines = textwrap.wrap(brief(text, _LABEL), _LINE) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with these titles; `more` is by axis."""
    titles = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    return {name: axis | more.pop(name, {}) for name, axis in titles.items()} | more


def _percents(parts: Sequence[int], whole: int) -> list[float]:
    """With six significant digits: a token of millions shows on a logarithmic scale."""
    return [float(f"{_PERCENT * part / whole:.6g}") for part in parts]


def _support_sizes(stats: DatasetStats) -> Iterator[Figure]:
    support = stats.support
    if support is None:
        return
    bars = [(str(b.low) if b.low == b.high else f"{b.low:,}-{b.high:,}", b.tokens) for b in support.histogram]
    if support.full_vocabulary:
        bars.append((f"all {stats.manifest.vocab_size:,}", support.full_vocabulary))
    names, tokens = [name for name, _ in bars], [count for _, count in bars]
    percents = _percents(tokens, support.tokens)
    trace = {
        "type": "bar",
        "x": names,
        "y": percents,
        "text": [share(count, support.tokens) for count in tokens],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": "@blue"},
        "hovertemplate": "%{x} ids: %{y:.2f} % of tokens<extra></extra>",
    }
    layout = _axes("ids in the support (bars double in width)", "tokens, %", xaxis={"type": "category"})
    rows = list(zip(names, tokens, percents, strict=True))
    sentence = _support_sentence(support)
    yield Figure("supports", "Support sizes", sentence, [trace], layout, ("ids", "tokens", "%"), rows)


def _support_sentence(support: SupportStats) -> str:
    if support.size is None:
        return "Nothing was truncated: each token could be any id of the vocabulary."
    untruncated = share(support.full_vocabulary, support.tokens)
    others = f", but for the {untruncated} drawn from the full vocabulary" if support.full_vocabulary else ""
    return (
        f"How many ids a token was drawn from: {number(round(support.size.mean, 1))} on average{others}. "
        f"{share(support.singletons, support.tokens)} of the tokens had no choice (one id) and carry no gradient. "
        f"top_k was reached by {share(support.top_k_binds, support.tokens)}, and exceeded by ties in "
        f"{share(support.top_k_ties, support.tokens)}: where it often binds, it cuts what top_p would have kept."
    )


def _supports_by_position(curves: Curves) -> Iterator[Figure]:
    parts = [(part, part.support) for part in curves.stretches if part.support is not None]
    if not parts:
        return
    sentence = (
        "The line is the median, the band the middle half of the tokens at a position, dots the mean. A support that "
        f"widens along the answer may be a model that loses the thread. {_reach(parts[-1][1])}"
    )
    layout = _axes("position in the response, tokens", "ids in the support")
    yield Figure(
        "supports-by-position",
        "Support size along the response",
        sentence,
        _band([part for part, _ in parts], [size for _, size in parts], "@blue", "ids"),
        layout,
        ("tokens from", "to", "truncated", "lower quartile", "median", "upper quartile", "mean"),
        [_quartile_row(part, size) for part, size in parts],
    )


def _surprisal_by_position(curves: Curves) -> Iterator[Figure]:
    parts = list(curves.stretches)
    if not parts:
        return
    reach = -curves.logprobs[0].high if curves.logprobs[0].low is None else math.inf
    data = _band(parts, [part.surprisal for part in parts], "@orange", "nats", reach)
    beyond = f" Means beyond {number(reach)} nats are in the numbers only."
    exact = [(part, part.entropy) for part in parts if part.entropy is not None]
    told = ""
    if exact:
        x, y = [_middle(part) for part, _ in exact], [round(entropy.mean, 4) for _, entropy in exact]
        line = {"color": "@green", "width": 2, "dash": "dash"}
        hover = "mean entropy %{y:.3f} nats<extra></extra>"
        data.append(
            {"type": "scatter", "mode": "lines", "name": "mean entropy", "x": x, "y": y, "line": line}
            | {"hovertemplate": hover}
        )
        told = "The dashed line is the exact entropy of the supports, which the dots should follow. "
        if any(part.surprisal.tokens > entropy.tokens for part, entropy in exact):
            told = (
                "The dashed line is the exact entropy of the supports; dots are of all tokens, also of those drawn "
                "from the full vocabulary, and need not follow it. "
            )
    sentence = (
        "Surprisal is minus the logprob of the sampled token; its mean (dots) estimates the entropy of the policy. "
        f"{told}A fall towards 0 is a policy that has stopped exploring. {_reach(parts[-1].surprisal)}"
        f"{beyond if any(part.surprisal.mean > reach for part in parts) else ''}"
    )
    yield Figure(
        "surprisal-by-position",
        "Surprisal and entropy along the response" if exact else "Surprisal along the response",
        sentence,
        data,
        _axes("position in the response, tokens", "nats"),
        ("tokens from", "to", "count", "lower quartile", "median", "upper quartile", "mean", "mean entropy"),
        [
            (*_quartile_row(part, part.surprisal), "" if part.entropy is None else round(part.entropy.mean, 4))
            for part in parts
        ],
    )


def _reach(values: Quartiles) -> str:
    """Of the last point that is drawn."""
    return f"Only the longest answers reach the right end: the last point is of {values.tokens:,} tokens."


def _middle(part: Stretch) -> float:
    return (part.start + part.stop - 1) / 2


def _quartile_row(part: Stretch, values: Quartiles) -> tuple[Cell, ...]:
    """Quartiles to two decimals, as far as they are known."""
    quartiles = (round(value, 2) for value in (values.lower, values.median, values.upper))
    return (part.start, part.stop - 1, values.tokens, *quartiles, round(values.mean, 4))


def _band(
    parts: Sequence[Stretch], values: Sequence[Quartiles], color: str, unit: str, reach: float = math.inf
) -> list[Trace]:
    """Quartiles as a band, the median as a line, the mean as dots, none of them beyond `reach`.

    One token may have any finite logprob: a mean of 37 digits would flatten all else, and plotly would write it in
    styles that the page's policy forbids.
    """
    x = [_middle(part) for part in parts]
    base = {"type": "scatter", "x": x}
    edge = base | {"mode": "lines", "line": {"width": 0, "color": color}, "hoverinfo": "skip"}
    told = [[part.start, part.stop - 1, v.tokens, v.lower, v.upper] for part, v in zip(parts, values, strict=True)]
    hover = (
        f"tokens %{{customdata[0]:,}}-%{{customdata[1]:,}}: median %{{y:.2~f}} {unit}, middle half "
        "%{customdata[3]:.2~f}-%{customdata[4]:.2~f}, of %{customdata[2]:,} tokens<extra></extra>"
    )
    median = {"name": "median", "mode": "lines", "line": {"color": color, "width": 2.5}, "customdata": told}
    dots = {"name": "mean", "mode": "markers", "marker": {"color": color, "size": 5, "symbol": "circle-open"}}
    return [
        edge | {"y": [v.lower for v in values], "showlegend": False},
        edge
        | {"y": [v.upper for v in values], "fill": "tonexty", "fillcolor": f"{color}-faint", "name": "middle half"},
        base | median | {"y": [v.median for v in values], "hovertemplate": hover},
        base
        | dots
        | {
            "y": [round(v.mean, 4) if v.mean <= reach else None for v in values],
            "hovertemplate": f"mean %{{y:.3f}} {unit}<extra></extra>",
        },
    ]


def _logprobs(curves: Curves) -> Iterator[Figure]:
    bars = curves.logprobs
    tokens = sum(bar.tokens for bar in bars)
    if not tokens:
        return
    singletons = sum(bar.singletons for bar in bars)
    percents = _percents([bar.tokens - bar.singletons for bar in bars], tokens)
    width = -(bars[-1].low or 0.0)
    told = [f"up to {bar.high}" if bar.low is None else f"{bar.low} to {bar.high}" for bar in bars]
    trace = {
        "type": "bar",
        "x": [bar.high - width / 2 for bar in bars],
        "y": percents,
        "width": width,
        "customdata": told,
        "marker": {"color": "@purple", "line": {"color": "@background", "width": 1}},
        "hovertemplate": "%{customdata} nats: %{y:.3~g} % of tokens<extra></extra>",
    }
    beyond = f" The first bar holds all tokens of at most {number(bars[0].high)}." if bars[0].low is None else ""
    sentence = (
        "How likely the tokens were that were sampled: at 0 certain, at -1 one in 3, at -3 one in 20, at -5 one in "
        f"150. Not in it are the {share(singletons, tokens)} with a support of one id, whose logprob is 0. Mind the "
        f"logarithmic scale: a long foot on the left is what ratios blow up on.{beyond}"
    )
    yield Figure(
        "logprobs",
        "Logprobs of the sampled tokens",
        sentence,
        [trace],
        _axes("logprob, nats", "tokens, %", yaxis={"type": "log", "rangemode": "normal", "dtick": "D2"}, bargap=0),
        ("above", "to", "tokens", "of one id"),
        [("" if bar.low is None else bar.low, bar.high, bar.tokens, bar.singletons) for bar in bars],
    )


def _lengths(curves: Curves) -> Iterator[Figure]:
    if curves.response_lengths:
        sentence = (
            "A tall last bar of answers that ended by length is a max_tokens that cuts: --retry "
            "finish_reason=length makes these longer."
        )
        yield _length_figure("responses", "Response lengths", sentence, curves.response_lengths, by_reason=True)
        sentence = "Of every sample its prompt, in tokens: a prompt counts once for each of its samples."
        yield _length_figure("prompts", "Prompt lengths", sentence, curves.prompt_lengths, by_reason=False)


def _length_figure(key: str, title: str, sentence: str, bars: Sequence[LengthBar], *, by_reason: bool) -> Figure:
    reasons = list(dict.fromkeys(reason for bar in bars for reason in bar.samples)) if by_reason else []
    groups = {reason: [bar.samples.get(reason, 0) for bar in bars] for reason in reasons}
    series = groups or {"samples": [sum(bar.samples.values()) for bar in bars]}
    common = {
        "type": "bar",
        "x": [(bar.low + bar.high) / 2 for bar in bars],
        "width": [bar.high - bar.low + 1 for bar in bars],
        "customdata": [[bar.low, bar.high] for bar in bars],
    }
    data = []
    for place, (name, counts) in enumerate(series.items()):
        color, pattern = _FILLS[min(place, len(_FILLS) - 1)]
        fill = {"shape": pattern, "fillmode": "overlay", "fgcolor": "@background", "size": 7, "solidity": 0.22}
        marker = {"color": color, "pattern": fill, "line": {"color": "@background", "width": 1}}
        hover = "%{customdata[0]:,}-%{customdata[1]:,} tokens: %{y:,} %{fullData.name}<extra></extra>"
        data.append(common | {"name": label(name), "y": counts, "marker": marker, "hovertemplate": hover})
    ticks = {"dtick": 1} if bars[-1].high - bars[0].low < _FEW_LENGTHS else {}
    layout = _axes("tokens", "samples", xaxis=ticks, bargap=0, barmode="stack", showlegend=len(data) > 1)
    rows = [(bar.low, bar.high, *counts) for bar, *counts in zip(bars, *series.values(), strict=True)]
    return Figure(key, title, sentence, data, layout, ("from", "to", *map(brief, series)), rows)


def _speed(curves: Curves) -> Iterator[Figure]:
    speed = curves.throughput
    if speed is None:
        return
    unit, seconds = _time_unit(speed.seconds)
    edges = [round(speed.seconds / seconds * place / len(speed.rates), 4) for place in range(len(speed.rates) + 1)]
    rates = [round(rate, 1) for rate in speed.rates]
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": edges,
        "y": [*rates, rates[-1]],
        "line": {"shape": "hv", "color": "@green", "width": 2},
        "fill": "tozeroy",
        "fillcolor": "@green-faint",
        "hovertemplate": f"%{{x:.3~g}} {unit}: %{{y:,.0f}} tokens/s<extra></extra>",
    }
    rows = list(zip(edges, edges[1:], rates, strict=False))
    yield Figure(
        "speed",
        "Tokens a second while sampling",
        _speed_sentence(speed),
        [trace],
        _axes(f"{unit} of sampling", "generated tokens a second"),
        (f"from, {unit}", "to", "tokens/s"),
        rows,
    )


def _speed_sentence(speed: Throughput) -> str:
    return (
        f"{number(round(speed.mean))} tokens a second on average, over all writers, by the times of their commits; "
        "pauses and the loading of models are left out. A low end is the few long answers that keep an engine waiting."
    )


def _time_unit(seconds: float) -> tuple[str, float]:
    """In which a span of time is told, and its seconds."""
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def _bytes(stats: DatasetStats) -> Iterator[Figure]:
    per_token = list(stats.column_bytes_per_token.items())
    if not per_token:
        return
    rest = per_token[_COLUMNS:]
    bars = [*per_token[:_COLUMNS], *([("others", sum(size for _, size in rest))] if rest else [])]
    total, (largest, size) = sum(size for _, size in per_token), per_token[0]
    sentence = (
        f"{total:.1f} bytes a generated token, {filesize.decimal(stats.files.bytes)} in all; the largest part, "
        f"{largest}, takes {size / total:.1%} of it."
    )
    names, sizes = [name for name, _ in bars], [round(size, 4) for _, size in bars]
    data, layout = _horizontal(names, sizes, "bytes a token", "@blue")
    rows = list(zip(names, sizes, strict=True))
    yield Figure("bytes", "Bytes by column", sentence, data, layout, ("column", "bytes a token"), rows)


def _failures(failures: FailureStats) -> Iterator[Figure]:
    if not failures.samples:
        return
    rows: list[tuple[Cell, ...]] = [(brief(it.stage), brief(it.error), it.samples) for it in failures.errors]
    others = failures.samples - sum(it.samples for it in failures.errors)
    names = [f"{it.stage}: {it.error}" for it in failures.errors]
    counts = [it.samples for it in failures.errors]
    if others:
        names.append("other errors")
        counts.append(others)
        rows.append(("", "other errors", others))
    sentence = (
        f"{counted(failures.samples, 'sample')}: {failed(failures)}. Engine errors are tried again by --resume; rows "
        "of the input that were skipped are not."
    )
    data, layout = _horizontal(names, counts, "samples", "@orange")
    head = ("stage", "error", "samples")
    yield Figure("failures", "What failed", sentence, data, layout, head, rows)


def _rewards(stats: DatasetStats) -> Iterator[Figure]:
    for place, rewards in enumerate(stats.rewards):
        if (figures := rewards.figures) is not None:
            yield _reward_figure(place, rewards, figures)


def _reward_figure(place: int, rewards: RewardStats, figures: RewardFigures) -> Figure:
    """A bar for each reward, or for each range of them, side by side: whatever their size, plotly can draw them."""
    bars = figures.bars
    places = list(range(len(bars)))
    counts = [bar.samples for bar in bars]
    trace: Trace = {
        "type": "bar",
        "y": counts,
        "x": places,
        "customdata": [[significant(bar.low), significant(bar.high)] for bar in bars],
        "marker": {"color": "@green", "line": {"color": "@background", "width": 1}},
    }
    if all(bar.low == bar.high for bar in bars):
        ticks = {"tickvals": places, "ticktext": [significant(bar.low) for bar in bars]}
        told = [share(count, rewards.scored) for count in counts]
        trace |= {"text": told, "textposition": "outside", "cliponaxis": False}
        trace["hovertemplate"] = "%{customdata[0]}: %{y:,} samples<extra></extra>"
    else:
        edges = [*(bar.low for bar in bars), bars[-1].high][::_EDGES]
        ticks = {
            "range": [-0.6, len(bars) - 0.4],  # with its edges
            "zeroline": False,
            "tickvals": [place * _EDGES - 0.5 for place in range(len(edges))],
            "ticktext": [significant(edge, 3) for edge in edges],
        }
        trace |= {"width": 1}
        trace["hovertemplate"] = "%{customdata[0]} to %{customdata[1]}: %{y:,} samples<extra></extra>"
    missing = f" {rewards.not_scored:,} samples are not scored." if rewards.not_scored else ""
    sentence = (
        f"By {brief(rewards.scorer, _LABEL)}: mean {significant(figures.mean, 4)}, standard deviation "
        f"{significant(figures.std, 4)}.{missing} For {share(figures.equal_prompts, figures.prompts)} of the prompts "
        "all samples have the same reward, which is no advantage and no gradient."
    )
    rows: list[tuple[Cell, ...]] = [(bar.low, bar.high, bar.samples) for bar in bars]
    layout = _axes("reward", "samples", xaxis=ticks)
    title, head = f"Rewards: {rewards.name}", ("from", "to", "samples")
    return Figure(f"rewards-{place}", title, sentence, [trace], layout, head, rows)


def _horizontal(
    names: Sequence[str], values: Sequence[float], unit: str, color: str
) -> tuple[list[Trace], dict[str, Any]]:
    """Bars from top to bottom, each with its name: names may be the same, places are not."""
    places = list(range(len(names)))
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": list(values),
        "y": places,
        "text": [number(round(value, 2)) for value in values],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": color},
        "hovertemplate": f"%{{x:,.4~g}} {unit}<extra></extra>",
    }
    ticks = {"tickvals": places, "ticktext": [_wrapped(name) for name in names], "autorange": "reversed"}
    return [trace], {"xaxis": {"title": {"text": unit}, "rangemode": "tozero"}, "yaxis": ticks}
