"""The outcome as text: what was verified, what is wrong and how often, and nothing in it acts."""

from __future__ import annotations

import pytest

from rollgen.verify.dataset import SampleCounts, Verification
from rollgen.verify.findings import Finding
from rollgen.verify.terminal import describe

SHARD = "data/part-w0-000000.parquet"
CLEAN = Verification(shards=2, bytes=1234, rows=1000, tokens=1, mask_ids=2345)
HINT = (
    "`rollgen repair` sets damaged shards aside and mends the journal; samples of a plan that are missing then, "
    "--resume makes again"
)


def test_a_clean_dataset() -> None:
    """Counts, in the singular where they are 1; without a plan, nothing about samples."""
    assert list(describe(CLEAN)) == [
        "2 shards, 1,000 rows, 1 token, 2,345 mask ids, 1.2 kB",
        "clean: shards, journal and plan are as they were made",
    ]


def test_a_dataset_without_shards() -> None:
    """Nothing is vouched for."""
    lines = list(describe(Verification(samples=SampleCounts(planned=4000, stored=0, owed=3999, skipped=1))))
    assert lines == [
        "0 shards, 0 rows, 0 tokens, 0 mask ids, 0 bytes",
        "4,000 planned = 0 stored + 3,999 owed + 1 skipped",
        "clean: no shards; 3,999 samples owed",
    ]


def test_findings() -> None:
    """One a line, then how many of each kind are not shown, and how many there are."""
    verification = Verification(
        findings=(
            Finding("support", SHARD, "row group 0, row 2 (p, 1), token 3", "empty support", 1200),
            Finding("missing", SHARD, "", "not there"),
        ),
        by_kind={"support": 1001, "missing": 1},
        notes=("2 files in quarantine/",),
        shards=1,
    )
    assert list(describe(verification))[1:] == [
        "note: 2 files in quarantine/",
        f"{SHARD}: support: row group 0, row 2 (p, 1), token 3: empty support (1,200 times)",
        f"{SHARD}: missing: not there",
        "support: 1,000 more",
        "1,002 findings: 1,001 support, 1 missing",
        "missing files can be put back: do so before anything else, for their names are not used again",
        HINT,
    ]


def test_one_finding() -> None:
    """In the singular; what repair does not mend says itself what helps."""
    lines = list(describe(Verification((Finding("plan", "plan.parquet", "", "gone"),), {"plan": 1})))
    assert lines == ["plan.parquet: plan: gone", "1 finding: 1 plan"]


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        pytest.param("\x1b[31m", "\\x1b[31m", id="colour"),
        pytest.param("a\nb\r", "a\\nb\\r", id="lines"),
        pytest.param("\u202eabc", "\\u202eabc", id="order"),
        pytest.param("\udcff", "\\udcff", id="no text"),
        pytest.param("[red]", "[red]", id="markup"),
    ],
)
def test_nothing_acts(hostile: str, shown: str) -> None:
    """Whatever a name, a place, a problem or a note quotes."""
    finding = Finding("mismatch", f"{hostile}f", f"row 0 ({hostile})", f"{hostile}p")
    lines = list(describe(Verification((finding,), {"mismatch": 1}, (f"{hostile}n",))))
    assert lines[:2] == [f"note: {shown}n", f"{shown}f: mismatch: row 0 ({shown}): {shown}p"]
    assert all(line.isprintable() for line in lines)


def test_long_texts_are_cut() -> None:
    """A line is at most some hundred characters longer than what is kept of its parts."""
    finding = Finding("mismatch", SHARD, "x" * 10**5, "y" * 10**5)
    assert max(map(len, describe(Verification((finding,), {"mismatch": 1})))) < 1000
