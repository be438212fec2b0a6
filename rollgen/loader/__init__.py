"""Datasets as PyTorch reads them: `RolloutDataset` (map style) and the batches made of its rollouts."""

from __future__ import annotations

from rollgen.loader.batch import Rollout, RolloutBatch, collate
from rollgen.loader.dataset import RolloutDataset

__all__ = ["Rollout", "RolloutBatch", "RolloutDataset", "collate"]
