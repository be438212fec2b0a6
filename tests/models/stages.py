"""The life of one dataset in stages: begun, grown, retried, compacted, replaced. Each can be killed at any step.

All rows of a stage come from one engine that answers the same every time, so that the rows after a stage are known:
those of an undisturbed run.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.datasets import Key, read_rows, write_prompts
from models.program import Finished, Program, Running

PROMPTS = 12
RETRY = ("--retry", "finish_reason=length", "--max-tokens", 32)
GROWN = ("--n", 3)
STAGES: dict[str, tuple[object, ...]] = {
    "begin": ("--n", 2),
    "grow": (*GROWN, "--resume"),
    "retry": (*GROWN, "--resume", *RETRY),
    "compact": ("compact",),
    "replace": ("--n", 1, "--clean"),
}
"""Options of `rollgen generate` for each, but for that which is another command."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One command, and the dataset before and after it."""

    name: str
    before: Path
    rows: dict[Key, dict[str, Any]]
    """Afterwards."""
    steps: tuple[str, ...]
    """What the command does, as `replayed.py` names it."""


class Life:
    """Makes the stages, and repeats them with a kill."""

    def __init__(self, program: Program, directory: Path, model: Path) -> None:
        self._program = program
        self._directory = directory
        self._command = command(model, write_prompts(directory / "prompts.jsonl", PROMPTS))
        self.stages = self._make_stages()

    @property
    def finished(self) -> Path:
        """A dataset of three shards, grown and retried. Not to be changed."""
        return self.stages["compact"].before

    @property
    def rows(self) -> dict[Key, dict[str, Any]]:
        """Of the finished dataset."""
        return self.stages["retry"].rows

    def generate(self, out: Path, *options: object, **faults: object) -> Running:
        """Start `rollgen generate` as all of it was made."""
        return self._program.start(*self._command, "--out", out, *options, **faults)

    def resume(self, out: Path) -> Finished:
        """Make what is owed of the finished dataset."""
        return self.generate(out, *GROWN, "--resume").wait()

    def kill_and_continue(self, name: str, step: int) -> None:
        """Kill a stage in front of a step (from 1) and continue it: its rows are there, each once."""
        stage = self.stages[name]
        out = self._directory / "killed"
        if stage.before.exists():
            shutil.copytree(stage.before, out)
        try:
            self._kill_and_continue(name, out, step)
        except Exception as error:
            error.add_note(f"killed in front of step {step} of {name}: {stage.steps[step - 1]}")
            raise
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _kill_and_continue(self, name: str, out: Path, step: int) -> None:
        killed = self._run(name, out, kill_at=step)
        assert killed.code == -9, killed
        self._continue(name, out, step)
        assert read_rows(out) == self.stages[name].rows
        assert not list(out.rglob(".tmp-*"))
        self._program("verify", out)

    def kill_at_all_steps(self) -> str:
        """Returns the figure. Raises AssertionError, with the stage and step that went wrong."""
        places = [(name, step) for name, stage in self.stages.items() for step in range(1, len(stage.steps) + 1)]
        for name, step in places:
            self.kill_and_continue(name, step)
        return f"killed in front of {len(places)} steps: rows those of an undisturbed run, verify clean"

    def _make_stages(self) -> dict[str, Stage]:
        stages, out = {}, self._directory / "out"
        for name in STAGES:
            before, steps = self._directory / f"before-{name}", self._directory / f"{name}.steps"
            if out.exists():
                shutil.copytree(out, before)
            finished = self._run(name, out, steps=steps)
            assert finished.code == 0, finished
            stages[name] = Stage(name, before, read_rows(out), tuple(steps.read_text().splitlines()))
        return stages

    def _run(self, name: str, out: Path, **faults: object) -> Finished:
        if name == "compact":
            return self._program.start("compact", out, **faults).wait()
        return self.generate(out, *STAGES[name], **faults).wait()

    def _continue(self, name: str, out: Path, step: int) -> None:
        if name == "replace":
            self._replace(out)
        elif name == "compact" and step % 2:
            self._program("compact", out)
        else:
            options: Sequence[object] = (*GROWN, "--resume") if name == "compact" else STAGES[name]
            resume = () if "--resume" in options else ("--resume",)
            self._program(*self._command, "--out", out, *options, *resume)

    def _replace(self, out: Path) -> None:
        """What is there is the old run, the new one, or is told to be neither; then the new one is made."""
        resumed = self.resume(out)
        assert resumed.code in (0, 2), resumed
        if resumed.code == 2:
            assert "replace the run with --clean" in resumed.stderr
        self._program(*self._command, "--out", out, *STAGES["replace"])


def command(model: Path, prompts: Path) -> tuple[object, ...]:
    """`rollgen generate` with samples some of which are cut, and one commit at the end."""
    options = ("--dtype", "float32", "--max-tokens", 16, "--commit-interval", 3600, "--progress", "none")
    return ("generate", prompts, "--model", model, *options)
