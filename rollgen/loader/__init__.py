"""Datasets as PyTorch reads them: `RolloutStream` for training, `RolloutDataset` for access by number, batches."""

from __future__ import annotations

from rollgen.loader.batch import Rollout, RolloutBatch, collate
from rollgen.loader.dataset import RolloutDataset
from rollgen.loader.stream import RolloutStream

__all__ = ["Rollout", "RolloutBatch", "RolloutDataset", "RolloutStream", "collate"]
