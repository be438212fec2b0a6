"""What a run shows on stderr: lines in a log, a bar on a terminal, nothing on request; never a byte on stdout."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from models.runs import Runs

from rollgen.cli import progress
from rollgen.cli.progress import ConsoleReporter
from rollgen.inspect.card import write_card
from rollgen.loop.report import RunStats

STATS = RunStats(
    planned=13,
    tombstones=1,
    stored_before=2,
    stored=4,
    failed=1,
    tokens=4000,
    mask_ids=9000,
    masked_tokens=3000,
    seconds=2,
)
"""12 samples can be stored, 6 are: 6 are owed, at 0.5 s each. 4000 / 2 tokens a second, 9000 / 3000 ids a support."""
FIGURES = "6/12 samples, 2,000 tokens/s, 0:03 left, 3.0 ids a support, 1 failed"


def test_log_of_a_whole_run(runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases, what runs where, the figures; every line says who speaks. No blank lines, no escape sequences."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with ConsoleReporter("auto") as reporter:
        runs(reporter=reporter)
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[:4] == [
        "rollgen: checking prompts",
        "rollgen: loading the model",
        f"rollgen: tiny (bfloat16), capture logprobs: 10 samples of 5 prompts to {runs.out}",
        "rollgen: sampling",
    ]
    assert all(re.match(r"rollgen: \d+/10 samples, ", line) for line in lines[4:])
    assert lines[-1].startswith("rollgen: 10/10 samples, ")
    assert "0:00 left, 2.0 ids a support" in lines[-1]


def test_a_run_writes_its_card(runs: Runs) -> None:
    """When it starts: also a run that is killed explains itself."""
    with ConsoleReporter("none") as reporter:
        runs(reporter=reporter)
    assert (runs.out / "README.md").read_text().startswith("---\n")
    assert not list(runs.out.glob(".tmp-*"))


def test_an_edited_card_is_left_alone(runs: Runs) -> None:
    """What someone wrote into a dataset's README survives the next attempt; an untouched card is refreshed."""
    card = runs.out / "README.md"
    with ConsoleReporter("none") as reporter:
        runs(reporter=reporter)
        write_card(runs.out)
        assert "10, of 5 prompts" in card.read_text()
        card.write_text(edited := card.read_text().replace("Completions of", "My completions of"))
        runs(reporter=reporter, resume=True, n=3)
        write_card(runs.out)
    assert card.read_text() == edited


def test_none_is_silent(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """Notes included."""
    with ConsoleReporter("none") as reporter:
        runs(reporter=reporter)
        reporter.note("nobody hears this")
        reporter.progress(STATS)
    assert capfd.readouterr() == ("", "")


def test_figures_are_logged_every_ten_seconds(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 100, 109.9 and 110 s of a clock: the first and the last."""
    clock = iter([100.0, 109.9, 110.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with ConsoleReporter("log") as reporter:
        reporter.phase("generate")
        for _ in range(3):
            reporter.progress(STATS)
    assert capfd.readouterr().err == "rollgen: sampling\n" + f"rollgen: {FIGURES}\n" * 2


@pytest.mark.parametrize("style", ["log", "bar"])
def test_no_figures_before_sampling_begins(
    style: Literal["log", "bar"], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that load, for the first time or again, make nothing: five times `0 tokens/s` tell nobody anything."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with ConsoleReporter(style) as reporter:
        for phase in ("load", "generate", "load"):
            reporter.phase(phase)
            if phase == "load":
                reporter.progress(STATS)
    assert "samples" not in capfd.readouterr().err


@pytest.mark.parametrize(("servers", "expected"), [(1, "probing 1 server"), (2, "probing 2 servers")])
def test_servers_are_probed(capfd: pytest.CaptureFixture[str], servers: int, expected: str) -> None:
    """They have loaded their model."""
    ConsoleReporter("log", servers=servers).phase("probe")
    assert capfd.readouterr().err == f"rollgen: {expected}\n"


def test_a_part_says_how_much_of_the_whole_it_is(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """Of five prompts of two samples, the second of three parts has prompts 1 and 4."""
    with ConsoleReporter("log") as reporter:
        runs(reporter=reporter, shard="1/3")
    assert f": part 1 of 3: 4 of the 10 samples of 5 prompts to {runs.out}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (STATS, FIGURES),
        (RunStats(), "0/0 samples, 0 tokens/s"),
        (RunStats(planned=5, stored_before=5), "5/5 samples, 0 tokens/s"),
        (RunStats(planned=5, failed=2, seconds=9), "0/5 samples, 0 tokens/s, 2 failed"),
        # 7,300 samples owed at a second each: two hours and 100 seconds.
        (
            RunStats(planned=7301, stored=1, tokens=5, seconds=1),
            "1/7301 samples, 5 tokens/s, 2:01:40 left, 0.0 ids a support",
        ),
    ],
)
def test_figures(capfd: pytest.CaptureFixture[str], stats: RunStats, expected: str) -> None:
    """An estimate appears with the first sample, failures with the first failure."""
    reporter = ConsoleReporter("log")
    reporter.phase("generate")
    reporter.progress(stats)
    assert capfd.readouterr().err == f"rollgen: sampling\nrollgen: {expected}\n"


def test_notes_cannot_act_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Control characters are spelled out, markup is text, and long lines are not wrapped."""
    message = "\x1b[31m [red]" + "x" * 200
    with ConsoleReporter("log") as reporter:
        reporter.note(message)
    assert capfd.readouterr().err == "rollgen: \\x1b[31m [red]" + "x" * 200 + "\n"


def test_bar_on_a_terminal(runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures move beside a bar; notes go above it; when the run is over the bar is gone (its line is erased)."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with ConsoleReporter("auto") as reporter:
        runs(reporter=reporter)
        reporter.note("a note")
    out, err = capfd.readouterr()
    assert out == ""
    assert "10/10 samples" in err
    assert "rollgen: a note" in err
    assert err.endswith("\x1b[2K")


def test_stop_without_a_start(tmp_path: Path) -> None:
    """A run that ends in its first phase leaves the terminal as it was."""
    with ConsoleReporter("bar") as reporter:
        reporter.phase("check")
