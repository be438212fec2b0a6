"""Writers of a generation loop that is not ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from models.runs import Runs
from models.writers import ENGINE, Open

from rollgen.rollout_writer import RolloutWriter


@pytest.fixture
def planned(runs: Runs) -> Iterator[Open]:
    """`planned(writer="w1", ...)`: a writer of the five prompts, two samples each, in `runs.out`."""
    yield from _opener(runs, prompts=runs.prompts)


@pytest.fixture
def planless(runs: Runs) -> Iterator[Open]:
    """`planless(writer="w1", ...)`: a writer of prompts that come one by one, in `runs.out`."""
    yield from _opener(runs)


def _opener(runs: Runs, **usual: Any) -> Iterator[Open]:
    opened: list[RolloutWriter] = []

    def opener(**changes: Any) -> RolloutWriter:
        settings = {"model": str(runs.model), "max_tokens": 8, "top_k": 8, "n": 2, "engine": ENGINE}
        opened.append(RolloutWriter(runs.out, **(settings | usual | changes)))
        return opened[-1]

    yield opener
    for writer in opened:
        writer.close()
