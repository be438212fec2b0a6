"""A local Ray, and whole runs on it with fake engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from models.runs import Recorder

from rollgen.cluster.crew import RayCrew
from rollgen.config import RunConfig
from rollgen.loop.report import RunStats
from rollgen.loop.run import generate

PROMPTS, N = 20, 3
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Two cores, four GPUs that nobody looks for: starts in some seconds."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(TESTS))  # where replicas find the fake engines
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=4,  # as far as Ray knows
            include_dashboard=False,
            object_store_memory=128 << 20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()


class RayRuns:
    """Starts runs of one output directory on Ray, each with an engine of `models.cluster_engines`."""

    def __init__(self, directory: Path, model: Path, prompts: Path) -> None:
        self.out = directory / "out"
        self._prompts = prompts
        self._model = model
        self.reporter = Recorder()

    def __call__(
        self,
        engine: str = "healthy",
        *,
        resume: bool = False,
        given_up: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> RunStats:
        """Run to the end."""
        self.reporter = Recorder()
        config = RunConfig.model_validate(
            {"model": str(self._model), "max_tokens": 8, "top_k": 8, "n": N, "ray": "local", "replicas": 2} | settings
        )
        return generate(
            [self._prompts],
            config,
            self.out,
            reporter=self.reporter,
            make_crew=partial(RayCrew, make_engine=f"models.cluster_engines:{engine}", given_up=given_up),
            resume=resume,
        )


@pytest.fixture
def ray_runs(local_ray: None, runs: Any, tmp_path: Path, tiny_model: Path) -> RayRuns:
    """Runs of 20 prompts, three samples each."""
    runs.write_prompts(PROMPTS)
    return RayRuns(tmp_path, tiny_model, runs.prompts)
