"""What a run will take, against numbers made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgen.format.commit import WHOLE, Part
from rollgen.format.retries import RetryList
from rollgen.inspect.estimate import Estimate, Expectation, describe, estimate_run, free_space, largest_sum, stored_of
from rollgen.inspect.status import Division, RunStatus, run_status
from rollgen.prompts.plan import Plan, PlanWriter
from rollgen.rollouts import Prompt, Sampling

FREE = 10**9


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """`plan_of(*prompts)`: a plan of these rows, two row groups where there are several."""

    def write(*prompts: Prompt) -> Plan:
        path = tmp_path / "plan.parquet"
        with PlanWriter(path) as plan:
            for group in (prompts[:1], prompts[1:]):
                if group:
                    plan.write(group)
        return Plan(path)

    return write


def a_prompt(index: int = 0, *, n: int = 1, tokens: int = 0, error: str | None = None, **sampling: Any) -> Prompt:
    """No text and no tokens, unless asked for."""
    return Prompt(f"p{index}", index, np.arange(tokens, dtype=np.int32), Sampling(**sampling), n, 0, error=error)


@pytest.mark.parametrize(
    ("sampling", "support_logprobs", "support", "per_token"),
    [
        ({"top_k": 50, "top_p": 0.95}, False, 16, 12 + 16 * 2.2),
        ({"top_k": 50, "min_p": 0.05}, False, 16, 12 + 16 * 2.2),
        ({"top_k": 8, "top_p": 0.95}, False, 8, 12 + 8 * 2.2),
        ({"top_k": 50}, False, 50, 12 + 50 * 2.2),
        ({"top_k": 50, "top_p": 0.95}, True, 16, 12 + 16 * 6.2),
        ({"top_k": 0}, True, 0, 12),
    ],
    ids=["top-p cuts", "min-p cuts", "small top-k", "top-k alone", "support logprobs", "not truncated"],
)
def test_bytes_of_a_token(
    plan_of: Callable[..., Plan],
    sampling: dict[str, Any],
    support_logprobs: bool,
    support: float,
    per_token: float,
) -> None:
    """12 bytes, 2.2 for each id that is assumed, 4 more for its logprob; 1,000 tokens and 64 bytes for the row."""
    plan = plan_of(a_prompt(max_tokens=1000, **sampling))
    estimate = estimate_run(plan, support_logprobs=support_logprobs, stored=None, free_bytes=FREE)
    assert estimate.assumed_support == pytest.approx(support)
    assert estimate.assumed_bytes_per_token == pytest.approx(per_token)
    assert estimate.max_bytes == pytest.approx(1000 * per_token + 64, abs=1)


def test_a_new_run(plan_of: Callable[..., Plan]) -> None:
    """4 samples of 100 tokens and 2 of 10; each carries its prompt: 4 bytes a token, its text, its metadata."""
    first = replace(a_prompt(0, n=4, tokens=5, top_k=0, max_tokens=100), prompt="한", metadata="{}")
    second = a_prompt(1, n=2, tokens=7, top_k=0, max_tokens=10)
    skipped = a_prompt(2, n=9, max_tokens=5000, error="bad")
    estimate = estimate_run(plan_of(first, second, skipped), support_logprobs=False, stored=None, free_bytes=FREE)
    assert (estimate.samples, estimate.max_generated_tokens) == (6, 4 * 100 + 2 * 10)
    # of a sample: 12 bytes a token; 4 * 5 + 3 (one Hangul syllable in UTF-8) + 2 + 64 beside, and 4 * 7 + 64
    assert estimate.max_bytes == 4 * (1200 + 89) + 2 * (120 + 92)
    assert (estimate.expected, estimate.tokens_per_second) == (None, None)


def stored_run(make_dataset: Callable[..., Any], **changes: Any) -> RunStatus:
    """A status with these numbers."""
    return replace(run_status(make_dataset(0).directory), **changes)


def test_a_continued_run(plan_of: Callable[..., Plan], make_dataset: Callable[..., Any]) -> None:
    """Of 6 samples 3 are stored, with 60 tokens and 1,200 bytes: the largest three may be owed, of 100 tokens each."""
    stored = stored_run(make_dataset, stored=3, tokens=60, bytes=1200, tokens_per_second=5.0)
    plan = plan_of(a_prompt(0, n=4, top_k=0, max_tokens=100), a_prompt(1, n=2, top_k=0, max_tokens=10))
    estimate = estimate_run(plan, support_logprobs=False, stored=stored, free_bytes=FREE)
    assert (estimate.samples, estimate.max_generated_tokens) == (3, 300)
    # 20 bytes a token are measured, more than the 12 that would be assumed.
    assert estimate.assumed_bytes_per_token == pytest.approx(20)
    assert estimate.max_bytes == 3 * (2000 + 64)
    assert estimate.expected == Expectation(mean_length=20, bytes_per_token=20, tokens=60, bytes=1200)
    assert estimate.tokens_per_second == 5.0


def test_retries_have_their_own_max_tokens(plan_of: Callable[..., Plan], make_dataset: Callable[..., Any]) -> None:
    """Both planned samples are stored; the two to be made again may have 300 tokens each, not the plan's 100."""
    plan = plan_of(a_prompt(0, n=1, max_tokens=100, top_k=0), a_prompt(1, n=1, tokens=10, max_tokens=100, top_k=0))
    stored = stored_run(make_dataset, stored=2, tokens=200, bytes=2000)
    retry = RetryList(1, np.array([0, 1]), np.zeros(2, np.int32), np.full(2, 300, np.int32))
    estimate = estimate_run(plan, [retry], support_logprobs=False, stored=stored, free_bytes=FREE)
    assert (estimate.samples, estimate.max_generated_tokens) == (2, 600)
    assert estimate.max_bytes == 2 * (300 * 12 + 64) + 4 * 10
    assert estimate.expected is not None
    assert estimate.expected.tokens <= estimate.max_generated_tokens


