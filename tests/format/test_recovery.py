"""Every crash point of the commit protocol: what `recover` makes of it.

A crash is made by leaving exactly the files that a kill at that point leaves.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from models.crashes import (
    ALL,
    SHARD_0_ONLY,
    SHARD_1_ONLY,
    MakeCompletion,
    MakeManifest,
    Stored,
    assert_stable,
    planned,
    write_shard,
)
from models.damage import flip
from models.deaths import contents

from rollgen.config import digest
from rollgen.errors import DatasetError, Unreadable
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import read_journal
from rollgen.format.reader import verify_shard
from rollgen.format.recovery import recover


def test_nothing_happened(stored: Stored) -> None:
    """All is done; nothing is written."""
    before = stored.journal.read_bytes()
    assert stored.recover() == (ALL, ())
    assert stored.journal.read_bytes() == before


def test_nothing_stored(tmp_path: Path) -> None:
    """A run that was killed before its first commit owes everything."""
    with WriterSlot(tmp_path, "w0") as slot:
        recovery = recover(slot, digest({}), planned())
    assert (recovery.done.tolist(), recovery.findings) == ([False] * 8, ())


def test_plan_has_grown(stored: Stored) -> None:
    """n = 3 and a fifth prompt: the third sample of each prompt, and all of the last, are owed."""
    done, findings = stored.recover(np.array([0, 3, 6, 9, 12, 15]))
    assert done == [True, True, False] * 4 + [False] * 3
    assert findings == ()


def test_killed_while_writing_the_temporary_file(stored: Stored) -> None:
    """The leftover is removed and nothing is lost but what it held."""
    leftover = stored.directory / "data" / ".tmp-w0-000002"
    leftover.write_bytes(stored.shard(0).read_bytes()[:500])
    assert stored.recover() == (ALL, ())
    assert not leftover.exists()


@pytest.mark.parametrize("temporary_name_left", [False, True])
def test_killed_between_link_and_journal(stored: Stored, temporary_name_left: bool) -> None:
    """The shard is complete: it is verified, counted and given the line that it should have had."""
    stored.forget_last_line()
    if temporary_name_left:
        os.link(stored.shard(1), stored.directory / "data" / ".tmp-w0-000001")
    done, [finding] = stored.recover()
    assert done == ALL
    assert finding == f"{stored.shard(1)}: committed without its journal line (a crash); verified and added"
    assert list(read_journal(stored.directory).committed.values()) == stored.lines
    assert sorted(path.name for path in (stored.directory / "data").iterdir()) == [
        "part-w0-000000.parquet",
        "part-w0-000001.parquet",
    ]
    assert_stable(stored, ALL)


@pytest.mark.parametrize("kept", [1, 100, -1], ids=["a byte", "a third", "all but the newline"])
def test_killed_while_appending_to_the_journal(stored: Stored, kept: int) -> None:
    """A torn line says nothing, even if only its newline is missing: the same as no line."""
    first, second = stored.journal.read_bytes().splitlines(keepends=True)
    stored.journal.write_bytes(first + second[:kept])
    done, [finding] = stored.recover()
    assert done == ALL
    assert "verified and added" in finding
    assert list(read_journal(stored.directory).committed.values()) == stored.lines
    assert_stable(stored, ALL)


def test_shard_lost(stored: Stored) -> None:
    """Journaled but gone: retired, its samples are owed, and its name is not used again."""
    stored.shard(1).unlink()
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert finding == f"{stored.shard(1)}: missing; its samples are owed again"
    assert read_journal(stored.directory).retired.keys() == {"part-w0-000001.parquet"}
    assert_stable(stored, SHARD_0_ONLY)
    with WriterSlot(stored.directory, "w0") as slot:
        assert slot.temporary().name == ".tmp-w0-000002"


def test_killed_between_retiring_and_moving(stored: Stored) -> None:
    """A retired shard still in place is moved, so that a plain read of data/*.parquet does not find it."""
    flip(stored.shard(1), -100)
    with WriterSlot(stored.directory, "w0") as slot:
        slot.retire(stored.lines[1])
    assert stored.recover() == (SHARD_0_ONLY, ())
    assert not stored.shard(1).exists()
    assert (stored.directory / "quarantine" / stored.shard(1).name).exists()


def test_shard_of_other_prompts(stored: Stored) -> None:
    """Keys are matched by id, not by place: the same settings with other prompts are another run."""
    with pytest.raises(DatasetError, match=r"row 0: \(p0, 0\) is not in the plan"):
        stored.recover(name="q")


@pytest.mark.parametrize("new", [[], [(3, 2), (4, 0)]], ids=["nothing", "two samples"])
def test_a_shard_without_a_line_that_is_stored_in_part(
    stored: Stored, make_completion: MakeCompletion, new: list[tuple[int, int]]
) -> None:
    """What is new in it becomes a shard, in order; the rest is there already, and no human has to choose."""
    write_shard(stored.directory, stored.manifest, [make_completion(*key) for key in [(0, 0), (3, 1), *new]], "w1")
    (stored.directory / "journal/w1.jsonl").unlink()
    offsets = np.array([0, 2, 4, 6, 9, 12])
    done, [finding] = stored.recover(offsets)
    assert done == [*ALL, bool(new), bool(new), False, False]
    added = "2 of 4 samples were stored nowhere else, and are added as part-w0-000002.parquet"
    shard = stored.directory / "data/part-w1-000000.parquet"
    assert finding == (
        f"{shard}: committed without its journal line (a crash); "
        f"{added if new else 'all of it has been stored since'}; moved to quarantine/"
    )
    assert (stored.directory / "quarantine" / "part-w1-000000.parquet").exists()
    assert stored.recover(offsets) == (done, ())
    for line in read_journal(stored.directory).committed.values():
        verify_shard(stored.directory / "data" / line.file, line=line, config_digest=stored.digest)


def test_a_plan_that_cannot_be_read(stored: Stored) -> None:
    """That is no fault of the shard that is compared with it: nothing changes."""
    stored.forget_last_line()
    before = contents(stored.directory)

    def fail(table: pa.Table) -> str | None:
        raise DatasetError("plan.parquet: damaged")

    with (
        pytest.raises(Unreadable, match=r"plan\.parquet: damaged"),
        WriterSlot(stored.directory, "w0") as slot,
    ):
        recover(slot, stored.digest, replace(planned(), problem=fail))
    assert contents(stored.directory) == before


def test_the_plan_is_asked_once_a_shard(stored: Stored) -> None:
    """It is read from disk for that, also for a shard without a line."""
    stored.forget_last_line()
    asked: list[list[int]] = []

    def prompt_ids(indices: np.ndarray) -> pa.Array:
        asked.append(indices.tolist())
        return planned().prompt_ids(indices)

    with WriterSlot(stored.directory, "w0") as slot:
        recover(slot, stored.digest, replace(planned(), prompt_ids=prompt_ids))
    assert asked == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_key_in_two_shards(stored: Stored, make_manifest: MakeManifest, make_completion: MakeCompletion) -> None:
    """Both copies are sound: which one to keep is not for a program to say."""
    write_shard(stored.directory, make_manifest(), [make_completion(3, 1)], writer="w1")
    with pytest.raises(DatasetError, match=r"part-w1-000000\.parquet: holds samples that are stored already; remove"):
        stored.recover()


def test_key_twice_in_one_shard(stored: Stored, make_manifest: MakeManifest, make_completion: MakeCompletion) -> None:
    """The same, inside a file."""
    write_shard(stored.directory, make_manifest(), [make_completion(4, 0), make_completion(4, 0)])
    with pytest.raises(DatasetError, match=r"part-w0-000002\.parquet: holds samples that are stored already"):
        stored.recover(np.array([0, 2, 4, 6, 8, 10]))


@pytest.mark.parametrize(
    ("prompt_index", "sample_index"), [(4, 0), (3, 2), (-1, 0), (0, -1), (2**62, 0), (0, 2**31 - 1)]
)
def test_key_that_was_not_planned(
    stored: Stored,
    make_manifest: MakeManifest,
    make_completion: MakeCompletion,
    prompt_index: int,
    sample_index: int,
) -> None:
    """Prompts are 0 to 3 and samples 0 and 1; the error names file, row and key."""
    key = {"prompt_id": "stranger", "prompt_index": prompt_index, "sample_index": sample_index}
    row = replace(make_completion(0, 0), **key)
    write_shard(stored.directory, make_manifest(), [row])
    with pytest.raises(DatasetError, match=rf"000002\.parquet: row 0: \(stranger, {sample_index}\) is not in the plan"):
        stored.recover()


def test_retired_shards_do_not_count(stored: Stored) -> None:
    """Also when their file is still in place."""
    with WriterSlot(stored.directory, "w0") as slot:
        slot.retire(stored.lines[0])
    assert stored.recover() == (SHARD_1_ONLY, ())


def test_shards_of_all_writers_count(
    stored: Stored, make_manifest: MakeManifest, make_completion: MakeCompletion
) -> None:
    """A fifth prompt stored by another writer."""
    write_shard(stored.directory, make_manifest(), [make_completion(4, 1)], writer="gpu_1")
    done, findings = stored.recover(np.array([0, 2, 4, 6, 8, 10]))
    assert (done, findings) == ([*ALL, False, True], ())
