"""Writers that make parts of one dataset: what each recovers of its own, and what it leaves to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from models.crashes import ALL, SHARD_1_ONLY, MakeCompletion, MakeManifest, Stored, flip_page, planned, write_shard
from models.deaths import contents

from rollgen.errors import DatasetError, ResumeRefused
from rollgen.format.commit import Part, WriterSlot
from rollgen.format.journal import read_journal
from rollgen.format.recovery import recover
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion

GROWN = np.array([0, 3, 6, 9, 12, 15])
"""Five prompts of three samples: (0, 2), (1, 2), (2, 2), (3, 2) and those of prompt 4 are not stored."""


def leave_orphan(stored: Stored, rows: list[Completion]) -> Path:
    """A shard without a line, of a writer of everything."""
    write_shard(stored.directory, stored.manifest, rows, "w1")
    (stored.directory / "journal/w1.jsonl").unlink()
    return stored.directory / "data/part-w1-000000.parquet"


def recover_part(stored: Stored, number: int) -> tuple[set[tuple[int, int]], tuple[str, ...]]:
    """What is done of a part, by one of two who pass over each other; by key."""
    with WriterSlot(stored.directory, f"s{number}of2", Part(number, 2)) as slot:
        found = recover(slot, stored.digest, planned(GROWN), apart={f"s{1 - number}of2"})
    done = (divmod(place, 3) for place in np.flatnonzero(found.done).tolist())
    return {key for key in done if key[0] % 2 == number}, found.findings


def assert_each_once(stored: Stored, keys: set[tuple[int, int]]) -> None:
    """Beside what was stored at first these are, once: a recovery of everything refuses a second copy."""
    done, _ = stored.recover(GROWN)
    first = {(prompt, sample) for prompt in range(4) for sample in range(2)}
    assert {divmod(place, 3) for place in np.flatnonzero(done).tolist()} == first | keys


def test_a_part_adds_what_is_whole(stored: Stored, make_completion: MakeCompletion) -> None:
    """Under the name of its writer, so that all parts see it."""
    leave_orphan(stored, [make_completion(3, 2), make_completion(4, 0)])
    assert (4, 0) in recover_part(stored, 0)[0]
    assert recover_part(stored, 1) == ({(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)}, ())
    assert_each_once(stored, {(3, 2), (4, 0)})


def test_a_part_adds_a_rest_of_its_own(stored: Stored, make_completion: MakeCompletion) -> None:
    """What a sibling has stored, whom it passes over, is no rest."""
    write_shard(stored.directory, stored.manifest, [make_completion(3, 2)], "s1of2")
    leave_orphan(stored, [make_completion(3, 2), make_completion(4, 0)])
    done, [finding] = recover_part(stored, 0)
    assert (4, 0) in done
    assert "1 of 2 samples were stored nowhere else, and are added as part-s0of2-000000.parquet" in finding
    assert (3, 2) in recover_part(stored, 1)[0]
    assert_each_once(stored, {(3, 2), (4, 0)})


def test_a_part_leaves_a_rest_of_others(stored: Stored, make_completion: MakeCompletion) -> None:
    """Under its name they would not see it; they add it themselves."""
    orphan = leave_orphan(stored, [make_completion(0, 0), make_completion(3, 2)])
    done, [finding] = recover_part(stored, 0)
    assert done == {(prompt, sample) for prompt in (0, 2) for sample in range(2)}
    assert finding.endswith("1 of 2 samples are stored nowhere else, and left to the parts that make them")
    assert orphan.exists()
    assert (3, 2) in recover_part(stored, 1)[0]
    assert_each_once(stored, {(3, 2)})


def test_a_part_refuses_a_rest_of_several(stored: Stored, make_completion: MakeCompletion) -> None:
    """Nothing changes; a writer of everything adds it, so that all parts see it."""
    leave_orphan(stored, [make_completion(*key) for key in [(0, 0), (3, 2), (4, 0)]])
    before = contents(stored.directory)
    with pytest.raises(ResumeRefused, match="2 of 3 samples are stored nowhere else; continue once without --shard"):
        recover_part(stored, 0)
    assert contents(stored.directory) == before
    assert_each_once(stored, {(3, 2), (4, 0)})
    assert (3, 2) in recover_part(stored, 1)[0]


def test_a_sibling_that_cannot_be_read(stored: Stored, make_completion: MakeCompletion) -> None:
    """What it has stored is not known, so that nothing is added; its part mends it."""
    write_shard(stored.directory, stored.manifest, [make_completion(3, 2)], "s1of2")
    leave_orphan(stored, [make_completion(3, 2), make_completion(4, 0)])
    (stored.directory / "data/part-s1of2-000000.parquet").write_bytes(b"")
    before = contents(stored.directory)
    with pytest.raises(DatasetError, match=r"s1of2-000000\.parquet: .*; continue its part first"):
        recover_part(stored, 0)
    assert contents(stored.directory) == before
    recover_part(stored, 1)
    recover_part(stored, 0)
    assert_each_once(stored, {(3, 2), (4, 0)})


@pytest.fixture
def alive(stored: Stored) -> Iterator[Stored]:
    """The same dataset, whose writer w0 is alive and makes the even prompts: `recover_odd` is another writer's."""
    with WriterSlot(stored.directory, "w0", Part(0, 2)):
        yield stored


