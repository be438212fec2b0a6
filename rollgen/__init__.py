"""rollgen: rollout datasets that keep the sampling mask of every token.

Importing it loads nothing heavy; public names are loaded when first used.

    RolloutDataset, collate, Rollout, RolloutBatch   the loader (torch)
    ops                                              log-probabilities on the support (torch)
    RollgenError                                     base of all errors
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollgen.errors import RollgenError

if TYPE_CHECKING:
    from rollgen import ops
    from rollgen.loader.batch import Rollout, RolloutBatch, collate
    from rollgen.loader.dataset import RolloutDataset

__version__ = "0.1.0"
__all__ = ["RollgenError", "Rollout", "RolloutBatch", "RolloutDataset", "__version__", "collate", "ops"]

_HOME = {
    "Rollout": "rollgen.loader.batch",
    "RolloutBatch": "rollgen.loader.batch",
    "RolloutDataset": "rollgen.loader.dataset",
    "collate": "rollgen.loader.batch",
}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("rollgen.ops")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rollgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
