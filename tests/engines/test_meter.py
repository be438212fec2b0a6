"""Signs of life: what is read of a page of metrics, and what of a shared server's tokens may be ours."""

from __future__ import annotations

import time

import pytest

from rollgen.engines.meter import LONGEST_CREDIT, Load, Meter, parse_load

GENERATED = "vllm:generation_tokens_total"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (f"{GENERATED} 12\n", Load(12, None)),
        (f'# TYPE {GENERATED} counter\n{GENERATED}{{engine="0"}} 1.5e+03\n', Load(1500, None)),
        (f'{GENERATED}{{name="a}}b"}} 7.0 1700000000\n{GENERATED}{{engine="1"}} 5\n', Load(12, None)),
        (f"{GENERATED} 3\nvllm:num_requests_running 4.0\nvllm:num_requests_waiting 5.0\n", Load(3, 9)),
        (f"{GENERATED} 3\nvllm:num_requests_running 4.0\nvllm:num_requests_waiting NaN\n", Load(3, None)),
        (f"{GENERATED} 3\nvllm:num_requests_waiting_by_reason 4.0\n", Load(3, None)),
        *(
            (f"{GENERATED} {count}\n", None)
            for count in ("1e400", "1.2.3", "e", "+", "-5", "NaN", "+Inf", "x", "9" * 400)
        ),
        (f"{GENERATED} 1e308\n{GENERATED} 1e308\n", None),
        ("", None),
        ("<html>", None),
    ],
)
def test_pages(page: str, expected: Load | None) -> None:
    """The sum over engines; what is no finite count is not told, and never an error."""
    assert parse_load(page.encode()) == expected


def test_growth() -> None:
    """From the second look on, through a restart of the server, and over a look that it did not answer."""
    meter = Meter(60)
    assert [meter.growth(Load(count, 2), 2) for count in (100, 150, 150, 30)] == [0, 50, 0, 30]
    assert meter.is_counting
    assert meter.growth(None, 2) == 0
    assert not meter.is_counting
    assert [meter.growth(Load(count, None), 2) for count in (500, 510)] == [470, 10]


def test_lost_requests() -> None:
    """Tokens of others are no sign of life when the server is at fewer requests than we wait for."""
    meter = Meter(60)
    meter.growth(Load(100, 4), 4)
    assert meter.growth(Load(200, 3), 4) == 0
    assert not meter.is_counting
    assert meter.growth(Load(300, 5), 4) == 100


def test_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may hide that ours are lost: without an answer to us their tokens count for ten stall timeouts."""
    now = time.monotonic()
    monkeypatch.setattr("rollgen.engines.meter.time.monotonic", lambda: now)
    meter = Meter(60)
    meter.growth(Load(100, 9), 1)
    now += LONGEST_CREDIT * 60 - 1
    assert meter.growth(Load(200, 9), 1) == 100
    now += 2
    assert meter.growth(Load(300, 9), 1) == 0
    meter.answered()
    assert meter.growth(Load(400, 9), 1) == 100
    now += LONGEST_CREDIT * 60 + 1
    meter.growth(Load(500, 8), 0)  # we have asked for nothing: no answer is due
    assert meter.growth(Load(600, 9), 1) == 100
