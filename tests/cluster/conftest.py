"""A local Ray, and whole runs on it with fake engines."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import ray
from models import cluster_program
from models.runs import Recorder
from models.storage import s3_server

from rollgen.cluster.crew import RayCrew
from rollgen.config import RunConfig
from rollgen.loop.report import RunStats
from rollgen.loop.run import generate

PROMPTS, N = 20, 3
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def node_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where replicas keep what is of their node alone."""
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="session")
def local_ray(node_files: Path) -> Iterator[None]:
    """Two cores, four GPUs that nobody looks for: starts in some seconds. Knows of no object storage."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(TESTS))  # where replicas find the fake engines
        # Names of sockets are short.
        environment.setenv("RAY_TMPDIR", os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
        environment.setenv("TMPDIR", str(node_files))
        for tries in range(3):
            try:
                _start_ray()
                break
            except Exception as error:  # Ray has half a minute to start, which is too little beside other tests
                ray.shutdown()
                if tries == 2 or "timed out during startup" not in str(error):
                    raise
    yield
    ray.shutdown()


def _start_ray() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=4,  # as far as Ray knows
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


class RayRuns:
    """Starts runs of one output directory on Ray, each with an engine of `models.cluster_engines`."""

    def __init__(self, directory: Path, model: Path, prompts: Path) -> None:
        self.out: Any = directory / "out"
        """Path or URL."""
        self._prompts = prompts
        self._model = model
        self.reporter = Recorder()

    def __call__(
        self,
        engine: str = "healthy",
        *,
        resume: bool = False,
        given_up: Callable[[], bool] = lambda: False,
        reporter: Recorder | None = None,
        **settings: Any,
    ) -> RunStats:
        """Run to the end."""
        self.reporter = reporter or Recorder()
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

    def start(self, engine: str, n: int) -> BaseProcess:
        """A run in a process of its own, on this Ray."""
        return _forked(cluster_program.run, engine, _address(), self._prompts, self._model, str(self.out), n)

    def lose_crew(self) -> BaseProcess:
        """A process that has no run, but a crew for a while."""
        return _forked(cluster_program.lose, _address(), self._prompts, self._model, Path(f"{self.out}.plan"))


def _forked(program: Callable[..., Any], *arguments: object) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(cluster_program.PRELOADED))
    process = context.Process(target=program, args=(dict(os.environ), *arguments), daemon=True)
    process.start()
    return process


def _address() -> str:
    address: str = ray.get_runtime_context().gcs_address
    return address


@pytest.fixture
def ray_runs(local_ray: None, runs: Any, tmp_path: Path, tiny_model: Path) -> RayRuns:
    """Runs of 20 prompts, three samples each."""
    runs.write_prompts(PROMPTS)
    return RayRuns(tmp_path, tiny_model, runs.prompts)


@pytest.fixture(scope="module")
def bucket(local_ray: None) -> Iterator[str]:
    """The URL of a bucket that only this process and its children can reach: Ray was started before."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as root:
        yield root
