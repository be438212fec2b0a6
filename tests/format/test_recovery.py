"""Every crash point of the commit protocol, and every kind of damage: what `recover` makes of it.

The dataset has four prompts of two samples in two shards: shard 0 holds prompts 0 and 1, shard 1 holds 2 and 3. A crash
is made by leaving exactly the files that a kill at that point leaves.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollgen.config import digest
from rollgen.errors import DatasetError, ResumeRefused, Unreadable
from rollgen.format.commit import Part, WriterSlot
from rollgen.format.done import PlannedKeys, PlannedSamples
from rollgen.format.journal import JournalLine, read_journal
from rollgen.format.manifest import Manifest
from rollgen.format.reader import verify_shard
from rollgen.format.recovery import recover, recover_shards
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion, sample_seed

MakeCompletion = Callable[..., Completion]
MakeManifest = Callable[..., Manifest]
OFFSETS = np.array([0, 2, 4, 6, 8])
SEEDS = {sample_seed(0, f"p{prompt}", sample) for prompt in range(5) for sample in range(3)}


def problem(table: pa.Table) -> str | None:
    """What `random_prompt` has is planned."""
    return None if set(table["seed"].to_pylist()) <= SEEDS else "a seed that nobody planned"


def planned(offsets: np.ndarray = OFFSETS, name: str = "p") -> PlannedKeys:
    """Prompts p0, p1, ... of a plan."""
    return PlannedKeys(offsets, lambda indices: pa.array([f"{name}{index}" for index in indices]), problem)


ALL, SHARD_0_ONLY, SHARD_1_ONLY = [True] * 8, [True] * 4 + [False] * 4, [False] * 4 + [True] * 4


class Stored(NamedTuple):
    """The dataset, and where its parts are."""

    directory: Path
    digest: str
    lines: list[JournalLine]
    manifest: Manifest

    @property
    def journal(self) -> Path:
        return self.directory / "journal" / "w0.jsonl"

    def shard(self, index: int) -> Path:
        return self.directory / "data" / f"part-w0-{index:06d}.parquet"

    def forget_last_line(self) -> None:
        """As if the process died before it appended to the journal."""
        self.journal.write_bytes(self.journal.read_bytes().splitlines(keepends=True)[0])

    def recover(self, offsets: np.ndarray = OFFSETS, name: str = "p") -> tuple[list[bool], tuple[str, ...]]:
        with WriterSlot(self.directory, "w0") as slot:
            recovery = recover(slot, self.digest, planned(offsets, name))
        return recovery.done.tolist(), recovery.findings


@pytest.fixture
def stored(tmp_path: Path, make_dataset: Callable[..., Path], make_manifest: MakeManifest) -> Stored:
    """Two shards, committed."""
    directory = make_dataset(tmp_path / "run", shards=2, prompts=2, n=2)
    manifest = make_manifest()
    return Stored(directory, manifest.config_digest, list(read_journal(directory).committed.values()), manifest)


def assert_stable(stored: Stored, done: list[bool]) -> None:
    """A second recovery finds the same, and nothing to report: the first has settled it."""
    assert stored.recover() == (done, ())


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


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def flip_page(path: Path, column: str) -> None:
    """Flip a bit in the data of the last page of a column of the first row group."""
    row_group = pq.read_metadata(path).row_group(0)
    chunks = [row_group.column(index) for index in range(row_group.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]
    flip(path, chunk.data_page_offset + chunk.total_compressed_size - 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 16),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "footer bit": lambda path: flip(path, -100),
    "footer length bit": lambda path: flip(path, -8),
    "magic bit": lambda path: flip(path, -1),
    "key page bit": lambda path: flip_page(path, "sample_index"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_shard(stored: Stored, damage: Callable[[Path], object]) -> None:
    """Set aside whole and retired; its samples are owed, the other shard's are not."""
    damage(stored.shard(1))
    content = stored.shard(1).read_bytes()
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert finding.startswith(f"{stored.shard(1)}: ")
    assert finding.endswith("moved to quarantine/, its samples are owed again")
    assert "\n" not in finding
    assert (stored.directory / "quarantine" / stored.shard(1).name).read_bytes() == content
    assert read_journal(stored.directory).retired.keys() == {stored.shard(1).name}
    assert_stable(stored, SHARD_0_ONLY)


# Not "longer" nor "footer bit": without a journal line nothing says how long the file was, or what its footer held.
UNVOUCHED = {name: DAMAGE[name] for name in DAMAGE if name not in ("longer", "footer bit")} | {
    "mask page bit": lambda path: flip_page(path, "sampling_mask"),
    "logprob page bit": lambda path: flip_page(path, "logprobs"),
}


@pytest.mark.parametrize("damage", UNVOUCHED.values(), ids=UNVOUCHED)
def test_damaged_shard_without_a_journal_line(stored: Stored, damage: Callable[[Path], object]) -> None:
    """Nobody vouches for it, so all of it is read; then the same as above, also for a page no resume would look at."""
    stored.forget_last_line()
    damage(stored.shard(1))
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert "moved to quarantine/" in finding
    assert_stable(stored, SHARD_0_ONLY)


@pytest.mark.parametrize("column", ["sampling_mask", "logprobs", "text", "prompt_index"])
def test_damage_in_a_page_of_any_column(stored: Stored, column: str) -> None:
    """The hash of the whole file is compared, so that resuming mends what readers refuse."""
    flip_page(stored.shard(1), column)
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert "moved to quarantine/" in finding
    assert_stable(stored, SHARD_0_ONLY)


