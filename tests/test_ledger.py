"""What may be stored by whom, apart from files: the bookkeeping of a writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from models.runs import Runs

from rollgen.errors import DatasetError
from rollgen.format.commit import WHOLE, Part
from rollgen.format.reader import StoredKeys
from rollgen.format.recovery import Recovery
from rollgen.format.retries import RetryList
from rollgen.format.schema import PLAN_FILE
from rollgen.ledger import OpenLedger, PlannedLedger
from rollgen.prompts.plan import Plan


@pytest.fixture
def plan(runs: Runs) -> Plan:
    """Five prompts of two samples."""
    runs()
    return Plan(runs.out / PLAN_FILE)


def planned(plan: Plan, *, stored: tuple[int, ...] = (), part: Part = WHOLE, retried: bool = False) -> PlannedLedger:
    """With the samples at these positions stored, and a retry of (1, 0) and (2, 1) if asked for."""
    done = np.isin(np.arange(10), stored)
    retry = RetryList(1, np.array([1, 2]), np.array([0, 1], np.int32), np.array([99, 99], np.int32))
    retries = (retry,) if retried else ()
    recovery = Recovery(done, (), tuple(np.zeros(2, np.bool_) for _ in retries))
    return PlannedLedger(plan, retries, recovery, part)


def test_the_last_of_a_group_closes_it(plan: Plan) -> None:
    """Prompt 0 owes two samples and prompt 1 one: its other one is stored."""
    ledger = planned(plan, stored=(2,))
    requests = list(ledger.owed())[:3]
    assert [request.request_id for request in requests] == ["0-0", "0-1", "1-1"]
    assert [ledger.settle(requests[place]) for place in (1, 2, 0)] == [False, True, True]


def test_a_group_is_known_when_its_first_is_handed_out(plan: Plan) -> None:
    """So that an output with several sequences may settle them all."""
    ledger = planned(plan)
    first = next(ledger.owed())
    ledger.check(first)
    [_, second, *_] = planned(plan).owed()
    ledger.check(second)


def test_retries_belong_to_the_part_of_their_prompt(plan: Plan) -> None:
    """Everything is stored but two retries, of prompts 1 and 2: part 1/2 owes the first, with its own max_tokens."""
    [request] = planned(plan, stored=tuple(range(10)), part=Part(1, 2), retried=True).owed()
    assert (request.request_id, request.prompt.sampling.max_tokens) == ("1-0-r1", 99)


def test_keys_of_a_shard_are_taken_in() -> None:
    """And one that is there already means that a shard was copied."""
    ledger = OpenLedger(WHOLE)
    keys = StoredKeys(
        np.array([4, 4]), np.array([0, 1], np.int32), pa.chunked_array([["a", "a"]]), np.zeros(2, np.int32)
    )
    ledger.mark(keys, Path("part-w0-000000.parquet"))
    assert [ledger.is_stored("a", k) for k in range(3)] == [True, True, False]
    with pytest.raises(DatasetError, match=r"^part-w1-000000\.parquet: holds samples that are stored already"):
        ledger.mark(keys, Path("part-w1-000000.parquet"))
