"""Programs on a Ray cluster with fake engines, for processes that are forked from one that has imported Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import ray
from models.runs import Recorder
from ray._raylet import Config

from rollgen.cluster.crew import RayCrew
from rollgen.config import RunConfig
from rollgen.loop.run import generate
from rollgen.loop.stop import Interrupted
from rollgen.preflight import plan_run

PRELOADED: Final = ("rollgen.cluster.crew", "rollgen.loop.run")
"""What takes long to import, and starts no thread."""


def run(
    environment: Mapping[str, str], engine: str, address: str, prompts: Path, model: Path, out: str, n: int
) -> NoReturn:
    """A run, started or continued. Ends like the command line: 0, 1, or 128 and the number of the signal."""
    _begin(environment)
    try:
        stats = generate(
            [prompts],
            _config(address, model, n=n, commit_interval=0.2),
            out,
            reporter=Recorder(),
            make_crew=partial(RayCrew, make_engine=f"models.cluster_engines:{engine}"),
            resume=True,
        )
    except Interrupted as stop:
        sys.exit(128 + stop.signal_number)
    sys.exit(stats.exit_code)


def lose(environment: Mapping[str, str], address: str, prompts: Path, model: Path, plan: Path) -> None:
    """A crew that nobody has any more: Ray is shut down, and standard output is put back."""
    _begin(environment)
    stdout = sys.stdout
    crew = RayCrew(plan_run([prompts], _config(address, model), plan), make_engine="models.cluster_engines:healthy")
    assert ray.is_initialized()
    assert sys.stdout is sys.stderr
    del crew
    assert not ray.is_initialized()
    assert sys.stdout is stdout


def _begin(environment: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    Config.initialize("")  # Ray has read its own when it was imported, of the process that was forked


def _config(address: str, model: Path, **settings: object) -> RunConfig:
    common = {"model": str(model), "ray": address, "max_tokens": 8, "top_k": 8, "replicas": 2}
    return RunConfig.model_validate(common | settings)
