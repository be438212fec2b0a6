"""What is printed on stdout when a run is over, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollgen.cli.summary import print_summary
from rollgen.loop.report import RunStats

DONE = RunStats(
    planned=10,
    stored_before=4,
    stored=6,
    tokens=12_000,
    mask_ids=24_000,
    masked_tokens=6_000,
    length_finishes=3,
    resampled=2,
    seconds=4,
)
"""12,000 / 4 tokens a second; 3 of 6 cut; 24,000 / 6,000 ids a support."""


def test_a_finished_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Three lines."""
    print_summary(Path("out"), DONE, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "10 of 10 samples stored in out",
        "this run: 6 samples, 12,000 tokens at 3,000 tokens/s, 50.0% cut at max_tokens",
        "supports: 4.0 ids on average, 2 samples asked again because a tie went past the logprobs returned",
    ]


def test_a_run_with_failures_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """10 planned, 2 of a skipped row, 5 stored: 3 are owed."""
    print_summary(Path("out"), RunStats(planned=10, tombstones=2, stored_before=5, failed=3, restarts=2), as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "5 of 10 samples stored in out",
        "the engine died or stalled and was started again: 2 times",
        "3 samples failed, 2 of skipped rows: see out/failures/",
        "still owed: 3 samples; the same command with --resume makes them",
    ]


def test_one_of_each_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two samples one is stored and one failed."""
    counts = dict.fromkeys(("stored", "tokens", "failed", "restarts", "masked_tokens", "mask_ids", "resampled"), 1)
    stats = RunStats(planned=2, seconds=1, **counts)
    print_summary(Path("out"), stats, as_json=False)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "this run: 1 sample, 1 token at 1 tokens/s, 0.0% cut at max_tokens",
        "supports: 1.0 ids on average, 1 sample asked again because a tie went past the logprobs returned",
        "the engine died or stalled and was started again: 1 time",
        "1 sample failed, 0 of skipped rows: see out/failures/",
        "still owed: 1 sample; the same command with --resume makes them",
    ]


def test_an_untruncated_run_has_no_line_about_supports(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing to average."""
    print_summary(Path("out"), RunStats(planned=1, stored=1, tokens=5, seconds=1), as_json=False)
    assert "supports" not in capsys.readouterr().out


def test_nothing_owed_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run that was started again."""
    print_summary(Path("out"), RunStats(planned=3, stored_before=3), as_json=False)
    assert capsys.readouterr().out == "3 of 3 samples stored in out\n"


def test_paths_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters are spelled out."""
    print_summary(Path("\x1b[2J"), RunStats(), as_json=False)
    assert capsys.readouterr().out == "0 of 0 samples stored in \\x1b[2J\n"


def test_json_has_every_total(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, one object; names are those of `RunStats`, derived figures beside them."""
    print_summary(Path("out"), DONE, as_json=True)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "out": "out",
        "planned": 10,
        "tombstones": 0,
        "stored_before": 4,
        "stored": 6,
        "failed": 0,
        "tokens": 12_000,
        "mask_ids": 24_000,
        "masked_tokens": 6_000,
        "length_finishes": 3,
        "resampled": 2,
        "restarts": 0,
        "seconds": 4,
        "owed": 0,
        "tokens_per_second": 3000.0,
        "mean_support": 4.0,
        "exit_code": 0,
    }
