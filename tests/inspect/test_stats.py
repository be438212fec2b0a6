"""Figures against a plain recomputation on random data; unfinished, damaged and live datasets."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections import Counter
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rollgen.config import digest
from rollgen.errors import DatasetError, MissingFile
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog
from rollgen.format.journal import footer_sha256, list_shards
from rollgen.format.manifest import PLANLESS, Retry, read_manifest, replace_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.writer import ShardWriter
from rollgen.inspect import stats as module
from rollgen.inspect.card import dataset_card
from rollgen.inspect.shards import REST
from rollgen.inspect.stats import LOGPROB_BINS, Distribution, distribution, stats_of
from rollgen.inspect.terminal import failed, render

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollgen.rollouts import Completion

TOKENIZER_VOCAB_SIZE, TOP_K, SAMPLES = 480, 8, 3
HALF_A_BIN = 0.5 / LOGPROB_BINS + 1e-9


def nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(round(share * len(values), 9)) - 1]


def supports(completions: list[Completion]) -> list[list[int] | None]:
    """One entry a token: its ids, or None where it was not truncated."""
    return [
        c.mask_ids[start:stop].tolist() or None
        for c in completions
        for start, stop in zip(c.mask_offsets[:-1], c.mask_offsets[1:], strict=True)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_samples_match_a_recomputation(make_dataset: Callable[..., Any], seed: int) -> None:
    """Counts, lengths and reasons are those of the completions written."""
    directory, completions = make_dataset(seed)
    samples = stats_of(open_dataset(directory)).samples
    lengths = [float(len(c.token_ids)) for c in completions]
    assert (samples.samples, samples.prompts) == (36, 12)  # 12 prompts x 3 samples
    assert samples.generated_tokens == sum(lengths)
    assert samples.prompt_tokens == sum(len(c.prompt_token_ids) for c in completions)
    assert samples.finish_reasons == Counter(c.finish_reason for c in completions)
    assert samples.stop_reasons == Counter(c.stop_reason for c in completions if c.stop_reason)
    assert samples.unreplayable == sum(not c.replayable for c in completions)
    assert samples.response_length is not None
    assert samples.response_length.mean == pytest.approx(statistics.mean(lengths))
    assert samples.response_length.median == nearest_rank(lengths, 0.5)
    assert samples.response_length.p95 == nearest_rank(lengths, 0.95)
    assert (samples.response_length.min, samples.response_length.max) == (min(lengths), max(lengths))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_supports_match_a_recomputation(make_dataset: Callable[..., Any], seed: int) -> None:
    """Sizes, histogram, binding and ids beyond the tokenizer are those of the supports written."""
    directory, completions = make_dataset(seed)
    support = stats_of(open_dataset(directory)).support
    assert support is not None
    all_supports = supports(completions)
    masks = [ids for ids in all_supports if ids]
    sizes = [float(len(ids)) for ids in masks]
    assert (support.tokens, support.full_vocabulary) == (len(all_supports), len(all_supports) - len(masks))
    assert support.ids == sum(sizes)
    assert support.size is not None
    assert support.size.mean == pytest.approx(statistics.mean(sizes))
    assert (support.size.median, support.size.p99) == (nearest_rank(sizes, 0.5), nearest_rank(sizes, 0.99))
    assert [(b.low, b.high) for b in support.histogram] == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]  # sizes go to 13
    assert [b.tokens for b in support.histogram] == [
        sum(b.low <= n <= b.high for n in sizes) for b in support.histogram
    ]
    assert support.singletons == sum(n == 1 for n in sizes)
    assert support.top_k_binds == sum(n >= TOP_K for n in sizes)
    assert support.top_k_ties == sum(n > TOP_K for n in sizes)
    assert support.beyond_tokenizer == sum(max(ids) >= TOKENIZER_VOCAB_SIZE for ids in masks)
    assert support.sampled_beyond_tokenizer == sum(
        int((c.token_ids >= TOKENIZER_VOCAB_SIZE).sum()) for c in completions
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logprobs_match_a_recomputation(make_dataset: Callable[..., Any], seed: int) -> None:
    """Mean, minimum and entropies are exact, quantiles to half a bin."""
    directory, completions = make_dataset(seed, support_logprobs=True)
    logprobs = stats_of(open_dataset(directory)).logprobs
    assert logprobs is not None
    values = [float(x) for c in completions for x in c.logprobs]
    choices = [x for x, ids in zip(values, supports(completions), strict=True) if ids is None or len(ids) > 1]
    assert logprobs.logprob.mean == pytest.approx(statistics.mean(values))
    assert (logprobs.logprob.min, logprobs.logprob.max) == (min(values), max(values))
    assert logprobs.logprob.median == pytest.approx(nearest_rank(values, 0.5), abs=HALF_A_BIN)
    assert logprobs.logprob.p5 == pytest.approx(nearest_rank(values, 0.05), abs=HALF_A_BIN)
    assert logprobs.surprisal == pytest.approx(-statistics.mean(values))
    assert logprobs.surprisal_of_choices == pytest.approx(-statistics.mean(choices))
    stored = np.concatenate([c.support_logprobs for c in completions]).astype(np.float64)
    tokens = sum(ids is not None for ids in supports(completions))
    assert logprobs.support_entropy == pytest.approx(-(np.exp(stored) * stored).sum() / tokens)


def test_support_entropy_is_absent_without_support_logprobs(make_dataset: Callable[..., Any]) -> None:
    """It is never estimated from sampled tokens alone."""
    logprobs = stats_of(open_dataset(make_dataset(0).directory)).logprobs
    assert logprobs is not None
    assert logprobs.support_entropy is None


def test_plan_counts_what_is_owed(make_dataset: Callable[..., Any]) -> None:
    """12 prompts of 4 samples of which 3 are stored; the tombstone's 5 samples are neither planned nor owed."""
    plan = stats_of(open_dataset(make_dataset(0).directory)).plan
    assert plan is not None
    assert (plan.prompts, plan.samples, plan.tombstones, plan.owed) == (12, 48, 1, 12)


