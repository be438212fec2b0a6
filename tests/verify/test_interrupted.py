"""A compaction that was interrupted anywhere, with damage beside it: no row is lost, and the next repair is the last.

Four prompts of three samples: a shard of one sample of prompts 0 and 1, one of prompts 2 and 3, and one of all others.
The compaction makes a shard of prompts 0 and 1, and one of 2 and 3: old and new ones overlap without being copies.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from models.datasets import read_rows
from models.deaths import Killed, assert_kept, contents, dying
from models.runs import Runs

from rollgen.curate.compact import compact
from rollgen.errors import DatasetError, Unreadable
from rollgen.format.replacement import is_unfinished
from rollgen.verify.repair import Change, Repair, repair_dataset

RECORD, JOURNAL, NEW_JOURNAL = "journal/replacement.json", "journal/w0.jsonl", "journal/compact.jsonl"
STRIDE = 4
"""Of the steps at which a repair is killed."""


@pytest.fixture(scope="module")
def origin(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset in `out/`, and `interrupted-1/`, ...: each state that a death leaves of its compaction."""
    runs = Runs(tmp_path_factory.mktemp("origin"), tiny_model)
    runs.write_prompts(4)
    runs(n=1, limit=2)
    runs(n=1, resume=True)
    runs(n=3, resume=True)
    place = runs.out.parent
    seen: list[set[str]] = []
    for at in itertools.count(1):
        out = Path(shutil.copytree(runs.out, place / "interrupted"))
        with dying(at) as count, suppress(Killed):
            compact(out, shard_tokens=15)
        if is_unfinished(out) and (names := set(contents(out))) not in seen:
            seen.append(names)
            out.rename(place / f"interrupted-{len(seen)}")
        else:
            shutil.rmtree(out)
        if count[0] < at:
            break
    return place


def new_shards(out: Path) -> list[Path]:
    data = out / "data"
    return sorted([*data.glob("part-compact-*"), *(path for path in data.glob(".tmp-compact-0*") if not twin(path))])


def twin(path: Path) -> bool:
    """Whether a new shard has its final name too."""
    return path.with_name(f"part-{path.name.removeprefix('.tmp-')}.parquet").exists()


def old_shards(out: Path) -> list[Path]:
    return sorted((out / "data").glob("part-w0-*"))


