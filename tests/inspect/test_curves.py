"""Curves against a plain recomputation on random data."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from rollgen.config import digest
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import PLANLESS, create_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.writer import ShardWriter
from rollgen.inspect import curves as module
from rollgen.inspect.card import write_card
from rollgen.inspect.curves import NAT_BINS, Curves, Quartiles, curves_of
from rollgen.inspect.decoding import Decoder
from rollgen.inspect.report.figures import figures
from rollgen.inspect.report.samples import samples_json
from rollgen.inspect.stats import stats_of
from rollgen.inspect.terminal import render

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollgen.rollouts import Completion

A_BIN = 1 / NAT_BINS


class Token(NamedTuple):
    place: int
    size: int
    """0: not truncated."""
    logprob: float
    entropy: float


def tokens_of(completions: list[Completion]) -> list[Token]:
    tokens = []
    for completion in completions:
        assert completion.support_logprobs is not None
        for place, logprob in enumerate(completion.logprobs.tolist()):
            start, stop = completion.mask_offsets[place : place + 2].tolist()
            masses = completion.support_logprobs[start:stop].astype(np.float64)
            tokens.append(Token(place, stop - start, logprob, float(-(np.exp(masses) * masses).sum())))
    return tokens


@pytest.fixture
def write_planless(tmp_path: Path, make_manifest: Callable[..., Any]) -> Callable[[list[Completion]], Path]:
    """`write_planless(completions)`: the directory of a dataset of these, without a plan."""

    def write(completions: list[Completion]) -> Path:
        identity = {PLANLESS: True}
        directory, manifest = tmp_path / "out", make_manifest(identity=identity, config_digest=digest(identity))
        directory.mkdir()
        create_manifest(directory, manifest)
        with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
            for completion in completions:
                writer.add(completion)
        return directory

    return write


def measure(directory: Path) -> Curves:
    dataset = open_dataset(directory)
    return curves_of(dataset, stats_of(dataset))


def nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(round(share * len(values), 9)) - 1]


def check_quartiles(found: Quartiles | None, values: list[float], within: float = 0.0) -> None:
    """`found` is rounded down by less than `within`."""
    assert (found is None) == (not values)
    if found is not None:
        assert found.tokens == len(values)
        for share, quartile in ((0.25, found.lower), (0.5, found.median), (0.75, found.upper)):
            assert nearest_rank(values, share) - within - 1e-9 <= quartile <= nearest_rank(values, share) + 1e-9
        assert found.mean == pytest.approx(statistics.mean(values), abs=1e-9)


@pytest.mark.parametrize("most", [64, 7, 1])
def test_along_the_response(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Each token is in the stretch of its place, whatever their number; quartiles are nearest-rank, means exact."""
    monkeypatch.setattr(module, "STRETCHES", most)
    directory, completions = make_dataset(0, support_logprobs=True)
    tokens, longest = tokens_of(completions), max(len(c.token_ids) for c in completions)
    stretches = measure(directory).stretches
    width = -(-longest // most)
    assert [part.start for part in stretches] == list(range(0, longest, width))
    assert [part.stop for part in stretches] == [min(start + width, longest) for start in range(0, longest, width)]
    for part in stretches:
        here = [token for token in tokens if part.start <= token.place < part.stop]
        assert part.tokens == len(here)
        assert part.singletons == sum(token.size == 1 for token in here)
        check_quartiles(part.support, [float(token.size) for token in here if token.size])
        check_quartiles(part.surprisal, [-token.logprob for token in here], A_BIN)
        check_quartiles(part.entropy, [token.entropy for token in here if token.size], A_BIN)


def test_entropy_is_absent_without_support_logprobs(make_dataset: Callable[..., Any]) -> None:
    """It is never estimated from sampled tokens alone."""
    assert all(part.entropy is None for part in measure(make_dataset(0).directory).stretches)


@pytest.mark.parametrize("most", [48, 3])
def test_histogram_of_logprobs(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Bars lie side by side up to 0 and hold every token once; singletons are in the last one."""
    monkeypatch.setattr(module, "LOGPROB_BARS", most)
    directory, completions = make_dataset(1, support_logprobs=True)
    bars = measure(directory).logprobs
    assert len(bars) <= most
    assert [bar.high for bar in bars[:-1]] == [bar.low for bar in bars[1:]]
    assert bars[-1].high == 0
    tokens = tokens_of(completions)
    for bar in bars:
        low = -math.inf if bar.low is None else bar.low
        assert bar.tokens == sum(low < token.logprob <= bar.high for token in tokens)
    singletons = sum(token.size == 1 for token in tokens)
    assert [bar.singletons for bar in bars] == [0] * (len(bars) - 1) + [singletons]


@pytest.mark.parametrize("farthest", [-40.0, -9999.0, -1e17, -3e38])
def test_one_token_that_is_all_but_impossible(
    write_planless: Callable[..., Path], make_completion: Callable[..., Any], farthest: float
) -> None:
    """Any finite logprob is one: bars stay a nat wide at most, and the first holds what is beyond them."""
    made = [make_completion(0, sample, full=True) for sample in range(3)]
    logprobs = np.array([farthest, *made[0].logprobs[1:]], np.float32)
    directory = write_planless([replace(made[0], logprobs=logprobs), *made[1:]])
    dataset = open_dataset(directory)
    stats = stats_of(dataset)
    curves = curves_of(dataset, stats)
    json.dumps([stats.to_json(), curves.to_json()], allow_nan=False)
    assert stats.logprobs is not None
    assert stats.logprobs.logprob.min == float(logprobs[0])
    first, *others = curves.logprobs
    assert (first.tokens, sum(bar.tokens for bar in others)) == (1, 23)
    assert {bar.high - bar.low for bar in others if bar.low is not None} == {1.0}
    assert (first.low, first.high) == ((-41.0, -40.0) if farthest == -40 else (None, -47.0))
    shown = samples_json(dataset, Decoder(None), {})
    assert max(shown["items"][0]["nats"]) == min(-1000 * farthest, 1e6)
    (figure,) = [it for it in figures(stats, curves) if it.key == "logprobs"]
    assert len({*figure.data[0]["x"]}) == len(curves.logprobs)
    assert ("The first bar holds all tokens of at most -47." in figure.sentence) is (farthest < -40)
    (drawn,) = [it for it in figures(stats, curves) if it.key == "surprisal-by-position"]
    assert (None in drawn.data[3]["y"]) is ("Means beyond 47 nats" in drawn.sentence) is (farthest < -200)
    console = Console(file=io.StringIO(), width=100)
    render(stats, console, curves)
    assert ("all of at most -47, then to 0 nats" in console.file.getvalue()) is (farthest < -40)
    assert ("min -3e+38 nats" in console.file.getvalue()) is (farthest == -3e38)
    write_card(directory)


@pytest.mark.parametrize("most", [40, 5, 1])
def test_lengths(make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Every sample is in one bar, by its length and its finish reason."""
    monkeypatch.setattr(module, "LENGTH_BARS", most)
    directory, completions = make_dataset(2)
    curves = measure(directory)
    lengths = {
        "prompt": [(len(c.prompt_token_ids), c.finish_reason) for c in completions],
        "response": [(len(c.token_ids), c.finish_reason) for c in completions],
    }
    for bars, made in ((curves.prompt_lengths, lengths["prompt"]), (curves.response_lengths, lengths["response"])):
        assert 1 <= len(bars) <= most
        assert (bars[0].low, bars[-1].high) == (min(made)[0], max(made)[0])
        assert [bar.high + 1 for bar in bars[:-1]] == [bar.low for bar in bars[1:]]
        for bar in bars:
            assert bar.samples == Counter(reason for length, reason in made if bar.low <= length <= bar.high)


def test_superseded_rows_are_left_out(make_again: Callable[[], Any]) -> None:
    """The first sample counts once, with the tokens of the second, of which it was made again."""
    directory, completions = make_again()
    curves = measure(directory)
    current = [completions[1], *completions[1:]]
    assert sum(part.tokens for part in curves.stretches) == sum(len(c.token_ids) for c in current)
    assert sum(sum(bar.samples.values()) for bar in curves.response_lengths) == len(completions)


def test_untruncated_sampling(write_planless: Callable[..., Path], make_completion: Callable[..., Any]) -> None:
    """There are no support sizes, and surprisal is of the full vocabulary."""
    made = [make_completion(0, sample, full=True) for sample in range(3)]
    stretches = measure(write_planless(made)).stretches
    assert [part.tokens for part in stretches] == [3] * 8  # three samples of eight tokens
    assert all(part.support is None and part.singletons == 0 for part in stretches)
    first = [-float(completion.logprobs[0]) for completion in made]
    assert stretches[0].surprisal.mean == pytest.approx(statistics.mean(first))


def test_nothing_is_stored_yet(empty_dataset: Path) -> None:
    """No curve, and no error."""
    assert measure(empty_dataset) == Curves((), (), (), (), None)


def test_curves_are_json(make_dataset: Callable[..., Any]) -> None:
    """Plain finite values, by the names of the classes."""
    curves = measure(make_dataset(0, support_logprobs=True).directory).to_json()
    shown = json.loads(json.dumps(curves, allow_nan=False))
    assert shown["stretches"][0]["surprisal"].keys() == {"tokens", "lower", "median", "upper", "mean"}