def test_more_than_is_assumed_is_measured_only(plan_of: Callable[..., Plan], make_dataset: Callable[..., Any]) -> None:
    """A run that takes less than is assumed keeps the bound of the assumption."""
    stored = stored_run(make_dataset, stored=1, tokens=60, bytes=60)
    plan = plan_of(a_prompt(0, n=2, top_k=0, max_tokens=100))
    estimate = estimate_run(plan, support_logprobs=False, stored=stored, free_bytes=FREE)
    assert estimate.max_bytes == 1200 + 64


def test_a_run_that_has_stored_nothing(plan_of: Callable[..., Plan], make_dataset: Callable[..., Any]) -> None:
    """There is nothing to expect from."""
    stored = stored_run(make_dataset, stored=0, tokens=0, bytes=0)
    estimate = estimate_run(plan_of(a_prompt(n=2)), support_logprobs=False, stored=stored, free_bytes=FREE)
    assert (estimate.samples, estimate.expected) == (2, None)


@pytest.mark.parametrize(
    ("values", "counts", "take", "expected"),
    [
        ([1, 5, 3], [2, 2, 2], 3, 5 + 5 + 3),
        ([1, 5, 3], [2, 2, 2], 0, 0),
        ([1, 5, 3], [2, 2, 2], 99, 18),
        ([7], [10], 4, 28),
    ],
)
def test_largest_sum(values: Sequence[int], counts: Sequence[int], take: int, expected: float) -> None:
    """The largest first, and no more than there are."""
    assert largest_sum(np.array(values), np.array(counts), take) == expected


def test_free_space(tmp_path: Path) -> None:
    """Of a directory that is yet to be made, that of the nearest one above it."""
    assert free_space(tmp_path / "a" / "b") > 0


ESTIMATE = Estimate(
    samples=1000,
    max_generated_tokens=1_024_000,
    assumed_support=16.0,
    assumed_bytes_per_token=47.2,
    max_bytes=48_000_000,
    free_bytes=10**12,
    expected=None,
    tokens_per_second=None,
)


