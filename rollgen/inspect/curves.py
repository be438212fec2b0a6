"""What a dataset looks like along its responses and over its lengths: `curves_of(dataset, stats)`.

Figures that are drawn rather than told: support size, surprisal and entropy by place in the response, the histogram of
logprobs, lengths by finish reason, speed over time. Like `stats.py`, whose trust and memory they share, they follow
from small tables of value counts, made by streaming scans; quartiles are nearest-rank.

Costs about as much as `stats_of`, which has to come first: it checks the bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from rollgen.format.schema import DATA_DIR
from rollgen.inspect.scan import bins, collect, current_rows, named, tally
from rollgen.inspect.throughput import Throughput, throughput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollgen.format.reader import StoredDataset
    from rollgen.inspect.stats import DatasetStats

STRETCHES: Final = 64
"""Parts of the longest response that are told apart, at most."""
NAT_BINS: Final = 256
"""Bins per nat: quartiles of surprisal and entropy are exact to one, rounded down, as far as MOST_BINS; means are
exact."""
LOGPROB_BARS: Final = 48
"""Bars of the histogram of logprobs, at most, and each of a nat at most: the first may reach further."""
LENGTH_BARS: Final = 40
"""Bars of a histogram of lengths, at most."""
OTHER_REASONS: Final = "other reasons"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quartiles:
    """The middle half of some values, and their mean."""

    tokens: int
    """That have one."""
    lower: float
    median: float
    upper: float
    mean: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens `start` to `stop - 1`, counted from 0, of all responses that are as long."""

    start: int
    stop: int
    tokens: int
    singletons: int
    """Tokens whose support is one id."""
    support: Quartiles | None
    """Ids in the supports of the tokens that were truncated; None where none was."""
    surprisal: Quartiles
    """Nats: -log pi_old of the sampled token."""
    entropy: Quartiles | None
    """Nats, exact over the supports of these; None also where support_logprobs are not stored."""


@dataclass(frozen=True, slots=True)
class LogprobBar:
    """Tokens with `low` < logprob <= `high`, in nats."""

    low: float | None
    """None for a first bar of all tokens of at most `high`: a few may lie so far out that bars of one width would have
    all others in one."""
    high: float
    tokens: int
    singletons: int
    """Those of them whose support is one id: their logprob is 0."""


@dataclass(frozen=True, slots=True)
class LengthBar:
    """Samples of `low` to `high` tokens, both included, by finish reason."""

    low: int
    high: int
    samples: dict[str, int]


@dataclass(frozen=True, slots=True)
class Curves:
    """Empty tuples while nothing is stored."""

    stretches: tuple[Stretch, ...]
    """Of equal length, but for the last; in order, and as many as the longest response has."""
    logprobs: tuple[LogprobBar, ...]
    """From the least likely to 0."""
    prompt_lengths: tuple[LengthBar, ...]
    response_lengths: tuple[LengthBar, ...]
    throughput: Throughput | None

    def to_json(self) -> dict[str, Any]:
        """JSON-able, names as in these classes."""
        return asdict(self)


