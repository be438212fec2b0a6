"""Signs of life in a server's /metrics: how many tokens it has generated, and how many requests it is at.

Both are of everybody who uses the server, so they prove little: it may have lost our requests and work for others.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from typing import Final

from rollgen.engines.wire import Oversized, Refused, Unreachable, Wire

METRICS_PATH: Final = "/metrics"
LONGEST_CREDIT: Final = 10
"""So many times the stall timeout, tokens count as ours though no request of ours is answered."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server says of its work."""

    generated: int
    """Tokens, since it was started."""
    requests: int | None
    """Running and waiting ones; None when it does not say."""


async def read_load(wire: Wire) -> Load | None:
    """None when the server does not count its tokens."""
    try:
        page = await wire.get(METRICS_PATH)
    except (Unreachable, Refused, Oversized):
        return None
    return parse_load(page)


def parse_load(page: bytes) -> Load | None:
    """Of a page in the format of Prometheus. What is no count there counts as not told."""
    generated = _total(page, b"vllm:generation_tokens_total")
    running, waiting = _total(page, b"vllm:num_requests_running"), _total(page, b"vllm:num_requests_waiting")
    requests = None if running is None or waiting is None else running + waiting
    return None if generated is None else Load(generated, requests)


def _total(page: bytes, name: bytes) -> int | None:
    """The sum over the server's engines, of which each has a line; None when there is none, or one is no count."""
    told = re.findall(rb"^" + name + rb"(?:\{.*\})? (\S+)(?: \S+)?$", page, re.MULTILINE)
    try:
        counts = [float(count) for count in told]
    except ValueError:
        return None
    total = sum(counts)
    return int(total) if counts and math.isfinite(total) and min(counts) >= 0 else None


@dataclass(slots=True)
class Meter:
    """What of a server's tokens may be ours."""

    stall_timeout: float
    is_counting: bool = False
    """Whether the last growth was taken for ours: else only finished samples are signs of life."""
    _before: int | None = None
    _answered: float = field(default_factory=time.monotonic)

    def answered(self) -> None:
        """A request of ours was."""
        self._answered = time.monotonic()

    def growth(self, load: Load | None, in_flight: int) -> int:
        """Tokens since it last told its load, of which some may be ours, as it has `in_flight` requests of ours.

        None may be while it says that it is at fewer than those, nor after it has answered none of ours for long.
        """
        if not in_flight:  # no answer is due
            self.answered()
        before = self._before
        if load is not None:  # one that did not answer in time goes on counting
            self._before = load.generated
        is_lost = load is not None and load.requests is not None and load.requests < in_flight
        is_silent = time.monotonic() - self._answered > LONGEST_CREDIT * self.stall_timeout
        self.is_counting = load is not None and not is_lost and not is_silent
        if load is None or before is None or not self.is_counting:
            return 0
        return load.generated - before if load.generated >= before else load.generated  # it began anew
