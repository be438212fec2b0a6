"""One long generation that is ended again and again at random moments, and what is left in the end.

Most ends are SIGKILL of the whole process group, some SIGTERM and SIGINT; most hit the generation, some its start and
recovery, a compaction in between, or the retry that comes last. When everything planned is stored before the kills are
used up, the generation grows. After every end: no journal has lost a line, and nothing committed counts as damaged.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from models.datasets import planned_keys, read_rows, write_prompts
from models.program import Program, Running
from models.stages import RETRY, command

from rollgen.format.journal import list_shards, read_journal
from rollgen.format.schema import MANIFEST_FILE

RETRY_SHARE = 0.1
"""Of the kills."""
COMPACT_SHARE = 0.1
"""Of the attempts."""
EARLY_SHARE = 0.3
"""Of the kills: before the attempt's first commit, if it comes so soon."""
_EXITS = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {128 + signal.SIGTERM, -signal.SIGTERM},  # the second while nothing is there to be committed
    signal.SIGINT: {128 + signal.SIGINT},
}
_LATEST = 0.5
"""Seconds after the first commit, or after the start of a compaction: the latest end."""


@dataclass(slots=True)
class Toll:
    """What it took."""

    kills: int = 0
    """Ends by a signal, of whatever command."""
    early: int = 0
    """Of them, before the first commit of their attempt."""
    compactions: int = 0
    """Of them, those of compactions."""
    in_flight: int = 0
    """Of them, those that left a shard half written or without its journal line."""
    stored: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.early} before a first commit, {self.compactions} of compactions), "
            f"{self.in_flight} commits lost in flight, {self.stored:,} of {self.stored:,} samples stored once, "
            "rows those of an undisturbed run, verify clean"
        )


class Hunt:
    """A generation of `prompts` prompts in `directory`, ended `kills` times."""

    def __init__(self, program: Program, directory: Path, model: Path, *, prompts: int, kills: int, seed: int) -> None:
        self._program = program
        self._prompts = prompts
        self._kills = kills
        self._random = random.Random(seed)
        self._command = command(model, write_prompts(directory / "prompts.jsonl", prompts))
        self._out = directory / "out"
        self._undisturbed = directory / "undisturbed"
        self._n = 2
        self._delay = 8 * _LATEST / 2 * kills / (self._n * prompts)
        """Seconds for a sample: eight at a time make everything in the time that the kills leave."""
        self._start_seconds = 0.2
        """From the start of an attempt to its first commit, as far as is known."""
        self._toll = Toll()

    def run(self) -> Toll:
        """Raises AssertionError at whatever is lost, doubled, changed or untold."""
        while self._toll.kills < self._kills * (1 - RETRY_SHARE):
            if self._has_begun() and self._random.random() < COMPACT_SHARE:
                self._toll.compactions += self._end(self._program.start("compact", self._out), self._moment(_LATEST))
            elif not self._end_generation():
                self._n += 1
        self._generate(self._out, "--resume")
        while self._toll.kills < self._kills and self._end_generation(*RETRY):
            pass
        self._generate(self._out, "--resume", *RETRY)
        self._program("verify", self._out)
        self._compare()
        return self._toll

    def _compare(self) -> None:
        self._generate(self._undisturbed)
        self._generate(self._undisturbed, "--resume", *RETRY)
        rows = read_rows(self._out)
        assert rows.keys() >= planned_keys(self._prompts, self._n)
        assert rows == read_rows(self._undisturbed)
        self._toll.stored = len(rows)

    def _generate(self, out: Path, *options: object) -> None:
        self._program(*self._command, "--out", out, "--n", self._n, *options)

    def _end_generation(self, *options: object) -> bool:
        """Start or continue it, and end it. Returns whether there was something left to end."""
        arguments = ("--out", self._out, "--n", self._n, "--commit-interval", 0.1, "--resume", *options)
        before, started = self._commits(), time.monotonic()
        running = self._program.start(*self._command, *arguments, delay=self._delay)
        if self._random.random() < EARLY_SHARE:
            ended = self._end(running, self._moment(self._start_seconds), signal.SIGKILL)
        else:
            while running.alive and self._commits() == before:
                time.sleep(0.005)
            self._start_seconds = time.monotonic() - started
            ended = self._end(running, self._moment(_LATEST))
        self._toll.early += ended and self._commits() == before
        return ended

    def _end(self, running: Running, moment: float, number: signal.Signals | None = None) -> bool:
        """Send a signal then, unless it has ended by itself. Returns whether it was ended."""
        lines = self._journals()
        deadline = time.monotonic() + moment
        while running.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        number = number or self._random.choices([*_EXITS], [8, 1, 1])[0]
        running.signal_group(number)
        finished = running.wait()
        assert finished.code in {0, *_EXITS[number]}, finished
        assert "Traceback" not in finished.stderr, finished.stderr
        assert "owed again" not in finished.stderr, finished.stderr
        for name, content in self._journals().items():
            assert content.startswith(lines.get(name, b"")), f"{name} has lost lines"
        ended = finished.code != 0
        self._toll.kills += ended
        self._toll.in_flight += ended and self._is_in_flight()
        return ended

    def _has_begun(self) -> bool:
        """Whether there is a dataset: the first kills may all come before it."""
        return (self._out / MANIFEST_FILE).exists()

    def _moment(self, latest: float) -> float:
        return self._random.uniform(0, latest)

    def _commits(self) -> int:
        return self._journals().get("w0.jsonl", b"").count(b"\n")

    def _journals(self) -> dict[str, bytes]:
        """Complete lines by file name."""
        contents = {path.name: path.read_bytes() for path in (self._out / "journal").glob("*.jsonl")}
        return {name: content[: content.rfind(b"\n") + 1] for name, content in contents.items()}

    def _is_in_flight(self) -> bool:
        journal = read_journal(self._out)
        without_line = (
            {path.name for path in list_shards(self._out)} - journal.committed.keys() - journal.retired.keys()
        )
        return bool(without_line) or any((self._out / "data").glob(".tmp-*"))
