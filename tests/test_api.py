"""`rollgen.generate`, as far as no model is needed: what it refuses, and runs that find everything stored."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from models.runs import Recorder, Runs

import rollgen
from rollgen.api import LoggingReporter
from rollgen.config import RunConfig
from rollgen.errors import UsageError
from rollgen.loop.report import RunStats


@pytest.fixture
def settings(runs: Runs) -> dict[str, Any]:
    """Of a run that is complete: continuing it loads no model."""
    runs()
    return {"model": str(runs.model), "max_tokens": 8, "top_k": 8, "n": 2}


def test_settings_and_config_say_the_same(runs: Runs, settings: dict[str, Any]) -> None:
    """Prompts as a path or its text, one or in a list, or as rows; all continue the run of the command."""
    rows = [json.loads(line) for line in runs.prompts.read_text().splitlines()]
    for prompts in (runs.prompts, str(runs.prompts), [runs.prompts], rows, iter(rows)):
        stats = rollgen.generate(prompts, runs.out, resume=True, **settings)
        assert (stats.stored_before, stats.stored, stats.exit_code) == (10, 0, 0)
    stats = rollgen.generate(runs.prompts, str(runs.out), RunConfig(**settings), resume=True)
    assert stats.stored_before == 10


def test_a_single_row_is_a_prompt(runs: Runs, settings: dict[str, Any]) -> None:
    """A mapping is one prompt, not a list of its keys: here, one that was not planned first."""
    with pytest.raises(rollgen.RollgenError, match="planned with 5 prompts, now there are 1"):
        rollgen.generate({"prompt": "Hello"}, runs.out, resume=True, **settings)


def test_the_environment_is_not_read(runs: Runs, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call means the same wherever it is made."""
    monkeypatch.setenv("ROLLGEN_TOP_K", "9")
    assert rollgen.generate(runs.prompts, runs.out, resume=True, **settings).stored_before == 10


def test_one_or_the_other(runs: Runs) -> None:
    """And wrong settings are named as such."""
    with pytest.raises(UsageError, match=r"^n, top_k: give a config or single settings, not both"):
        rollgen.generate(runs.prompts, runs.out, RunConfig(), n=2, top_k=3)
    with pytest.raises(UsageError, match=r"^settings: top_p: Input should be less than or equal to 1, got 2"):
        rollgen.generate(runs.prompts, runs.out, top_p=2)
    assert not runs.out.exists()


def test_a_run_in_the_way(runs: Runs, settings: dict[str, Any]) -> None:
    """As the command refuses it."""
    with pytest.raises(UsageError, match="holds a run already"):
        rollgen.generate(runs.prompts, runs.out, **settings)
    with pytest.raises(UsageError, match="exclude each other"):
        rollgen.generate(runs.prompts, runs.out, resume=True, clean=True, **settings)


def test_a_running_event_loop_is_refused(runs: Runs, settings: dict[str, Any]) -> None:
    """The error says how; and so it works, in a thread that gets no signals."""

    async def blocking() -> None:
        rollgen.generate(runs.prompts, runs.out, resume=True, **settings)

    async def in_a_thread() -> RunStats:
        return await asyncio.to_thread(rollgen.generate, runs.prompts, runs.out, resume=True, **settings)

    with pytest.raises(UsageError, match=r"use `await asyncio\.to_thread\(rollgen\.generate, \.\.\.\)`"):
        asyncio.run(blocking())
    assert asyncio.run(in_a_thread()).stored_before == 10


def test_notes_are_logged(runs: Runs, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Phases as info, notes as warnings; nothing on the console."""
    with caplog.at_level(logging.INFO, logger="rollgen"):
        rollgen.generate(runs.prompts, runs.out, resume=True, **settings)
    assert [(record.levelname, record.message) for record in caplog.records if record.name == "rollgen"] == [
        ("INFO", "phase: check"),
        ("WARNING", "nothing is owed: every planned sample is stored"),
    ]


def test_a_reporter_is_told_instead(runs: Runs, settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The same that the command tells its own."""
    reporter = Recorder()
    rollgen.generate(runs.prompts, runs.out, resume=True, reporter=reporter, **settings)
    assert reporter.phases == ["check"]
    assert not [record for record in caplog.records if record.name == "rollgen"]


@pytest.fixture
def handler() -> Iterator[Any]:
    """A SIGTERM handler of the program's own."""

    def handle(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handle)
    yield handle
    signal.signal(signal.SIGTERM, before)


def test_signal_handlers_are_put_back(runs: Runs, settings: dict[str, Any], handler: Any) -> None:
    """A library call leaves the program as it was; other threads have no signals to put back."""
    rollgen.generate(runs.prompts, runs.out, resume=True, **settings)
    assert signal.getsignal(signal.SIGTERM) is handler
    thread = threading.Thread(
        target=rollgen.generate, args=(runs.prompts, runs.out), kwargs={"resume": True, **settings}
    )
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_what_a_run_tells_the_log(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Figures for whoever asks for them; counted in samples."""
    with caplog.at_level(logging.DEBUG, logger="rollgen"):
        runs(reporter=LoggingReporter())
    lines = [(record.levelname, record.message) for record in caplog.records if record.name == "rollgen"]
    assert ("DEBUG", "5 prompts checked") in lines
    assert ("INFO", f"tiny (bfloat16), capture logprobs: 10 samples of 5 prompts to {runs.out}") in lines
    assert lines[-1] == ("DEBUG", "10 of 10 samples stored")
