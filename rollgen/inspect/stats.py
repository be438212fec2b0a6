"""Figures of a dataset, finished or still being written: `stats_of(dataset)`.

Polars scans the committed shards with its streaming engine and reduces them to small tables of value counts, from
which every figure follows. Memory grows with the number of prompts and of distinct lengths, support sizes and logprob
bins, not with the number of tokens. Shards are listed once, after the journal, so that a run may commit meanwhile.

Trust: every shard is hashed against its journal line before it is scanned (Polars does not check page checksums), which
costs a few per cent of the time. Figures are of the current samples: of one that was made again, of its latest row.
What the invariants of `schema/SPEC.md` say of single rows is taken as true.

Surprisal is -log pi_old of a sampled token, in nats; its mean is an unbiased estimate of the entropy of the
distribution that was sampled from.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from rollgen.config import RunConfig, canonical_json
from rollgen.format.schema import DATA_DIR, PLAN_FILE
from rollgen.inspect.failures import FailureStats, failure_stats
from rollgen.inspect.rewards import RewardStats, reward_stats
from rollgen.inspect.runs import MergedRunStats, run_stats
from rollgen.inspect.scan import bins, collect, current, named, scan, tally
from rollgen.inspect.shards import FileStats, measure_shards
from rollgen.prompts.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rollgen.format.manifest import Manifest
    from rollgen.format.reader import StoredDataset
    from rollgen.format.rewards import Rewards

LOGPROB_BINS: Final = 1024
"""Bins per nat: quantiles of logprobs are exact to half a bin, as far as MOST_BINS; their mean, minimum and maximum are
exact."""
EXAMPLE_ROWS: Final = 64
"""Rows looked at for examples of different prompts."""
EXAMPLES: Final = 3
REASONS: Final = 8
"""Finish reasons and stop reasons that are told, of each the most frequent: a dataset may hold any number."""
SAMPLING_SETTINGS: Final = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")
SHOWN_ELSEWHERE: Final = ("model", "revision", "dtype", "max_model_len", "capture", "support_logprobs")
"""Other parts of the manifest say what they resolved to."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of `count` values; quantiles are nearest-rank: the smallest value with that share at or below it."""

    count: int
    mean: float
    min: float
    p5: float
    median: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class PlanStats:
    """What was asked for, in prompts and samples."""

    prompts: int
    """Usable prompts: tombstones are not among them."""
    samples: int
    tombstones: int
    """Input rows that could not be used and were skipped on request."""
    owed: int
    """Samples of usable prompts that are not stored."""
    surplus: int
    """Rows beyond what was planned or is to be made again; 0 unless a key is there twice or was never planned."""
    retries: int
    """Samples to be made again, over all retries."""
    retries_owed: int
    """Of these, not stored."""


@dataclass(frozen=True, slots=True)
class SampleStats:
    """What is stored, row by row."""

    samples: int
    prompts: int
    """Prompts with at least one stored sample."""
    prompt_tokens: int
    """Over all samples: a prompt counts once for each of its samples."""
    generated_tokens: int
    prompt_length: Distribution | None
    response_length: Distribution | None
    finish_reasons: dict[str, int]
    """Samples by finish reason, the most frequent few (the format has three)."""
    stop_reasons: dict[str, int]
    """Samples by stop reason (JSON text), the most frequent few. End of sequence and length have none."""
    unreplayable: int
    superseded: int
    """Stored rows of samples that were made again since; in none of the other figures."""
    superseded_tokens: int
    """Generated tokens of these rows."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens whose support has `low` to `high` ids, both included."""

    low: int
    high: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SupportStats:
    """How large supports are. Counts are of generated tokens."""

    tokens: int
    full_vocabulary: int
    """Not truncated; in none of the other figures."""
    ids: int
    """Over all supports."""
    size: Distribution | None
    histogram: tuple[Bin, ...]
    """On powers of two: 1, 2, 3-4, 5-8, ..."""
    singletons: int
    top_k_binds: int
    """Supports of at least top_k ids."""
    top_k_ties: int
    """Supports of more than top_k ids: ties at the boundary."""
    beyond_tokenizer: int
    """Supports with an id that the model has and the tokenizer has not."""
    sampled_beyond_tokenizer: int