def recover_odd(stored: Stored) -> tuple[list[bool], tuple[str, ...]]:
    with WriterSlot(stored.directory, "w1", Part(1, 2)) as slot:
        recovery = recover(slot, stored.digest, planned())
    return recovery.done.tolist(), recovery.findings


def test_shards_of_a_live_writer_are_done(alive: Stored) -> None:
    """Also the one that it is about to append to its journal, which is its business."""
    alive.forget_last_line()
    before = alive.journal.read_bytes()
    assert recover_odd(alive) == (ALL, ())
    assert alive.journal.read_bytes() == before
    assert not (alive.directory / "journal" / "w1.jsonl").exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["missing", "truncated"])
def test_damage_of_a_live_writer_is_not_ours_to_mend(alive: Stored, damage: Callable[[Path], object]) -> None:
    """Nothing is retired or moved; the error names file and fix. Once the writer is gone, it is mended as ever."""
    damage(alive.shard(1))
    with pytest.raises(DatasetError, match=r"000001\.parquet: .*; stop its writer, which is alive, and start again"):
        recover_odd(alive)
    assert len(read_journal(alive.directory).committed) == 2
    assert not (alive.directory / "quarantine").exists()


def test_damage_of_a_dead_writer_is_mended_beside_a_live_one(
    alive: Stored, make_manifest: MakeManifest, make_completion: MakeCompletion
) -> None:
    """Writer w2 made the third sample of prompt 1 and died; its shard rots."""
    offsets = np.array([0, 2, 5, 7, 9])
    with (
        WriterSlot(alive.directory, "w2", Part(1, 2)) as slot,
        ShardWriter(slot, make_manifest(), commit_interval=1) as writer,
    ):
        writer.add(make_completion(1, 2))
    shard = alive.directory / "data" / "part-w2-000000.parquet"
    flip_page(shard, "logprobs")
    with WriterSlot(alive.directory, "w1", Part(1, 2)) as slot:
        recovery = recover(slot, alive.digest, planned(offsets))
    assert recovery.done.tolist() == [True, True, True, True, False, True, True, True, True]
    assert "moved to quarantine/" in recovery.findings[0]
    assert not shard.exists()


def test_retired_shards_of_a_live_writer_stay_where_they_are(alive: Stored) -> None:
    """It moves them itself; they do not count."""
    with WriterSlot(alive.directory, "w1", Part(1, 2)) as slot:
        slot.retire(alive.lines[0])
    assert recover_odd(alive) == (SHARD_1_ONLY, ())
    assert alive.shard(0).exists()