MENDS = "it is what was committed, but its journal line is wrong; `rollgen repair` mends that"


def edit_line(stored: Stored, number: int, **changes: object) -> None:
    lines = [json.loads(text) for text in stored.journal.read_text().splitlines()]
    lines[number] |= changes
    stored.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("changes", [{"rows": 5}, {"bytes": 1}, {"footer_sha256": "0" * 64}], ids=str)
def test_a_line_that_is_wrong_but_for_the_hash(stored: Stored, changes: dict[str, object]) -> None:
    """The hash of the whole file vouches for all of it: it counts, planned or not, and repair is recommended."""
    edit_line(stored, 1, **changes)
    before = contents(stored.directory)
    assert stored.recover() == (ALL, (f"{stored.shard(1)}: {MENDS}",))
    samples = PlannedSamples(planned())
    with WriterSlot(stored.directory, "w0") as slot:
        findings = recover_shards(slot, stored.digest, samples)
    assert findings == (f"{stored.shard(1)}: {MENDS}",)
    assert samples.done[0].all()
    assert contents(stored.directory) == before


def test_names_that_were_exchanged(stored: Stored) -> None:
    """Each file has the hash of the other's line: nothing is lost."""
    first = stored.shard(0).read_bytes()
    os.replace(stored.shard(1), stored.shard(0))
    stored.shard(1).write_bytes(first)
    done, findings = stored.recover()
    assert done == ALL
    assert findings == tuple(f"{stored.shard(number)}: {MENDS}" for number in range(2))


def test_a_shard_that_was_overwritten_by_another(stored: Stored) -> None:
    """That is a copy, because the other is where it was: its samples are owed."""
    stored.shard(1).write_bytes(stored.shard(0).read_bytes())
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert "its SHA-256 is not the journal's" in finding


def test_a_manifest_that_contradicts_what_was_committed(stored: Stored) -> None:
    """It may be the manifest that is wrong: nothing is set aside."""
    before = contents(stored.directory)
    with pytest.raises(DatasetError, match=r"another dataset .* yet it is the very file that was committed: .*repair"):
        stored._replace(digest="0" * 64).recover()
    assert contents(stored.directory) == before


def contents(directory: Path) -> dict[Path, bytes]:
    """Every file but locks."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path: path.read_bytes() for path in files}


FAILURES = {
    "disk": OSError(errno.EIO, "Input/output error"),
    "memory": pa.ArrowMemoryError("malloc of size 1 failed"),
    "memory of libzstd": OSError("ZSTD decompression failed: Allocation error : not enough memory"),
    "memory of Python": MemoryError(),
}


@pytest.mark.parametrize("error", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("has_line", [True, False])
@pytest.mark.parametrize("reads", ["rollgen.format.recovery.file_sha256", "rollgen.format.parquet.CheckedParquet.read"])
def test_the_machine_fails(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, error: Exception, has_line: bool, reads: str
) -> None:
    """Nothing is known about a shard then: nothing changes, and the next time all is done."""
    if not has_line:
        stored.forget_last_line()
    before = contents(stored.directory)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(reads, fail)
        with pytest.raises(Unreadable, match=r"\.parquet: .*could not read it: "):
            stored.recover()
    assert contents(stored.directory) == before
    assert stored.recover()[0] == ALL


def write_shard(directory: Path, manifest: Manifest, rows: list[Completion], writer: str = "w0") -> None:
    with WriterSlot(directory, writer) as slot, ShardWriter(slot, manifest, commit_interval=1) as shard_writer:
        for row in rows:
            shard_writer.add(row)


def test_shard_of_another_dataset(
    stored: Stored, tmp_path: Path, make_manifest: MakeManifest, make_completion: MakeCompletion
) -> None:
    """Copied here, its config digest gives it away: set aside, not counted."""
    foreign = make_manifest(identity={"top_k": 9}, config_digest=digest({"top_k": 9}))
    write_shard(tmp_path / "other", foreign, [make_completion(2, 0), make_completion(3, 0)])
    stored.forget_last_line()
    os.replace(tmp_path / "other" / "data" / "part-w0-000000.parquet", stored.shard(1))
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert f"belongs to another dataset (config digest {foreign.config_digest[:12]})" in finding
    assert_stable(stored, SHARD_0_ONLY)


def test_shard_of_the_dataset_that_was_there_before(stored: Stored, make_completion: MakeCompletion) -> None:
    """The same settings and ids, and rows that nobody planned: set aside, if no line vouches for it."""
    rows = [make_completion(2, 0), replace(make_completion(3, 0), seed=1)]
    write_shard(stored.directory, stored.manifest, rows, writer="w1")
    (stored.directory / "journal/w1.jsonl").unlink()
    stored.shard(1).unlink()
    stored.forget_last_line()
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert "w1-000000.parquet: row group 0: a seed that nobody planned: it is of another dataset; moved to" in finding
    assert_stable(stored, SHARD_0_ONLY)


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


def test_file_that_is_no_shard_of_ours(stored: Stored, tmp_path: Path) -> None:
    """Parquet, but not rollgen's."""
    stored.forget_last_line()
    pq.write_table(pq.read_table(stored.shard(1)).replace_schema_metadata({}), stored.shard(1))
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert "not a rollgen shard" in finding


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