@pytest.fixture
def retried(make_dataset: Callable[..., Any]) -> tuple[Path, list[Completion], list[Completion]]:
    """A dataset of which p0/0, p1/0 and p2/0 were to be made again and the first two were, p0/0 twice.

    Its directory, its current completions, and those that they supersede.
    """
    directory, completions = make_dataset(0)
    again = [
        replace(other, prompt_index=prompt, prompt_id=f"p{prompt}", sample_index=0, generation=generation)
        for other, (prompt, generation) in zip(completions[9:], ((0, 1), (1, 1), (0, 2)), strict=False)
    ]
    stored = read_manifest(directory)
    for generation, samples in ((1, 3), (2, 1)):
        where = {"finish_reason": "length"}
        stored = stored.with_retry(
            Retry(generation=generation, started_at="", where=where, max_tokens=99, samples=samples)
        )
    replace_manifest(directory, stored)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, stored, commit_interval=math.inf) as writer:
        for completion in again:
            writer.add(completion)
    superseded = [completions[0], completions[SAMPLES], again[0]]
    kept = [c for c in completions if c not in superseded]
    return directory, [*kept, *again[1:]], superseded


def test_figures_are_of_current_rows(retried: tuple[Path, list[Completion], list[Completion]]) -> None:
    """Counts, lengths, supports and logprobs leave out what was made again since; its number is beside them."""
    directory, current, superseded = retried
    stats = stats_of(open_dataset(directory))
    samples = stats.samples
    assert (samples.samples, samples.prompts, samples.superseded) == (36, 12, 3)
    assert samples.generated_tokens == sum(len(c.token_ids) for c in current)
    assert samples.superseded_tokens == sum(len(c.token_ids) for c in superseded)
    assert samples.finish_reasons == Counter(c.finish_reason for c in current)
    assert stats.support is not None
    assert stats.support.ids == sum(len(c.mask_ids) for c in current)
    assert stats.logprobs is not None
    assert stats.logprobs.logprob.mean == pytest.approx(statistics.mean(float(x) for c in current for x in c.logprobs))
    json.dumps(stats.to_json(), allow_nan=False)


