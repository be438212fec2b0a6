"""One program for all tests of this folder: the process that others are forked from takes three seconds to start."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.program import Program
from models.stages import Life


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """`program(*arguments)` runs `rollgen` in a process of its own, with a replayed engine."""
    return Program(tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="session")
def life(program: Program, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A dataset in stages, each of which may be killed."""
    return Life(program, tmp_path_factory.mktemp("life"), tiny_model)
