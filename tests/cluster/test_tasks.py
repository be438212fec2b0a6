"""Cutting what is owed into tasks: every position once, prompts together, sizes that keep all replicas busy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgen.cluster.tasks import MAX_TASKS, TASK_SCHEMA, Task, cut_tasks, task_size
from rollgen.format.retries import RetryList
from rollgen.loop.owed import Owed


class Numbers:
    """As much of a plan as counts: prompts with these n, some of them tombstones."""

    def __init__(self, n: list[int], tombstones: set[int]) -> None:
        self.offsets = np.concatenate([[0], np.cumsum(n)]).astype(np.int64)
        self.samples = int(self.offsets[-1])
        self.tombstone = np.isin(np.arange(len(n)), sorted(tombstones))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.sets(st.integers(0, 29), max_size=4),
    st.integers(1, 5),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_tasks_cover_what_can_be_asked_for_once(n, tombstones, replicas, window, random) -> None:
    """Whatever is done already, and with retries: each position in one task, none of a tombstone, in plan order."""
    plan = Numbers(n, tombstones)
    retried = sorted(random.sample(range(plan.samples), random.randint(0, plan.samples)))
    prompts = np.searchsorted(plan.offsets, retried, "right") - 1
    retry = RetryList(1, prompts, (np.array(retried, np.int64) - plan.offsets[prompts]).astype(np.int32), prompts)
    count = plan.samples + len(retried)
    done = np.array([random.random() < 0.4 for _ in range(count)])
    owed = Owed(plan, [retry], done)

    tasks = cut_tasks(owed, "attempt", replicas=replicas, window=window)

    prompt_of = np.concatenate([np.repeat(np.arange(len(n)), n), prompts])
    wanted = np.flatnonzero(~done & ~plan.tombstone[prompt_of])
    positions = np.concatenate([task.positions for task in tasks]) if tasks else np.empty(0, np.int64)
    assert sorted(positions) == wanted.tolist()
    assert (np.diff(prompt_of[positions]) >= 0).all()
    assert len({task.name for task in tasks}) == len(tasks)
    size = task_size(len(wanted), replicas=replicas, window=window)
    assert all(0 < len(task.positions) < 2 * size for task in tasks)


@pytest.mark.parametrize(
    ("owed", "replicas", "window", "size"),
    [
        pytest.param(10_000, 4, 96, 48, id="half a window"),
        pytest.param(100, 4, 96, 6, id="100 samples are 16 tasks for 4 replicas"),
        pytest.param(3, 8, 96, 1, id="fewer samples than replicas"),
        pytest.param(0, 1, 96, 1, id="nothing"),
        pytest.param(48 * MAX_TASKS + 1, 1, 96, 49, id="so many that tasks must be larger"),
    ],
)
def test_task_size(owed: int, replicas: int, window: int, size: int) -> None:
    """Samples of a task."""
    assert task_size(owed, replicas=replicas, window=window) == size


def test_prompts_stay_together_unless_they_are_larger_than_a_task() -> None:
    """Groups of 3, 3 and 20 in tasks of about 4: the second is finished once it is begun, the third is cut every 4."""
    owed = Owed(Numbers([3, 3, 20], set()), [], np.zeros(26, np.bool_))
    tasks = cut_tasks(owed, "attempt", replicas=1, window=8)
    assert [task.positions.tolist() for task in tasks] == [
        [*range(6)],
        [*range(6, 8)],
        *([*range(start, start + 4)] for start in (8, 12, 16)),
        [*range(20, 26)],
    ]


def test_a_task_is_a_row_of_runs() -> None:
    """Positions 3 4 5, 9 and 7 8, in the order of the plan, which is not theirs."""
    task = Task.of(np.array([3, 4, 5, 9, 7, 8]), "attempt")
    table = task.to_table()
    assert table.schema == TASK_SCHEMA
    assert table.to_pylist() == [{"name": task.name, "starts": [3, 9, 7], "stops": [6, 10, 9]}]
    again = Task.from_table(table)
    assert (again.name, again.positions.tolist()) == (task.name, task.positions.tolist())


def test_names_are_of_the_samples_and_the_attempt() -> None:
    """The same samples in another order have the same name, in another attempt another one."""
    names = [Task.of(np.array(p), a).name for p, a in (([1, 2], "a"), ([2, 1], "a"), ([1, 2], "b"), ([1, 3], "a"))]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(len(name) == 17 and name[0] == "r" for name in names)


def test_a_task_of_a_large_plan_reads_only_its_part(tmp_path: Path, make_prompt) -> None:
    """Prompts 4 and 5 of 6, from a plan of three row groups, with what makes them."""
    from rollgen.prompts.plan import Plan, PlanWriter

    with PlanWriter(tmp_path / "plan.parquet") as writer:
        for start in (0, 2, 4):
            writer.write([make_prompt(index, n=2) for index in (start, start + 1)])
    plan = Plan(tmp_path / "plan.parquet")
    done = np.ones(12, np.bool_)
    done[[8, 9, 11]] = False
    asked = [(r.prompt.prompt_index, r.sample_index, p, g) for r, p, g in Owed(plan, [], done).requests()]
    assert asked == [(4, 0, 8, 2), (4, 1, 9, 0), (5, 1, 11, 1)]