@dataclass(frozen=True, slots=True)
class LogprobStats:
    """log pi_old of the sampled tokens, in nats."""

    logprob: Distribution
    surprisal: float
    """Mean over all tokens."""
    surprisal_of_choices: float | None
    """Mean over the tokens whose support is not a singleton; None when all are."""
    support_entropy: float | None
    """Mean exact entropy over the supports; None unless the dataset stores support_logprobs."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sample to look at. The texts are data: escape them before showing them."""

    prompt_id: str
    sample_index: int
    prompt: str | None
    text: str | None
    finish_reason: str
    response_length: int
    run: str | None = None
    """Of a merged dataset."""


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """Everything `rollgen inspect` shows."""

    name: str
    """Name of the dataset's directory, without its path."""
    manifest: Manifest
    plan: PlanStats | None
    """None for a dataset without a plan."""
    failures: FailureStats
    samples: SampleStats
    support: SupportStats | None
    """None, like `logprobs`, while nothing is stored."""
    logprobs: LogprobStats | None
    files: FileStats
    examples: tuple[Example, ...]
    runs: tuple[MergedRunStats, ...] = ()
    """Of a merged dataset; empty for any other."""
    rewards: tuple[RewardStats, ...] = ()
    """By name."""

    @property
    def settings(self) -> dict[str, Any]:
        """`settings_of` its manifest."""
        return settings_of(self.manifest)

    @property
    def run_settings(self) -> list[dict[str, Any]]:
        """Of each run of a merged dataset n and the sampling parameters, as in `settings_of`."""
        settings = [settings_of(self.manifest.of_run(run)) for run in self.manifest.runs]
        return [{name: own[name] for name in ("n", *SAMPLING_SETTINGS) if name in own} for own in settings]

    @property
    def column_bytes_per_token(self) -> dict[str, float]:
        """Bytes of the shards per stored token by column and for the rest of them (`FileStats.parts`), largest first;
        empty while nothing is stored."""
        tokens = self.samples.generated_tokens + self.samples.superseded_tokens
        return {name: size / tokens for name, size in self.files.parts.items()} if tokens else {}

    def to_json(self) -> dict[str, Any]:
        """JSON-able: nested objects and lists of plain finite values, names as in these classes."""
        sections = {
            name: None if (section := getattr(self, name)) is None else asdict(section)
            for name in ("plan", "failures", "samples", "support", "logprobs", "files")
        }
        return {
            "name": self.name,
            "manifest": self.manifest.model_dump(),
            **sections,
            "column_bytes_per_token": self.column_bytes_per_token,
            "examples": [asdict(example) for example in self.examples],
            "runs": [asdict(run) for run in self.runs],
            "rewards": [asdict(rewards) for rewards in self.rewards],
        }


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """The configuration worth showing: the usual sampling parameters and every key that is not at its default.

    With retries also their max_tokens, which the configuration of the first attempt does not have.
    """
    identity, attempts = manifest.identity, manifest.attempts
    retries = [retry.max_tokens for retry in manifest.retries]
    configured = {
        name: identity[name]
        for name, field in RunConfig.model_fields.items()
        if name in identity and name not in SHOWN_ELSEWHERE
        if name in SAMPLING_SETTINGS or canonical_json(identity[name]) != canonical_json(field.default)
    }
    samples = {"n": attempts[-1].n} if attempts else {}
    return samples | configured | ({"max_tokens of retries": retries} if retries else {})


def stats_of(dataset: StoredDataset, rewards: Mapping[str, Rewards] | None = None) -> DatasetStats:
    """Measure an open dataset, every byte of whose shards is checked first, and its `stored_rewards`, where given.

    Raises DatasetError for damage.
    """
    directory, manifest = dataset.directory, dataset.manifest
    stored = scan(dataset.shards, manifest)
    with named(directory / DATA_DIR):
        files = measure_shards(dataset.shards)
        rows = current(stored) if manifest.retries else stored
        samples = _sample_stats(rows, stored)
        return DatasetStats(
            name=directory.resolve().name,
            manifest=manifest,
            plan=_plan_stats(directory / PLAN_FILE, stored, manifest),
            failures=failure_stats(directory, stored),
            samples=samples,
            support=_support_stats(rows, manifest.tokenizer_vocab_size) if samples.samples else None,
            logprobs=_logprob_stats(rows, support=manifest.support_logprobs),
            files=files,
            examples=_examples(rows, merged=bool(manifest.runs)),
            runs=run_stats(rows, manifest),
            rewards=reward_stats(dataset, rewards or {}),
        )


