"""rollgen: rollout datasets that keep the sampling mask of every token.

Importing it loads nothing heavy; public names are loaded when first used.

    generate, RunConfig                              prompts to a dataset, with vLLM
    RolloutWriter                                    a dataset from a generation loop of your own
    merge                                            datasets of several models or runs to one
    RolloutStream, RolloutBatch                      batches for training, sharded and resumable (torch)
    RolloutDataset, Rollout, collate                 any sample by number (torch)
    score, Answer                                    rewards for its samples, by a function of your own
    export                                           its samples as the files that a trainer loads
    ops                                              log-probabilities on the support (torch)
    RollgenError                                     base of all errors
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollgen.errors import RollgenError

if TYPE_CHECKING:
    from rollgen import ops
    from rollgen.api import generate, merge
    from rollgen.config import RunConfig
    from rollgen.curate.answers import Answer
    from rollgen.curate.score import score
    from rollgen.exporters.export import export
    from rollgen.loader.batch import Rollout, RolloutBatch, collate
    from rollgen.loader.dataset import RolloutDataset
    from rollgen.loader.stream import RolloutStream
    from rollgen.rollout_writer import RolloutWriter

if "_ROLLGEN_ENGINE_PARENT" in os.environ and "--multiprocessing-fork" in sys.orig_argv:  # an engine's process
    import_module("rollgen.engines.children").register()

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "RollgenError",
    "Rollout",
    "RolloutBatch",
    "RolloutDataset",
    "RolloutStream",
    "RolloutWriter",
    "RunConfig",
    "__version__",
    "collate",
    "export",
    "generate",
    "merge",
    "ops",
    "score",
]

_HOME = {
    "Answer": "rollgen.curate.answers",
    "Rollout": "rollgen.loader.batch",
    "RolloutBatch": "rollgen.loader.batch",
    "RolloutDataset": "rollgen.loader.dataset",
    "RolloutStream": "rollgen.loader.stream",
    "RolloutWriter": "rollgen.rollout_writer",
    "RunConfig": "rollgen.config",
    "collate": "rollgen.loader.batch",
    "export": "rollgen.exporters.export",
    "generate": "rollgen.api",
    "merge": "rollgen.api",
    "score": "rollgen.curate.score",
}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("rollgen.ops")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rollgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