def test_words_for_a_new_run() -> None:
    """What is assumed is said, and times are told for rates that are named: 1,024,000 / 1,000 s are 17:04."""
    assert list(describe(ESTIMATE)) == [
        "owed: 1,000 samples, at most 1,024,000 generated tokens",
        "disk: at most 48.0 MB, assuming 47.2 bytes a token (supports of 16 ids on average); 1.0 TB free",
        "time: no speed is known before a first run; at most 2:50:40 at 100 tokens/s, 0:17:04 at 1,000 tokens/s, "
        "0:01:42 at 10,000 tokens/s",
    ]


def test_words_for_a_continued_run() -> None:
    """1,024,000 tokens at 512 a second are 2,000 s, half of them 1,000 s."""
    expected = Expectation(mean_length=512, bytes_per_token=30, tokens=512_000, bytes=15_360_000)
    assert list(describe(replace(ESTIMATE, expected=expected, tokens_per_second=512.0)))[2:] == [
        "expected, if the rest is like what is stored (512.0 tokens a sample, 30.0 bytes a token): "
        "512,000 tokens, 15.4 MB",
        "time: at most 0:33:20, 0:16:40 expected, at the 512 tokens/s of the last attempt",
    ]


def test_words_where_the_speed_is_not_known() -> None:
    """As of a run in object storage, whose files have the times of their copies here: something is stored."""
    expected = Expectation(mean_length=512, bytes_per_token=30, tokens=512_000, bytes=15_360_000)
    assert [*describe(replace(ESTIMATE, expected=expected))][-1].startswith("time: how fast it was is not known here; ")


def test_words_for_a_part() -> None:
    """What one process of several owes."""
    first, *_ = describe(replace(ESTIMATE, part="0/2"))
    assert first == "owed by part 0 of 2: 1,000 samples, at most 1,024,000 generated tokens"


def test_a_part(plan_of: Callable[..., Plan]) -> None:
    """Of three prompts part 1 of 2 has the second, part 3 of 4 none."""
    plan = plan_of(*(a_prompt(index, n=index + 1, top_k=0, max_tokens=10 * (index + 1)) for index in range(3)))
    for part, samples, tokens in ((Part(1, 2), 2, 40), (Part(0, 2), 4, 10 + 3 * 30), (Part(3, 4), 0, 0)):
        estimate = estimate_run(plan, support_logprobs=False, stored=None, free_bytes=FREE, part=part)
        assert (estimate.samples, estimate.max_generated_tokens) == (samples, tokens)


def test_the_speed_of_a_part(plan_of: Callable[..., Plan], make_dataset: Callable[..., Any]) -> None:
    """Measured is that of all together, which is its own only as long as no other part has begun."""
    plan = plan_of(*(a_prompt(index) for index in range(4)))
    status = stored_run(make_dataset, tokens_per_second=5.0)
    for started, expected in (((0,), 5.0), ((0, 1), None), ((1,), None)):
        stored = replace(status, division=Division(2, started, 1, ""))
        settings = {"support_logprobs": False, "stored": stored, "free_bytes": FREE, "done": 0}
        assert estimate_run(plan, **settings, part=Part(0, 2)).tokens_per_second == expected
        assert estimate_run(plan, **settings).tokens_per_second == 5.0


def test_what_a_part_has_stored(make_dataset: Callable[..., Any]) -> None:
    """Three samples of each of 12 prompts; without what shards hold, those of the part's own writer: none."""
    directory, _ = make_dataset(0)
    status = run_status(directory)
    assert [stored_of(directory, part, status) for part in (WHOLE, Part(0, 5), Part(2, 5))] == [36, 9, 6]
    assert stored_of(directory, Part(0, 5), status, has_shards=False) == 0


def test_a_full_disk_is_warned_of() -> None:
    """As soon as the bound does not fit."""
    assert ESTIMATE.fits
    full = replace(ESTIMATE, free_bytes=ESTIMATE.max_bytes - 1)
    assert not full.fits
    assert [line for line in describe(full) if line.startswith("warning: ")] == [
        "warning: that bound exceeds the space that is free; choose another --out, or lower --max-tokens or --n"
    ]
    assert full.to_json()["fits"] is False
