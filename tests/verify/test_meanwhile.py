"""A run that goes on while it is verified: whenever it commits, starts or compacts, nothing looks wrong that is not.

Datasets have two shards of six samples; `w0` wrote them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgen.curate.compact import compact
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards
from rollgen.verify import dataset as module
from rollgen.verify.dataset import SampleCounts, verify_dataset

FIRST, SECOND = "data/part-w0-000000.parquet", "data/part-w0-000001.parquet"
JOURNAL = "journal/w0.jsonl"


class Held:
    """The second shard as a writer has it that has yet to commit."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._aside = directory / "data" / ".tmp-w0-000001"
        (directory / SECOND).rename(self._aside)
        first, self._line = (directory / JOURNAL).read_text().splitlines(keepends=True)
        (directory / JOURNAL).write_text(first)

    def publish(self) -> None:
        self._aside.rename(self.directory / SECOND)

    def append(self) -> None:
        with (self.directory / JOURNAL).open("a") as file:
            file.write(self._line)

    def commit(self) -> None:
        self.publish()
        self.append()


def once(action: Callable[[], object]) -> Callable[[], None]:
    """`action`, the first time that this is called."""
    waiting = [action]

    def act() -> None:
        if waiting:
            waiting.pop()()

    return act


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`meanwhile(name, action, after=False)`: another process acts around the first call of a step of verification."""

    def patch(name: str, action: Callable[[], object], *, after: bool = False) -> None:
        real, act = getattr(module, name), once(action)

        def step(*arguments: Any, **named: Any) -> Any:
            if not after:
                act()
            result = real(*arguments, **named)
            act()
            return result

        monkeypatch.setattr(module, name, step)

    return patch


STEPS = ["list_shards", "live_writers", "check_manifest", "check_planned", "check_failures", "check_content"]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_run_commits_meanwhile(directory: Path, meanwhile: Any, name: str, after: bool) -> None:
    """Whenever it does, and although it ends with that: nothing is wrong, the shard is part of what was seen or not."""
    held = Held(directory)
    meanwhile(name, held.commit, after=after)
    verification = verify_dataset(directory)
    assert verification.findings == ()
    assert verification.shards in (1, 2)
    assert verify_dataset(directory).findings == ()


@pytest.mark.parametrize("name", STEPS)
def test_a_run_is_between_name_and_line(directory: Path, meanwhile: Any, name: str) -> None:
    """The shard has its name and waits for its line until verification is over."""
    held = Held(directory)
    (directory / "data" / ".tmp-w0-000001").rename(directory / "aside")
    with WriterSlot(directory, "w0"):
        (directory / "aside").rename(directory / "data" / ".tmp-w0-000001")
        meanwhile(name, held.publish)
        assert verify_dataset(directory).findings == ()
        held.append()
    assert verify_dataset(directory).findings == ()


@pytest.mark.parametrize("name", [*STEPS, "check_bytes", "check_counts"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_it_is_compacted_meanwhile(directory: Path, meanwhile: Any, name: str, after: bool) -> None:
    """Shards vanish and others appear: all is verified again, as it is then."""
    meanwhile(name, lambda: compact(directory), after=after)
    verification = verify_dataset(directory)
    assert verification.findings == ()
    assert (verification.rows, len(list_shards(directory))) == (12, 1)


@pytest.mark.parametrize("name", STEPS)
def test_a_retry_starts_meanwhile(directory: Path, meanwhile: Any, add_retry: Any, name: str) -> None:
    """Its rows are not unknown."""
    meanwhile(name, lambda: add_retry(directory))
    assert verify_dataset(directory).findings == ()


def test_a_plan_grows_meanwhile(directory: Path, make_dataset: Any, meanwhile: Any) -> None:
    """The plan gets its name before the manifest that vouches for it."""
    larger = make_dataset(directory.parent / "larger", shards=3)

    def grow() -> None:
        for name in ("plan.parquet", "rollgen.json"):
            os.replace(larger / name, directory / name)

    meanwhile("check_planned", grow)
    verification = verify_dataset(directory)
    assert verification.findings == ()
    assert verification.samples == SampleCounts(18, 12, 6, 0)


def test_a_shard_that_is_removed_meanwhile(directory: Path, meanwhile: Any) -> None:
    """Nothing replaced it: that is a finding."""
    meanwhile("check_bytes", (directory / FIRST).unlink)
    (finding,) = verify_dataset(directory).findings
    assert (finding.kind, finding.file) == ("missing", FIRST)
