"""The terminal view: it fits, it says what there is, and data cannot act on the terminal."""

from __future__ import annotations

import dataclasses
import io
import unicodedata
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from rollgen.format.reader import open_dataset
from rollgen.inspect.failures import ErrorCount, FailureStats
from rollgen.inspect.stats import DatasetStats, Example, stats_of
from rollgen.inspect.terminal import last_turn, notes, number, render, significant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202edesrever\u2066 [red]markup[/red] \x00\r\n"


def shown(stats: DatasetStats, *, width: int = 80, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    render(stats, console)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_hostile_data_is_shown_literally(make_dataset: Callable[..., Any], terminal: bool) -> None:
    """Names, ids, reasons, errors and texts reach the console as inert text, markup included."""
    stats = stats_of(open_dataset(make_dataset(0, model_name=HOSTILE).directory))
    stats = dataclasses.replace(
        stats,
        name=HOSTILE,
        failures=FailureStats(1, 0, {HOSTILE: 1}, (ErrorCount("engine", HOSTILE, 1),)),
        samples=dataclasses.replace(stats.samples, finish_reasons={HOSTILE: 1}, stop_reasons={HOSTILE: 1}),
        examples=(Example(HOSTILE, 0, HOSTILE, HOSTILE, HOSTILE, 1),),
    )
    output = shown(stats, width=400, terminal=terminal)
    assert {c for c in output if unicodedata.category(c) in {"Cc", "Cf"}} == {"\n"}
    # name, model, stage, error, finish reason, stop reason; the example's id, finish reason, prompt and text
    assert output.count("[red]markup[/red]") >= 9
    assert output.count(r"\x1b[31mred") == 10


@pytest.mark.parametrize("terminal", [False, True])
def test_a_pipe_gets_no_blanks_at_the_end_of_lines(make_dataset: Callable[..., Any], terminal: bool) -> None:
    """A terminal does not see them."""
    output = shown(stats_of(open_dataset(make_dataset(0).directory)), terminal=terminal)
    assert any(line.endswith(" ") for line in output.split("\n")) is terminal


@pytest.mark.parametrize("width", [80, 120])
def test_view_fits_the_console(make_dataset: Callable[..., Any], width: int) -> None:
    """No line is longer than the console is wide, with long names too."""
    stats = stats_of(open_dataset(make_dataset(0, support_logprobs=True, model_name="m" * 200).directory))
    assert max(map(len, shown(stats, width=width).splitlines())) <= width


def test_a_device_that_nobody_told(make_dataset: Callable[..., Any]) -> None:
    """A server does not say where it runs: that is said in words."""
    stats = stats_of(open_dataset(make_dataset(0).directory))
    [attempt] = stats.manifest.attempts
    for device, expected in (("unspecified", ", device not told"), ("cuda", " on cuda")):
        engine = attempt.engine.model_copy(update={"device": device})
        manifest = stats.manifest.model_copy(update={"attempts": [attempt.model_copy(update={"engine": engine})]})
        output = shown(dataclasses.replace(stats, manifest=manifest), width=120)
        assert f"Engine       {engine.name} {engine.version}{expected} · " in output


def test_view_names_what_is_stored(tmp_path: Path, make_extras: Callable[..., Path]) -> None:
    """Beside the supports, what the engine told of weights and experts."""
    output = shown(stats_of(open_dataset(make_extras(tmp_path / "run"))), width=120)
    assert "optional columns: weight versions, routed experts · format 1.3" in output


def test_view_names_the_figures(make_dataset: Callable[..., Any]) -> None:
    """36 of 48 samples, 12 owed, one input row skipped, a bar for each bin."""
    output = shown(stats_of(open_dataset(make_dataset(0, support_logprobs=True).directory)), width=120)
    for text in (
        "36 of 48 (75.0%) · 12 owed",
        "12 of 12 with samples · input rows skipped: 1",
        "full vocabulary █",
        "top_k reached",
        "exact over the support",
        "p0 / 0",
        "text of p0",
    ):
        assert text in output


def test_run_without_shards_renders(empty_dataset: Path) -> None:
    """A run that has just started says what it owes."""
    assert "0 of 24 (0.0%) · 24 owed" in shown(stats_of(open_dataset(empty_dataset)))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]', "hi"),
        ("plain text", "plain text"),
        ('["a", "b"]', '["a", "b"]'),
        ("[]", "[]"),
        ("7", "7"),
        ('{"content": 1}', '{"content": 1}'),
        ('[{"content": "no role"}]', '[{"content": "no role"}]'),
        ('[{"role": "user", "content": [{"type": "text"}]}]', '{"content": [{"type": "text"}]}'),
    ],
)
def test_last_turn(prompt: str, expected: str) -> None:
    """Of a chat the last message, of anything else all."""
    assert last_turn(prompt) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1234.5, "1,234.5"), (3.0, "3"), (0.1239, "0.124"), (-1e-9, "0"), (100.0, "100"), (-1.25e37, "-1.25e+37")],
)
def test_number(value: float, expected: str) -> None:
    """Thousands are separated, trailing zeros dropped; no lines of digits."""
    assert number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0004, "0.0004"),
        (-0.0, "0"),
        (12345.678, "12,345.7"),
        (1e-12, "1e-12"),
        (-1e38, "-1e+38"),
        (2 / 3, "0.666667"),
    ],
)
def test_significant(value: float, expected: str) -> None:
    """Six digits of any value, and no minus before nothing."""
    assert significant(value) == expected


def test_what_is_not_truncated_is_told(make_dataset: Callable[..., Any]) -> None:
    """Figures of supports say that they are not of all tokens, and ids beyond the tokenizer where they were drawn."""
    stats = stats_of(open_dataset(make_dataset(0, support_logprobs=True).directory))
    output = shown(stats, width=120)
    assert "ids a truncated token" in output
    assert f"not of the {stats.support.full_vocabulary} tokens without one" in output
    assert any("(from the full vocabulary too)" in note for note in notes(stats))
    only_sampled = dataclasses.replace(stats.support, beyond_tokenizer=0, sampled_beyond_tokenizer=3)
    (note,) = [it for it in notes(dataclasses.replace(stats, support=only_sampled)) if "beyond the tokenizer" in it]
    assert "in the supports of 0 tokens, sampled as 3" in note
