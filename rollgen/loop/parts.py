"""`--shard i/N`: one of N processes that make a dataset together, each its part of the prompts.

A process is the writer of its part under a name that only this part of this division has, so that it finds its own
shards when it comes back, and need not look at those of the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rollgen.errors import UsageError
from rollgen.format.commit import WHOLE, Part, writer_name
from rollgen.format.retries import RetryList
from rollgen.prompts.plan import Plan

SLURM: Final = "slurm"
_SLURM_VARIABLES: Final = ("TASK_ID", "TASK_MIN", "TASK_MAX", "TASK_STEP", "TASK_COUNT")
_SHARD: Final = re.compile(r"(\d{1,9})/(\d{1,9})")
_MAX_PARTS: Final = 100_000
"""Of a run: each has a journal, and every process looks at the names of all."""


def part_of(shard: str | None, environment: Mapping[str, str] = os.environ) -> Part:
    """What `--shard` says: i/N, `slurm` for what the job array says, None for everything. Raises UsageError."""
    if shard is None:
        return WHOLE
    if shard == SLURM:
        return _slurm_part(environment)
    match = _SHARD.fullmatch(shard)
    if match is None or not int(match[1]) < int(match[2]) <= _MAX_PARTS:
        raise UsageError(
            f"--shard {shard}: no part; give i/N with i from 0 to N - 1 and N at most {_MAX_PARTS}, or {SLURM} in a "
            "Slurm job array"
        )
    return Part(int(match[1]), int(match[2]))


def sibling_names(part: Part) -> frozenset[str]:
    """The names of those that make the other parts."""
    return frozenset(writer_name(Part(number, part.of)) for number in range(part.of) if number != part.number)


def in_part(part: Part, plan: Plan, retries: Sequence[RetryList]) -> npt.NDArray[np.bool_]:
    """bool [samples and retries]: whether each is of this part, by position (see `owed.py`)."""
    indices = [np.repeat(np.arange(plan.prompts), plan.n), *(retry.prompt_index for retry in retries)]
    flags: npt.NDArray[np.bool_] = np.concatenate(indices) % part.of == part.number
    return flags


def _slurm_part(environment: Mapping[str, str]) -> Part:
    """The array's tasks are MIN, MIN + STEP, ... MAX: COUNT of them, unless it is an irregular list."""
    names = [f"SLURM_ARRAY_{name}" for name in _SLURM_VARIABLES]
    try:
        task, least, most, step, count = (int(environment[name]) for name in names)
    except KeyError as missing:
        raise UsageError(
            f"--shard {SLURM}: {missing.args[0]} is not set: this is no task of a Slurm job array; give --shard i/N"
        ) from None
    except ValueError:
        raise UsageError(f"--shard {SLURM}: {', '.join(names)} are not all numbers; give --shard i/N") from None
    is_array = 0 <= least <= most < least + max(step, 1) * count and step >= 0 and count <= _MAX_PARTS
    tasks = range(least, most + 1, max(step, 1)) if is_array else range(0)
    if len(tasks) != count or task not in tasks:
        raise UsageError(
            f"--shard {SLURM}: task {task} of {count} from {least} to {most} in steps of {step}: which part it is "
            "cannot be told; use an array like 0-7 or 0-14:2, not a list like 1,5,6, or give --shard i/N"
        )
    return Part(tasks.index(task), count)
