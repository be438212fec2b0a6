"""Which crew a configuration asks for: engines in this process, running servers, or a Ray cluster.

Each is imported when it is asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rollgen.engines.requirements import check_vllm
from rollgen.errors import UsageError
from rollgen.loop.crew import Crew
from rollgen.loop.engines import Engines
from rollgen.loop.stop import is_stopping
from rollgen.preflight import Preflight, extra_needed


def make_crew(preflight: Preflight) -> Crew:
    """The crew of a run that may start. Raises UsageError when it cannot be, or cannot do what is asked for.

    Of a server that does not answer any more it raises EngineError.
    """
    config = preflight.config
    if config.server:
        return _servers(preflight)
    check_vllm()
    if config.ray is not None:
        return _ray(preflight)
    if config.gpus_per_replica is not None:
        raise UsageError("--gpus-per-replica: says what --ray gives to a replica; here the parallel sizes decide")
    return _engines(preflight)


def _engines(preflight: Preflight) -> Crew:
    try:
        from rollgen.engines.vllm import VllmEngine, make_replicas
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install -e '.[vllm]' (GPU) or '.[cpu]' in the clone of rollgen"
        ) from error
    config = preflight.config.model_copy(update={"revision": preflight.model.revision})  # the commit that was checked
    common = _of_run(preflight) | {"weight_versions": preflight.stores_weight_versions}
    return Engines(
        [VllmEngine(config, preflight.model.path_or_id, replica=replica, **common) for replica in make_replicas(config)]
    )


def _servers(preflight: Preflight) -> Crew:
    with extra_needed("http"):
        from rollgen.engines.http import connect
    common = _of_run(preflight) | {
        "dtype": preflight.model.dtype,
        "largest_top_k": preflight.summary.largest_top_k,
        "encode": partial(preflight.model.tokenizer.encode, add_special_tokens=False),
        "given_up": is_stopping,
    }
    return Engines(connect(preflight.config, **common))


def _ray(preflight: Preflight) -> Crew:
    with extra_needed("ray"):
        from rollgen.cluster.crew import RayCrew
    return RayCrew(preflight, given_up=is_stopping)


def _of_run(preflight: Preflight) -> dict[str, Any]:
    """What every engine is told of the run."""
    return {
        "vocab_size": preflight.model.vocab_size,
        "capture_wanted": preflight.capture_wanted,
        "untruncated": "some" if preflight.summary.untruncated else "none",
        "replayable": preflight.replayable,
        "decode": preflight.model.decode,
    }