def distribution(values: npt.ArrayLike, counts: npt.ArrayLike) -> Distribution | None:
    """Summarise `counts[i]` occurrences of each `values[i]` (any order); None when there are none."""
    value, count = np.asarray(values, np.float64), np.asarray(counts, np.int64)
    order = np.argsort(value)
    value, cumulative = value[order], np.cumsum(count[order])
    if not len(value):
        return None
    total = int(cumulative[-1])

    def quantile(percent: int) -> float:
        rank = -(-total * percent // 100)  # in integers: 0.95 * 20 may be more than 19
        return float(value[np.searchsorted(cumulative, rank)])

    return Distribution(
        count=total,
        mean=float(value @ count[order]) / total,
        min=float(value[0]),
        p5=quantile(5),
        median=quantile(50),
        p95=quantile(95),
        p99=quantile(99),
        max=float(value[-1]),
    )


def _count(frame: pl.LazyFrame, column: str) -> pl.LazyFrame:
    """Columns `column` and `len`, most frequent first."""
    return frame.group_by(column).len().sort(["len", column], descending=[True, False])


def _sample_stats(rows: pl.LazyFrame, stored: pl.LazyFrame) -> SampleStats:
    everything, totals, prompt_lengths, response_lengths, finish, stop = collect(
        stored.select(pl.len(), pl.col("response_length").cast(pl.Int64).sum()),
        rows.select(
            pl.len().alias("samples"),
            pl.col("prompt_index").n_unique().alias("prompts"),
            pl.col("prompt_length").cast(pl.Int64).sum().alias("prompt_tokens"),
            pl.col("response_length").cast(pl.Int64).sum().alias("generated_tokens"),
            (~pl.col("replayable")).sum().alias("unreplayable"),
        ),
        _count(rows, "prompt_length"),
        _count(rows, "response_length"),
        _count(rows, "finish_reason").head(REASONS),
        _count(rows.drop_nulls("stop_reason"), "stop_reason").head(REASONS),
    )
    figures, (samples, tokens) = totals.row(0, named=True), everything.row(0)
    return SampleStats(
        **figures,
        superseded=samples - figures["samples"],
        superseded_tokens=tokens - figures["generated_tokens"],
        prompt_length=distribution(prompt_lengths["prompt_length"], prompt_lengths["len"]),
        response_length=distribution(response_lengths["response_length"], response_lengths["len"]),
        finish_reasons=dict(finish.iter_rows()),
        stop_reasons=dict(stop.iter_rows()),
    )


def _plan_stats(path: Path, stored: pl.LazyFrame, manifest: Manifest) -> PlanStats | None:
    if manifest.is_planless:
        return None
    planned = pl.col("generation") == 0
    counts = (
        stored.filter(planned)
        .group_by("prompt_id")
        .len()
        .select("prompt_id", pl.col("len").cast(pl.Int64).alias("stored"))
    )
    planned_rows = Plan(path)
    ids = planned_rows.prompt_ids(np.arange(planned_rows.prompts))
    plan = pl.LazyFrame({"prompt_id": ids, "n": planned_rows.n.astype(np.int64), "usable": ~planned_rows.tombstone})
    missing = pl.col("n") - pl.col("stored").fill_null(0)
    figures = plan.join(counts, on="prompt_id", how="left").select(
        pl.col("usable").sum().alias("prompts"),
        pl.col("n").filter("usable").sum().alias("samples"),
        (~pl.col("usable")).sum().alias("tombstones"),
        missing.filter("usable").clip(0).sum().alias("owed"),
    )
    listed = sum(retry.samples for retry in manifest.retries)
    with named(path):
        of_plan, rows = collect(figures, stored.select(planned.sum(), (~planned).sum().alias("again")))
    of_samples, (made, made_again) = of_plan.row(0, named=True), rows.row(0)
    retries_owed = max(0, listed - made_again)
    wanted = of_samples["samples"] - of_samples["owed"] + listed - retries_owed
    return PlanStats(**of_samples, surplus=made + made_again - wanted, retries=listed, retries_owed=retries_owed)


def _support_stats(rows: pl.LazyFrame, tokenizer_vocab_size: int) -> SupportStats:
    tokens = rows.select("top_k", "token_ids", "sampling_mask").explode("token_ids", "sampling_mask")
    by_size = tokens.group_by(pl.col("sampling_mask").list.len().cast(pl.Int64).alias("size"), "top_k").agg(
        tally("token_ids").alias("tokens"),
        (pl.col("sampling_mask").list.last() >= tokenizer_vocab_size).sum().alias("beyond"),  # ids ascend
        (pl.col("token_ids") >= tokenizer_vocab_size).sum().alias("sampled_beyond"),
    )
    table = collect(by_size)[0]
    masked = table.drop_nulls("size")
    size, count, top_k = (masked[name].to_numpy() for name in ("size", "tokens", "top_k"))
    bounded = top_k > 0

    def total(chosen: npt.NDArray[np.bool_]) -> int:
        return int(count[chosen].sum())

    return SupportStats(
        tokens=int(table["tokens"].sum()),
        full_vocabulary=int(table.filter(pl.col("size").is_null())["tokens"].sum()),
        ids=int(size @ count),
        size=distribution(size, count),
        histogram=_histogram(size, count),
        singletons=total(size == 1),
        top_k_binds=total(bounded & (size >= top_k)),
        top_k_ties=total(bounded & (size > top_k)),
        beyond_tokenizer=int(table["beyond"].sum()),
        sampled_beyond_tokenizer=int(table["sampled_beyond"].sum()),
    )


def _histogram(sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> tuple[Bin, ...]:
    """Bins 1, 2, 3-4, 5-8, ... up to the largest size; bin i holds the sizes s with ceil(log2(s)) = i."""
    tokens: dict[int, int] = {}
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        index = (size - 1).bit_length()
        tokens[index] = tokens.get(index, 0) + count
    return tuple(Bin(2**i // 2 + 1, 2**i, tokens.get(i, 0)) for i in range(max(tokens, default=-1) + 1))


def _logprob_stats(rows: pl.LazyFrame, *, support: bool) -> LogprobStats | None:
    tokens = rows.select("logprobs", "sampling_mask").explode("logprobs", "sampling_mask")
    logprob, singleton = pl.col("logprobs").cast(pl.Float64), pl.col("sampling_mask").list.len().eq_missing(1)
    totals, table = collect(
        tokens.select(
            logprob.mean().alias("mean"),
            logprob.min().alias("min"),
            logprob.max().alias("max"),
            logprob.filter(~singleton).mean().alias("of_choices"),
        ),
        tokens.group_by(bins((-logprob * LOGPROB_BINS).round())).agg(tally("logprobs").alias("tokens")),
    )
    exact = totals.row(0, named=True)
    rounded = distribution(-table["bin"] / LOGPROB_BINS, table["tokens"])
    if rounded is None:
        return None
    return LogprobStats(
        logprob=replace(rounded, **{name: exact[name] for name in ("mean", "min", "max")}),
        surprisal=_negated(exact["mean"]),
        surprisal_of_choices=None if exact["of_choices"] is None else _negated(exact["of_choices"]),
        support_entropy=_support_entropy(rows) if support else None,
    )


def _support_entropy(rows: pl.LazyFrame) -> float | None:
    """Mean of -sum p log p over the supports that are stored; None when none is."""
    supports = rows.select("support_logprobs").explode("support_logprobs").drop_nulls()
    logprob = pl.col("support_logprobs").cast(pl.Float64)
    count, total = collect(
        supports.select(pl.len()), supports.explode("support_logprobs").select((logprob.exp() * logprob).sum())
    )
    return _negated(total.item() / count.item()) if count.item() else None


def _negated(mean_logprob: float) -> float:
    return 0.0 - mean_logprob  # unlike a minus sign, gives 0.0 and not -0.0 for singletons only


def _examples(rows: pl.LazyFrame, *, merged: bool) -> tuple[Example, ...]:
    """The first rows of up to three different prompts."""
    columns = ("prompt_id", "sample_index", "prompt", "text", "finish_reason", "response_length", *["run"] * merged)
    prompt = ("run", "prompt_id") if merged else ("prompt_id",)
    first = rows.select(columns).head(EXAMPLE_ROWS)
    (table,) = collect(first.unique(prompt, keep="first", maintain_order=True).head(EXAMPLES))
    return tuple(Example(**row) for row in table.iter_rows(named=True))
