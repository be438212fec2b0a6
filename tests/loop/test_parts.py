"""`--shard`: which part, under which name."""

from __future__ import annotations

import pytest

from rollgen.errors import UsageError
from rollgen.format.commit import WHOLE, Part, writer_name
from rollgen.loop.parts import part_of, sibling_names


def array(task: int, least: int, step: int, count: int) -> dict[str, str]:
    """What Slurm sets for a task of `--array=least-...:step`."""
    most = least + step * (count - 1)
    values = {"TASK_ID": task, "TASK_MIN": least, "TASK_MAX": most, "TASK_STEP": step, "TASK_COUNT": count}
    return {f"SLURM_ARRAY_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("shard", "environment", "part"),
    [
        (None, {}, WHOLE),
        ("0/1", {}, WHOLE),
        ("0/4", {}, Part(0, 4)),
        ("3/4", {}, Part(3, 4)),
        ("slurm", array(0, 0, 1, 8), Part(0, 8)),
        ("slurm", array(12, 10, 1, 4), Part(2, 4)),
        ("slurm", array(6, 0, 2, 4), Part(3, 4)),
        ("slurm", array(7, 1, 3, 3), Part(2, 3)),
    ],
)
def test_part(shard: str | None, environment: dict[str, str], part: Part) -> None:
    """Counted from 0, whatever the array counts from."""
    assert part_of(shard, environment) == part


NO_PARTS = ["", "4/4", "5/4", "-1/4", "0/0", "1", "1/2/3", "a/b", "0 /4", "1.0/4", "SLURM", "0/100001"]


@pytest.mark.parametrize("shard", NO_PARTS)
def test_no_part(shard: str) -> None:
    """The message says what a part looks like."""
    with pytest.raises(UsageError, match=r"^--shard .*: no part; give i/N with i from 0 to N - 1 and N at"):
        part_of(shard, {})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "SLURM_ARRAY_TASK_ID is not set: this is no task of a Slurm job array"),
        (array(1, 0, 1, 4) | {"SLURM_ARRAY_TASK_COUNT": "four"}, "are not all numbers"),
        (array(3, 0, 2, 4), "task 3 of 4 from 0 to 6 in steps of 2: which part it is cannot be told"),
        (array(1, 1, 1, 3) | {"SLURM_ARRAY_TASK_MAX": "6"}, "task 1 of 3 from 1 to 6"),  # --array=1,5,6
        (array(0, 1, 1, 3), "task 0 of 3 from 1 to 3"),
        (array(0, 0, 0, 3), "task 0 of 3 from 0 to 0 in steps of 0"),
        (array(0, 0, -1, 1), "in steps of -1"),
        (array(0, -1, 1, 2), "from -1 to 0"),
        (array(0, 0, 1, 100_001), "task 0 of 100001"),
        (array(0, 0, 1, 4) | {"SLURM_ARRAY_TASK_MAX": str(10**30)}, "to 1000000000000000000000000000000 in"),
    ],
)
def test_no_part_of_an_array(environment: dict[str, str], problem: str) -> None:
    """An irregular array cannot be told, and must not be guessed."""
    with pytest.raises(UsageError, match=f"^--shard slurm: .*{problem}"):
        part_of("slurm", environment)


def test_names() -> None:
    """Each part of each division has its own; a whole run has the one it always had."""
    assert writer_name(WHOLE) == "w0"
    assert writer_name(Part(2, 4)) == "s2of4"
    assert sibling_names(Part(2, 4)) == {"s0of4", "s1of4", "s3of4"}
    assert sibling_names(WHOLE) == frozenset()