def test_bytes_are_of_all_rows(retried: tuple[Path, list[Completion], list[Completion]]) -> None:
    """Superseded rows take their place on disk, so they count where bytes are divided by tokens."""
    directory, current, superseded = retried
    stats = stats_of(open_dataset(directory))
    tokens = sum(len(c.token_ids) for c in [*current, *superseded])
    assert sum(stats.column_bytes_per_token.values()) == pytest.approx(stats.files.bytes / tokens)


def test_retries_are_owed_beside_the_plan(retried: tuple[Path, list[Completion], list[Completion]]) -> None:
    """12 of 48 planned samples, as before; 1 of the 4 of both retries, whose failure counts until it is made."""
    directory, _, _ = retried
    log = FailureLog(directory, "w0")
    log.record("p2", 2, 0, "engine", "died", generation=1)
    log.record("p1", 1, 0, "engine", "died", generation=1)  # stored since
    stats = stats_of(open_dataset(directory))
    assert stats.plan is not None
    assert (stats.plan.samples, stats.plan.owed, stats.plan.retries, stats.plan.retries_owed) == (48, 12, 4, 1)
    assert (stats.failures.samples, stats.failures.retries, stats.failures.by_stage) == (1, 1, {"engine": 1})
    console = Console(file=StringIO(), width=100)
    render(stats, console)
    assert "engine 1 · could not be made again; the earlier rows are stored" in console.file.getvalue()
    log.record("p0", 0, 3, "engine", "died")
    failures = stats_of(open_dataset(directory)).failures
    assert (failures.samples, failures.retries) == (2, 1)
    assert failed(failures) == "not stored, but of 1 the earlier row is stored, which could not be made again"


def test_superseded_rows_are_shown(retried: tuple[Path, list[Completion], list[Completion]]) -> None:
    """Their number on the terminal and in the card, which also says how to pass over them."""
    stats = stats_of(open_dataset(retried[0]))
    console = Console(file=StringIO(), width=100)
    render(stats, console)
    assert "superseded rows, in none of these figures: 3 · 1 owed" in console.file.getvalue()
    card = dataset_card(stats)
    assert "| superseded rows, in no other figure | 3 |" in card
    assert "keeping the highest `generation`" in card


def test_shards_of_1_0_are_of_generation_0(retried: tuple[Path, list[Completion], list[Completion]]) -> None:
    """A dataset begun before there were generations, and retried later: the same figures."""
    directory, _, _ = retried
    before = stats_of(open_dataset(directory))
    journal = directory / "journal" / "w0.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines[:3]:
        path = directory / "data" / line["file"]
        table = pq.read_table(path).drop_columns("generation")
        pq.write_table(table, path, write_page_checksum=True)
        content = path.read_bytes()
        line |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        line["footer_sha256"] = footer_sha256(path)
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    after = stats_of(open_dataset(directory))
    assert (after.samples, after.support, after.logprobs) == (before.samples, before.support, before.logprobs)
    assert (after.plan, after.examples) == (before.plan, before.examples)


def test_stored_samples_and_later_lines_win_over_failures(make_dataset: Callable[..., Any]) -> None:
    """p0/0 is stored since, p1/3 failed twice and counts once, with its later stage."""
    directory = make_dataset(0).directory
    log = FailureLog(directory, "w0")
    log.record("p0", 0, 0, "engine", "died")
    log.record("p1", 1, 3, "engine", "died")
    log.record("p1", 1, 3, "capture", "incomplete")
    log.record("bad", 12, 0, "input", "no prompt")
    failures = stats_of(open_dataset(directory)).failures
    assert failures.samples == 2
    assert failures.by_stage == {"capture": 1, "input": 1}
    assert [(e.stage, e.error, e.samples) for e in failures.errors] == [
        ("capture", "incomplete", 1),
        ("input", "no prompt", 1),
    ]


