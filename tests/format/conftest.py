"""A dataset that is recovered in one way or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from models.crashes import MakeManifest, Stored

from rollgen.format.journal import read_journal


@pytest.fixture
def stored(tmp_path: Path, make_dataset: Callable[..., Path], make_manifest: MakeManifest) -> Stored:
    """Two shards, committed."""
    directory = make_dataset(tmp_path / "run", shards=2, prompts=2, n=2)
    manifest = make_manifest()
    return Stored(directory, manifest.config_digest, list(read_journal(directory).committed.values()), manifest)