def curves_of(dataset: StoredDataset, stats: DatasetStats) -> Curves:
    """The curves of a dataset whose figures are `stats`. Raises DatasetError when it is damaged."""
    longest = stats.samples.response_length
    with named(dataset.directory / DATA_DIR):
        speed = throughput(dataset)
        if longest is None:
            return Curves((), (), (), (), speed)
        rows, width = current_rows(dataset), max(1, -(-int(longest.max) // STRETCHES))
        reasons = tuple(stats.samples.finish_reasons)
        sizes, surprisals, entropies = _token_tables(rows, width, support=dataset.manifest.support_logprobs)
        prompts, responses = _length_tables(rows, reasons)
    return Curves(
        stretches=tuple(_stretches(width, int(longest.max), sizes, surprisals, entropies)),
        logprobs=tuple(_logprob_bars(surprisals)),
        prompt_lengths=tuple(_length_bars(prompts, [*reasons, OTHER_REASONS])),
        response_lengths=tuple(_length_bars(responses, [*reasons, OTHER_REASONS])),
        throughput=speed,
    )


def _token_tables(rows: pl.LazyFrame, width: int, *, support: bool) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Tokens by stretch of `width` tokens and by support size, surprisal bin and entropy bin: column `tokens`.

    The second one also by whether the support is a `single` id; the last two with `total`, the sum in nats.
    """
    place = pl.int_ranges(0, pl.col("logprobs").list.len(), dtype=pl.Int64).alias("place")
    names = ["logprobs", "sampling_mask", *(["support_logprobs"] if support else [])]
    tokens = rows.select(place, *names).explode("place", *names)
    stretch = (pl.col("place") // width).clip(upper_bound=STRETCHES - 1).alias("stretch")
    size = pl.col("sampling_mask").list.len().cast(pl.Int64)
    surprisal = -pl.col("logprobs").cast(pl.Float64)
    masses = pl.col("support_logprobs").list.eval(pl.element().cast(pl.Float64).exp() * pl.element())

    def binned(nats: pl.Expr, *more: pl.Expr) -> pl.LazyFrame:
        return tokens.group_by(stretch, bins((nats * NAT_BINS).floor()), *more).agg(
            tally("place").alias("tokens"), nats.sum().alias("total")
        )

    by_size = tokens.group_by(stretch, size.alias("size")).agg(tally("place").alias("tokens"))
    tables = [by_size, binned(surprisal, size.eq_missing(1).alias("single"))]
    if support:
        tables.append(binned(-masses.list.sum()))
    sizes, surprisals, *entropies = (table.drop_nulls() for table in collect(*tables))
    return sizes, surprisals, entropies[0] if entropies else surprisals.clear()


def _length_tables(rows: pl.LazyFrame, reasons: tuple[str, ...]) -> list[pl.DataFrame]:
    """Samples by length and finish reason, of prompts and of responses: columns `length`, `finish_reason`, `len`."""
    told = pl.col("finish_reason").is_in(reasons)
    reason = pl.when(told).then("finish_reason").otherwise(pl.lit(OTHER_REASONS)).alias("finish_reason")
    lengths = (pl.col(f"{what}_length").alias("length") for what in ("prompt", "response"))
    return collect(*(rows.group_by(length, reason).len() for length in lengths))


def _stretches(
    width: int, longest: int, sizes: pl.DataFrame, surprisals: pl.DataFrame, entropies: pl.DataFrame
) -> Iterator[Stretch]:
    for number in surprisals["stretch"].unique().sort():
        here = pl.col("stretch") == number
        size, surprisal, entropy = (table.filter(here) for table in (sizes, surprisals, entropies))
        yield Stretch(
            start=number * width,
            stop=min((number + 1) * width, longest),
            tokens=int(surprisal["tokens"].sum()),
            singletons=int(surprisal.filter("single")["tokens"].sum()),
            support=_sizes(size) if len(size) else None,
            surprisal=_nats(surprisal),
            entropy=_nats(entropy) if len(entropy) else None,
        )


def _sizes(table: pl.DataFrame) -> Quartiles:
    size, tokens = table["size"].to_numpy(), table["tokens"].to_numpy()
    return Quartiles(int(tokens.sum()), *_quartiles(size, tokens), mean=float(size @ tokens / tokens.sum()))


def _nats(table: pl.DataFrame) -> Quartiles:
    tokens = table["tokens"].to_numpy()
    lower, median, upper = _quartiles(table["bin"].to_numpy(), tokens)
    mean = 0.0 + float(table["total"].to_numpy().sum() / tokens.sum())  # never -0.0
    return Quartiles(int(tokens.sum()), lower / NAT_BINS, median / NAT_BINS, upper / NAT_BINS, mean)


def _quartiles(values: Ints, counts: Ints) -> tuple[float, float, float]:
    """Nearest-rank quartiles of `counts[i]` occurrences of each `values[i]`, in any order; there are some."""
    order = np.argsort(values)
    cumulative = np.cumsum(counts[order])
    ranks = [-(-int(cumulative[-1]) * quarter // 4) for quarter in (1, 2, 3)]
    lower, median, upper = values[order][np.searchsorted(cumulative, ranks)].tolist()
    return float(lower), float(median), float(upper)


def _logprob_bars(surprisals: pl.DataFrame) -> Iterator[LogprobBar]:
    """Bars of a width of 2^k nats, 1 at most, that is a whole number of bins: the least that makes no more than
    LOGPROB_BARS. What is beyond these is in the first, which is then open."""
    places, tokens = surprisals["bin"].to_numpy(), surprisals["tokens"].to_numpy()
    farthest, width = int(places.max(initial=0)), 16
    while width < NAT_BINS and farthest // width >= LOGPROB_BARS:
        width *= 2
    is_open = farthest // width >= LOGPROB_BARS
    bars = np.minimum(places // width, LOGPROB_BARS - 1)
    all_tokens = np.bincount(bars, tokens).astype(np.int64).tolist()
    singletons = np.bincount(bars, tokens * surprisals["single"].to_numpy()).astype(np.int64).tolist()
    nats = width / NAT_BINS
    for number in reversed(range(len(all_tokens))):
        low = None if is_open and number == LOGPROB_BARS - 1 else -(number + 1) * nats
        yield LogprobBar(low, 0.0 - number * nats, all_tokens[number], singletons[number])


def _length_bars(table: pl.DataFrame, reasons: list[str]) -> Iterator[LengthBar]:
    """Bars of equal whole width over the lengths that occur, each with those of the `reasons` that it has."""
    lengths, counts = table["length"].to_numpy().astype(np.int64), table["len"].to_numpy()
    codes = np.array([reasons.index(reason) for reason in table["finish_reason"]])
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // LENGTH_BARS)
    edges = [*range(low, high + 1, width), high + 1]
    for start, stop in pairwise(edges):
        inside = (lengths >= start) & (lengths < stop)
        samples = np.bincount(codes[inside], counts[inside], len(reasons)).astype(np.int64).tolist()
        yield LengthBar(start, stop - 1, {name: count for name, count in zip(reasons, samples, strict=True) if count})
