"""Whole runs of `rollgen.loop.run.generate` with a fake engine, told apart from the command line only by that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from models.fake_engine import FakeEngine, Key

from rollgen.config import RunConfig
from rollgen.format.journal import list_shards
from rollgen.loop.engines import Engines
from rollgen.loop.place import Place
from rollgen.loop.report import Reporter, RunStats
from rollgen.loop.run import generate
from rollgen.preflight import Preflight


class Recorder:
    """A Reporter that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.starts: list[Path] = []
        self.grew: list[Path] = []
        self.last: RunStats | None = None
        self.prompts = 0

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def checked(self, prompts: int) -> None:
        self.prompts = prompts

    def note(self, message: str) -> None:
        self.notes.append(message)

    def started(self, place: Place, preflight: Preflight, manifest: object, stats: RunStats) -> None:
        self.starts.append(place.directory)

    def grown(self, place: Place) -> None:
        self.grew.append(place.directory)

    def progress(self, stats: RunStats) -> None:
        self.last = stats


class Runs:
    """Starts runs of one output directory with fake engines, and remembers the last ones and their reporter."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.out = directory / "out"
        self.prompts = directory / "prompts.jsonl"
        self.model = model
        self.engine = FakeEngine()
        self.reporter = Recorder()

    def write_prompts(self, count: int, *, bad: Sequence[int] = ()) -> None:
        """`count` rows p0, p1, ...; those in `bad` have no prompt."""
        rows = [{"id": f"p{i}", "prompt": f"Prompt {i}"} if i not in bad else {"id": f"p{i}"} for i in range(count)]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(
        self,
        engine: FakeEngine | list[FakeEngine] | None = None,
        *,
        resume: bool = False,
        clean: bool = False,
        retry: str | None = None,
        reporter: Reporter | None = None,
        **settings: Any,
    ) -> RunStats:
        """Run to the end."""
        self.engines = engine if isinstance(engine, list) else [engine or FakeEngine()]
        self.engine = self.engines[0]
        self.reporter = Recorder()
        config = RunConfig.model_validate({"model": str(self.model), "max_tokens": 8, "top_k": 8, "n": 2} | settings)
        return generate(
            [self.prompts],
            config,
            self.out,
            reporter=reporter or self.reporter,
            make_crew=lambda preflight: Engines(self.engines),
            resume=resume,
            clean=clean,
            retry=retry,
        )

    def stored(self) -> list[Key]:
        """All stored keys, in the order of shards and rows."""
        tables = [pq.read_table(path, columns=["prompt_index", "sample_index"]) for path in list_shards(self.out)]
        return [key for table in tables for key in zip(*(c.to_pylist() for c in table.columns), strict=True)]


def keys(prompts: int, n: int) -> list[Key]:
    """All keys of a plan, in order."""
    return [(prompt_index, sample_index) for prompt_index in range(prompts) for sample_index in range(n)]
