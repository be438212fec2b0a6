"""A compaction that is killed or has no room: readers see what was there, or what is to be, or are told."""

from __future__ import annotations

import itertools
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from models.deaths import Killed, contents, dying, killed
from models.disk import largest_file

from rollgen.curate.compact import compact
from rollgen.errors import DatasetError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest
from rollgen.format.replacement import Replacement, decide
from rollgen.rollouts import Completion

MakeCompletion = Callable[..., Completion]
MakeManifest = Callable[..., Manifest]
ReadShards = Callable[[Path], dict[str, list[dict[str, Any]]]]


def multiset(shards: dict[str, list[dict[str, Any]]]) -> Counter[str]:
    return Counter(repr(row) for rows in shards.values() for row in rows)


def keys_of(shards: dict[str, list[dict[str, Any]]]) -> list[list[tuple[int, int]]]:
    return [[(row["prompt_index"], row["sample_index"]) for row in rows] for rows in shards.values()]


def test_full_disk_changes_nothing(
    tmp_path: Path, make_manifest: MakeManifest, make_completion: MakeCompletion, store: Callable
) -> None:
    """The first new shard, without masks, fits, the second does not: both are gone, the error names the file."""
    shards = [[make_completion(number, 0, tokens=4000, full=number < 3)] for number in range(6)]
    store(tmp_path, make_manifest(), shards)
    before = contents(tmp_path)
    with (
        largest_file(130_000),
        pytest.raises(DatasetError, match=r"data/\.tmp-compact-000001: cannot be written: .*large"),
    ):
        compact(tmp_path, shard_tokens=8001)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("room", [0, 600], ids=["the lock", "the journal"])
def test_full_disk_at_the_ends(split: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first shard, and after the last, when the decision is written: nothing has changed."""
    before = contents(split)
    if room:

        def decide_without_room(directory: Path, replacement: Replacement) -> None:
            with largest_file(room):
                decide(directory, replacement)

        monkeypatch.setattr("rollgen.curate.compact.decide", decide_without_room)
        with pytest.raises(DatasetError, match=r"cannot be written: File too large; nothing has changed"):
            compact(split, keep=True)
    else:
        with (
            largest_file(0),
            pytest.raises(UsageError, match=r"journal/compact\.lock: cannot be written: File too large"),
        ):
            compact(split)
    assert contents(split) == before
    assert not (split / "retired").exists()


STEPS = ("os.link", "os.unlink", "os.rename", "os.replace", "os.mkdir", "os.rmdir")
"""All that changes what is seen. What is on disk when is `os.fsync`'s, where Ctrl-C may come as well."""


@pytest.mark.parametrize(("how", "keep"), [(Killed, False), (Killed, True), (KeyboardInterrupt, False)])
def test_killed_at_every_step(
    split: Path, tmp_path: Path, read_shards: ReadShards, how: type[BaseException], keep: bool
) -> None:
    """A reader sees the old state, the new one, or is told; whoever writes next finds all of the one or the other."""
    old = read_shards(split)
    seen = Counter[str]()
    for at in itertools.count(1):
        directory = Path(shutil.copytree(split, tmp_path / f"copy-{at}"))
        with dying(at, how=how, steps=STEPS if how is Killed else (*STEPS, "os.fsync")) as count, suppress(how):
            compact(directory, shard_tokens=33, keep=keep)
        decided = (directory / "journal" / "replacement.json").exists()
        if decided:
            with pytest.raises(DatasetError, match="is being compacted, or that was interrupted: try again, or finish"):
                read_shards(directory)
            seen["refused"] += 1
        else:
            state = read_shards(directory)
            assert multiset(state) == multiset(old)
            seen["old" if state == old else "new"] += 1
        with WriterSlot(directory, "w0" if at % 2 else "compact"):
            assert not (directory / "journal" / "replacement.json").exists()
        state = read_shards(directory)
        assert multiset(state) == multiset(old)
        if state == old:
            assert not decided
            compact(directory, shard_tokens=33, keep=keep)
            state = read_shards(directory)
        assert keys_of(state) == [[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], [(3, 0), (4, 0), (5, 0)]]
        assert not list(directory.rglob(".tmp-*"))
        assert len(list((directory / "retired").glob("*"))) == (4 if keep else 0)
        if count[0] < at:  # it was not killed: that was the last step
            break
    assert set(seen) == {"old", "new", "refused"}, "not every state has been tried"


@pytest.mark.parametrize(("call", "at"), [("fsync", 2), ("unlink", 7)], ids=["before the switch", "after it"])
def test_sigkill(split: Path, read_shards: ReadShards, call: str, at: int) -> None:
    """A real one, of a real process: the lock is free again, and the next command does what is left.

    The first fsync is that of the lock file, the second that of the first shard. Five of a trial go first.
    """
    old = read_shards(split)
    assert killed("compact", split, name=call, at=at) == -signal.SIGKILL
    assert list((split / "data").glob(".tmp-compact-*"))
    if call == "fsync":
        copy = Path(shutil.copytree(split, split.parent / "copy"))
        with WriterSlot(copy, "w0"):  # whoever writes next removes what was not decided
            assert not list(copy.rglob(".tmp-*"))
        assert read_shards(copy) == old
    done = compact(split)
    assert done.completed_earlier is (call == "unlink")
    after = read_shards(split)
    assert multiset(after) == multiset(old)
    assert len(after) == 1
    assert not list(split.rglob(".tmp-*"))
