"""Fake engines for replicas on Ray, each made by a function that `EngineSpec.make` can name, in Ray's processes.

Which process a replica is in says Ray: the first one is not reconstructed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import count
from typing import Final, NoReturn

import ray
from models.fake_engine import FakeEngine

from rollgen.cluster.engine import EngineSpec
from rollgen.engines.base import RequestError, SampleRequest
from rollgen.errors import EngineError, UsageError

WINDOW: Final = 8
POISON: Final = (3, 1)
"""The sample that kills its engine, or its process."""
FAILING: Final = (2, 0)
SECONDS: Final = 0.3
"""Of a slow sample."""


def healthy(spec: EngineSpec) -> FakeEngine:
    """Makes everything."""
    return FakeEngine(window=WINDOW)


def slow(spec: EngineSpec) -> FakeEngine:
    """Takes its time, so that something can happen meanwhile."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(SECONDS)

    return FakeEngine(window=WINDOW, before=before)


def stuck(spec: EngineSpec) -> FakeEngine:
    """Makes as many as it makes at a time, and no more."""
    places = count()

    async def before(request: SampleRequest) -> None:
        if next(places) >= WINDOW:
            await asyncio.Event().wait()

    return FakeEngine(window=WINDOW, before=before)


def third(spec: EngineSpec) -> FakeEngine:
    """Makes the samples of the first seven prompts, and no others: it is at work until somebody ends it."""
    return _first(7)


def two_thirds(spec: EngineSpec) -> FakeEngine:
    """The same of the first fourteen."""
    return _first(14)


def _first(prompts: int) -> FakeEngine:
    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(SECONDS / 3)
        if request.prompt.prompt_index >= prompts:
            await asyncio.Event().wait()

    return FakeEngine(window=WINDOW, before=before)


def failing(spec: EngineSpec) -> FakeEngine:
    """Fails one sample, again and again."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(0)
        if _key(request) == FAILING:
            raise RequestError("does not fit")

    return FakeEngine(window=WINDOW, before=before)


def fragile(spec: EngineSpec) -> FakeEngine:
    """Dies at a sample in each replica's first process."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(SECONDS if _key(request) == POISON else 0)  # so that some are finished
        if _key(request) == POISON and not ray.get_runtime_context().was_current_actor_reconstructed:
            raise EngineError("the device fell off the bus")

    return FakeEngine(window=WINDOW, before=before)


def mortal(spec: EngineSpec) -> FakeEngine:
    """Its process is killed at a sample, the first one of each replica, when some samples are long committed."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(5 * SECONDS if _key(request) == POISON else SECONDS / 3)
        if _key(request) == POISON and not ray.get_runtime_context().was_current_actor_reconstructed:
            os.kill(os.getpid(), signal.SIGKILL)

    return FakeEngine(window=WINDOW, before=before)


def stopped(spec: EngineSpec) -> FakeEngine:
    """Its process stands still from a sample on, the first one of each replica."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(0)
        if _key(request) == POISON and not ray.get_runtime_context().was_current_actor_reconstructed:
            signal.raise_signal(signal.SIGSTOP)

    return FakeEngine(window=WINDOW, before=before)


def poisoned(spec: EngineSpec) -> FakeEngine:
    """One sample takes the whole process down, whoever makes it."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(10 * SECONDS if _key(request) == POISON else 0)  # when others are long committed
        if _key(request) == POISON:
            os.kill(os.getpid(), signal.SIGKILL)

    return FakeEngine(window=WINDOW, before=before)


def unloadable(spec: EngineSpec) -> FakeEngine:
    """Never starts."""
    return FakeEngine(window=WINDOW, start_error=EngineError("out of memory"))


class _Loading(FakeEngine):
    async def start(self) -> None:
        """Does not return."""
        await asyncio.Event().wait()


def loading(spec: EngineSpec) -> FakeEngine:
    """Loads for ever."""
    return _Loading(window=WINDOW)


def endless(spec: EngineSpec) -> NoReturn:
    """Takes for ever to be made."""
    while True:
        time.sleep(1)


def refused(spec: EngineSpec) -> NoReturn:
    """Is refused where it would run."""
    raise UsageError("no such engine here")


def _key(request: SampleRequest) -> tuple[int, int]:
    return request.prompt.prompt_index, request.sample_index