def flip(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.unlink()  # another name of it is the same file: a copy in the other place is not meant
    path.write_bytes(damaged)


def flip_everywhere(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)


def flip_line(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    number %= len(lines)
    flip(path, len(b"".join(lines[:number])))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda out: None,
    "record": lambda out: flip(out / RECORD, 30),
    "first line": lambda out: flip_line(out / JOURNAL, 0),
    "last line": lambda out: flip_line(out / JOURNAL, -1),
    "last line of the new journal": lambda out: flip_line(out / NEW_JOURNAL, -1),
    "first line of the new journal": lambda out: flip_line(out / NEW_JOURNAL, 0),
    "first new shard": lambda out: flip_everywhere(new_shards(out)[0], 1000),
    "last new shard": lambda out: flip_everywhere(new_shards(out)[-1], 1000),
    "first new shard missing": lambda out: new_shards(out)[0].unlink(),
    "first old shard": lambda out: flip_everywhere(old_shards(out)[0], 1000),
    "last old shard": lambda out: flip_everywhere(old_shards(out)[-1], 1000),
    "first old shard and first line": lambda out: (
        flip_everywhere(old_shards(out)[0], 1000),
        flip_line(out / JOURNAL, 0),
    ),
}
ALL_ROWS = 12
NEW_SHARDS_ALONE = {"first new shard", "last new shard", "first new shard missing"}
"""What may cost rows where old shards are deleted already: the damaged file is the only one that has them."""


def states(origin: Path) -> list[Path]:
    return sorted(origin.glob("interrupted-*"), key=lambda path: int(path.name.partition("-")[2]))


def copied(origin: Path, state: Path, place: Path, model: Path) -> Runs:
    """A copy, to be damaged and to be resumed."""
    shutil.copytree(state, place / "out")
    shutil.copy(origin / "prompts.jsonl", place)
    return Runs(place, model)


@pytest.mark.parametrize(("name", "damage"), DAMAGE.items(), ids=DAMAGE)
def test_damage_beside_it(
    origin: Path,
    rows: dict[Any, dict[str, Any]],
    tmp_path: Path,
    tiny_model: Path,
    name: str,
    damage: Callable[[Path], Any],
) -> None:
    """Clean afterwards, with every row of which a sound file was left, once; a resume makes the rest."""
    repaired = 0
    for state in states(origin)[::2]:
        runs = copied(origin, state, tmp_path / state.name, tiny_model)
        all_old = len(old_shards(runs.out)) == 3
        with suppress(FileNotFoundError, IndexError):  # there is no such file in that state
            damage(runs.out)
            repair = repair_dataset(runs.out)
            assert repair.is_settled, (state.name, repair)
            assert not is_unfinished(runs.out)
            stored = read_rows(runs.out)
            assert all(rows[key] == row for key, row in stored.items())
            assert len(stored) == ALL_ROWS or (name in NEW_SHARDS_ALONE and not all_old), state.name
            if len(stored) < ALL_ROWS or state == states(origin)[0]:
                runs(n=3, resume=True)
                assert read_rows(runs.out) == rows
            repaired += 1
    assert repaired >= 2


def test_there_are_states_before_and_after_each_step(origin: Path) -> None:
    """New shards under temporary names, under both; the new journal; old shards going one by one."""
    seen = states(origin)
    assert [len(old_shards(state)) for state in seen] == [3, 3, 3, 3, 2, 1, 0, 0, 0]
    assert [len(new_shards(state)) for state in seen] == [2] * 9
    assert [(state / NEW_JOURNAL).exists() for state in seen] == [False] * 3 + [True] * 6


KILLED = {
    "before the journal": (1, DAMAGE["first line"]),
    "after the journal": (3, DAMAGE["first new shard"]),
    "old shards going": (4, DAMAGE["record"]),
}


@pytest.mark.parametrize(("state", "damage"), KILLED.values(), ids=KILLED)
def test_killed_while_it_is_set_aside(
    origin: Path,
    rows: dict[Any, dict[str, Any]],
    tmp_path: Path,
    tiny_model: Path,
    state: int,
    damage: Callable[[Path], None],
) -> None:
    """At every fourth step: what is read then is refused or right, a resume too, and the next repair keeps all rows."""
    first = itertools.count(1, STRIDE)
    for at in first:
        runs = copied(origin, states(origin)[state], tmp_path / f"at-{at}", tiny_model)
        damage(runs.out)
        before = contents(runs.out)
        with dying(at) as count, suppress(Killed):
            repair_dataset(runs.out)
        with suppress(DatasetError):
            assert all(rows[key] == row for key, row in read_rows(runs.out).items())
        with suppress(DatasetError):
            runs(n=3, resume=True)
            assert read_rows(runs.out) == rows
        assert repair_dataset(runs.out).is_settled
        kept = {name: content for name, content in before.items() if ".tmp-" not in name and name != RECORD}
        assert_kept(kept, runs.out)  # the record may have come true: what it said is the case then
        assert read_rows(runs.out) == rows
        if count[0] < at:
            break
    assert at > 10


def test_a_dry_run_says_what_is_replaced(origin: Path, tmp_path: Path, tiny_model: Path) -> None:
    """Its files are deleted, or kept in retired/ as was asked for; that is still to be done: it is not settled."""
    runs = copied(origin, states(origin)[0], tmp_path, tiny_model)
    reason = "a compaction was interrupted; the 3 shards that it replaces are deleted, the rest comes after that"
    change = Change("completed", RECORD, reason)
    foreseen = repair_dataset(runs.out, dry_run=True)
    assert foreseen == Repair((change,), (), dry_run=True, verification=None)
    assert not foreseen.is_settled
    assert repair_dataset(runs.out).changes == (change,)


def test_a_compaction_that_cannot_be_completed_is_told(origin: Path, tmp_path: Path, tiny_model: Path) -> None:
    """By whoever would write there, with the way out; by a dry run, which changes nothing."""
    runs = copied(origin, states(origin)[0], tmp_path, tiny_model)
    flip_line(runs.out / JOURNAL, 0)
    before = contents(runs.out)
    for attempt in (lambda: compact(runs.out), lambda: runs(n=3, resume=True)):
        with pytest.raises(DatasetError, match=r"w0\.jsonl:1: damaged line; `rollgen repair` takes it out"):
            attempt()
    [change] = repair_dataset(runs.out, dry_run=True).changes
    assert (change.action, change.file) == ("quarantined", RECORD)
    assert "cannot be completed: " in change.reason
    assert contents(runs.out) == before
    assert repair_dataset(runs.out).changes[0] == change
    assert (runs.out / "quarantine/journal-replacement.json").read_bytes() == before[RECORD]


def test_the_machine_fails_to_read_a_new_shard(origin: Path, tmp_path: Path, tiny_model: Path) -> None:
    """That does not make the compaction impossible: nothing is done, and the next repair completes it."""
    runs = copied(origin, states(origin)[0], tmp_path, tiny_model)
    before = contents(runs.out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollgen.format.parquet.read_footer", fail_to_read)
        with pytest.raises(Unreadable, match=r"compact-000000: this machine"):
            repair_dataset(runs.out)
    assert contents(runs.out) == before
    assert [change.action for change in repair_dataset(runs.out).changes] == ["completed"]


def fail_to_read(descriptor: int, size: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")