def test_torn_failure_line_is_ignored(make_dataset: Callable[..., Any]) -> None:
    """A line without newline is an interrupted append."""
    directory = make_dataset(0).directory
    FailureLog(directory, "w0").record("p1", 1, 3, "engine", "died")
    with (directory / "failures" / "w0.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "p2", "samp')
    assert stats_of(open_dataset(directory)).failures.samples == 1


def test_files_are_measured_from_footers(make_dataset: Callable[..., Any]) -> None:
    """Bytes of columns add up to less than the files: with magic, indexes and footers to all of them."""
    directory = make_dataset(0).directory
    stats = stats_of(open_dataset(directory))
    files, shards = stats.files, list((directory / "data").glob("*.parquet"))
    assert files.shards == len(shards) == 3
    assert files.bytes == sum(shard.stat().st_size for shard in shards)
    rest = files.bytes - sum(files.column_bytes.values())
    assert 0 < rest < files.bytes
    assert files.parts == files.column_bytes | {REST: rest}
    assert list(files.parts.values()) == sorted(files.parts.values(), reverse=True)
    assert sum(stats.column_bytes_per_token.values()) == pytest.approx(files.bytes / stats.samples.generated_tokens)


def test_settings_are_sampling_and_non_default_keys(make_dataset: Callable[..., Any]) -> None:
    """`chat` is not at its default; `min_p` is, and is shown all the same; `capture` is shown elsewhere."""
    settings = stats_of(open_dataset(make_dataset(0).directory)).settings
    assert settings == {
        "n": 3,
        "temperature": 0.7,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 60,
        "chat": True,
    }


def test_settings_of_retries(make_dataset: Callable[..., Any]) -> None:
    """Their max_tokens are told too: the configuration is that of the first attempt."""
    stats = stats_of(open_dataset(make_dataset(0).directory))
    retry = Retry(generation=1, started_at="", where={"finish_reason": "length"}, max_tokens=96, samples=1)
    settings = replace(stats, manifest=stats.manifest.with_retry(retry)).settings
    assert (settings["max_tokens"], settings["max_tokens of retries"]) == (60, [96])


def test_run_without_shards(empty_dataset: Path) -> None:
    """Everything is owed and nothing divides by zero."""
    stats = stats_of(open_dataset(empty_dataset))
    assert stats.samples.samples == stats.files.shards == 0
    assert stats.plan is not None
    assert stats.plan.owed == stats.plan.samples == 24  # 12 prompts x 2
    assert (stats.support, stats.logprobs, stats.examples, stats.column_bytes_per_token) == (None, None, (), {})
    json.dumps(stats.to_json(), allow_nan=False)


def test_dataset_without_plan(make_dataset: Callable[..., Any]) -> None:
    """A program with its own loop writes none, and says so; elsewhere it is missing, and what is owed is not known."""
    directory = make_dataset(0).directory
    (directory / "plan.parquet").unlink()
    with pytest.raises(DatasetError, match=r"plan\.parquet: missing"):
        stats_of(open_dataset(directory))
    record = read_manifest(directory)
    identity = record.identity | {PLANLESS: True}
    for shard in list_shards(directory):  # they name the dataset that they are of
        shard.unlink()
    (directory / "journal" / "w0.jsonl").unlink()
    replace_manifest(directory, record.model_copy(update={"identity": identity, "config_digest": digest(identity)}))
    assert stats_of(open_dataset(directory)).plan is None


def test_more_rows_than_planned(make_dataset: Callable[..., Any], commit: Callable[..., None]) -> None:
    """A shard that is there twice is 12 rows too many of 12 prompts: nothing is owed less, and never less than none.

    Of each of 12 prompts 3 of 4 samples are stored. The first shard has those of the prompts 0 to 3.
    """
    directory, completions = make_dataset(0)
    commit(directory, completions[:12], "w1")
    plan = stats_of(open_dataset(directory)).plan
    assert plan is not None
    assert (plan.samples, plan.owed, plan.surplus) == (48, 8, 8)  # 4 rows pass for the samples that prompts 0-3 lack
    commit(directory, completions[:12], "w2")
    plan = stats_of(open_dataset(directory)).plan
    assert plan is not None
    assert (plan.owed, plan.surplus) == (8, 20)


def test_json_is_plain(make_dataset: Callable[..., Any]) -> None:
    """It survives a round trip through strict JSON."""
    report = stats_of(open_dataset(make_dataset(0, support_logprobs=True).directory)).to_json()
    assert json.loads(json.dumps(report, allow_nan=False)) == json.loads(json.dumps(report))
    assert report["samples"]["samples"] == 36
    assert len(report["examples"]) == 3


def test_files_of_a_live_run_are_ignored(make_dataset: Callable[..., Any]) -> None:
    """A temporary file and a shard whose journal line is not written yet are what a live run looks like."""
    directory, completions = make_dataset(0)
    (directory / "data" / ".tmp-w0-000009").write_bytes(b"PAR1 half a shard")
    journal = directory / "journal" / "w0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))
    assert stats_of(open_dataset(directory)).samples.samples == len(completions)


def first_shard(directory: Path) -> Path:
    return min((directory / "data").glob("part-*.parquet"))


def flip_a_bit(directory: Path) -> None:
    shard = first_shard(directory)
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)


