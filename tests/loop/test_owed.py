"""What is owed, in which order."""

from __future__ import annotations

import numpy as np
import pytest
from models.runs import Runs

from rollgen.format.retries import RetryList
from rollgen.format.schema import PLAN_FILE
from rollgen.loop.owed import Owed
from rollgen.prompts.plan import Plan


@pytest.fixture
def plan(runs: Runs) -> Plan:
    """Of five prompts, two samples each."""
    runs()
    return Plan(runs.out / PLAN_FILE)


def test_what_is_done_is_skipped(plan: Plan) -> None:
    """In plan order; each group is counted at its first request."""
    owed = Owed(plan, (), np.array([True, True, False, True, False, False, True, False, True, True]))
    requests = [(request.request_id, position, group) for request, position, group in owed.requests()]
    assert requests == [("1-0", 2, 1), ("2-0", 4, 2), ("2-1", 5, 0), ("3-1", 7, 1)]
    assert len(owed) == 4
    owed.settle(5)
    assert [position for _, position, _ in owed.requests()] == [2, 4, 7]


def test_retries_follow_the_samples_of_their_prompt(plan: Plan) -> None:
    """Two retry lists: positions go on after the plan's; max_tokens is the list's, generation its number."""
    lists = [
        RetryList(1, np.array([1, 1, 4]), np.array([0, 1, 0], np.int32), np.array([16, 16, 17], np.int32)),
        RetryList(2, np.array([4]), np.array([0], np.int32), np.array([32], np.int32)),
    ]
    done = np.ones(14, np.bool_)
    done[[3, 10, 12, 13]] = False
    owed = Owed(plan, lists, done)
    found = [(r.request_id, r.generation, r.prompt.sampling.max_tokens, at, n) for r, at, n in owed.requests()]
    assert found == [("1-1", 0, 8, 3, 2), ("1-0-r1", 1, 16, 10, 0), ("4-0-r1", 1, 17, 12, 2), ("4-0-r2", 2, 32, 13, 0)]
    seeds = [request.seed for request, _, _ in owed.requests()]
    assert seeds[2] == seeds[3] != seeds[1]  # a sample keeps its seed
