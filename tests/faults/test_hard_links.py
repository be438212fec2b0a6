"""A file system without hard links: whoever writes there is told so before a model loads, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from models.deaths import contents
from models.disk import NO_HARD_LINKS, no_hard_links
from models.runs import Runs
from models.writers import ENGINE

from rollgen.curate.compact import compact
from rollgen.curate.merge import merge
from rollgen.errors import DatasetError, UsageError
from rollgen.rollout_writer import RolloutWriter
from rollgen.verify.repair import repair_dataset


def write(runs: Runs) -> None:
    settings = {"model": str(runs.model), "max_tokens": 8, "top_k": 8, "n": 2}
    RolloutWriter(runs.out, prompts=runs.prompts, engine=ENGINE, **settings).close()


CALLS: dict[str, Callable[[Runs], object]] = {
    "generate --resume": lambda runs: runs(n=3, resume=True),
    "generate --clean": lambda runs: runs(clean=True),
    "a loop of its own": write,
    "compact": lambda runs: compact(runs.out),
    "repair": lambda runs: repair_dataset(runs.out),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_written(runs: Runs, call: Callable[[Runs], object]) -> None:
    """The dataset is as it was, above all where it was to be replaced, and no engine has been started."""
    runs()
    before = contents(runs.out)
    with no_hard_links(), pytest.raises(UsageError, match=f"^{runs.out}: {NO_HARD_LINKS}write to another directory"):
        call(runs)
    assert contents(runs.out) == before
    assert runs.reporter.starts in ([], [runs.out])  # the latter of the run before
    call(runs)


def test_what_a_merge_would_replace(runs: Runs, tmp_path: Path) -> None:
    """It stays."""
    parts = [tmp_path / "one", tmp_path / "two"]
    for seed, part in enumerate(parts):
        runs(seed=seed)
        runs.out.rename(part)
    runs()
    before = contents(runs.out)
    with no_hard_links(), pytest.raises(UsageError, match=f"^{runs.out}: {NO_HARD_LINKS}"):
        merge(parts, runs.out, clean=True)
    assert contents(runs.out) == before
    merge(parts, runs.out, clean=True)


def test_a_new_run(runs: Runs) -> None:
    """Before its prompts are looked at."""
    runs.write_prompts(2, bad=[0, 1])
    with no_hard_links(), pytest.raises(UsageError, match=NO_HARD_LINKS):
        runs()
    assert runs.engine.started == 0


def test_a_later_link(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another machine of a run sees another file system: it is not told of permissions either."""
    monkeypatch.setattr("rollgen.format.commit.check_hard_links", lambda temporary: None)
    with no_hard_links(), pytest.raises(DatasetError, match=f"^{runs.out}: {NO_HARD_LINKS}"):
        runs()
    runs(resume=True)
    with no_hard_links(), pytest.raises(DatasetError, match=f"^{runs.out}/data: {NO_HARD_LINKS}"):
        runs(n=3, resume=True)
    assert not list(runs.out.rglob(".tmp-*"))