def truncate(directory: Path) -> None:
    os.truncate(first_shard(directory), 1000)


def remove_a_shard(directory: Path) -> None:
    first_shard(directory).unlink()


def remove_the_manifest(directory: Path) -> None:
    (directory / "rollgen.json").unlink()


def damage_the_plan(directory: Path) -> None:
    os.truncate(directory / "plan.parquet", 100)


def damage_a_failure_line(directory: Path) -> None:
    (directory / "failures").mkdir()
    (directory / "failures" / "w0.jsonl").write_bytes(b"{}\n")


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (flip_a_bit, "part-w0-000000.parquet"),
        (truncate, "part-w0-000000.parquet"),
        (remove_a_shard, "part-w0-000000.parquet"),
        (remove_the_manifest, "rollgen.json"),
        (damage_the_plan, "plan.parquet"),
        (damage_a_failure_line, "w0.jsonl:1"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_is_an_error_that_names_the_file(
    make_dataset: Callable[..., Any], damage: Callable[[Path], None], place: str
) -> None:
    """Wrong figures are never shown."""
    directory = make_dataset(0).directory
    damage(directory)
    with pytest.raises(DatasetError, match=place):
        stats_of(open_dataset(directory))


@pytest.mark.parametrize(
    ("values", "counts", "expected"),
    [
        ([], [], None),
        ([3], [1], Distribution(1, 3, 3, 3, 3, 3, 3, 3)),
        # 1..20: nearest ranks ceil(0.05 * 20) = 1, ceil(0.5 * 20) = 10, ceil(0.95 * 20) = 19, ceil(0.99 * 20) = 20
        (range(1, 21), [1] * 20, Distribution(20, 10.5, 1, 1, 10, 19, 20, 20)),
        # unsorted values with counts: 99 ones and a single 7; p99 is the 99th value, still a one
        ([7, 1], [1, 99], Distribution(100, 1.06, 1, 1, 1, 1, 1, 7)),
    ],
    ids=["none", "one", "twenty", "counted"],
)
def test_distribution(values: list[int], counts: list[int], expected: Distribution | None) -> None:
    """Quantiles are nearest-rank over repeated values."""
    assert distribution(list(values), counts) == expected


@pytest.mark.parametrize("step", ["measure_shards", "scan", "_examples"])
def test_shards_that_are_replaced_meanwhile(
    make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As by a compaction that ends before they are looked at, or between two looks: what to do is said."""
    directory = make_dataset(0).directory
    dataset, real = open_dataset(directory), getattr(module, step)

    def after(*values: Any, **named: Any) -> Any:
        first_shard(directory).unlink(missing_ok=True)
        return real(*values, **named)

    monkeypatch.setattr(module, step, after)
    with pytest.raises(MissingFile, match=r"data: a file was replaced, or set aside, .*; start again$"):
        stats_of(dataset)


def test_damage_without_a_journal_line_is_found_too(make_dataset: Callable[..., Any]) -> None:
    """There is no hash to compare with, so the pages are read back."""
    directory = make_dataset(0).directory
    (directory / "journal" / "w0.jsonl").write_bytes(b"")
    flip_a_bit(directory)
    with pytest.raises(DatasetError, match=r"part-w0-000000\.parquet"):
        stats_of(open_dataset(directory))
