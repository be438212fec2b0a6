"""Every kind of damage, and shards of somebody else: what `recover` makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from models.crashes import (
    ALL,
    SHARD_0_ONLY,
    MakeCompletion,
    MakeManifest,
    Stored,
    assert_stable,
    flip_page,
    planned,
    write_shard,
)
from models.damage import FAILURES_OF_THE_MACHINE, flip
from models.deaths import contents

from rollgen.config import digest
from rollgen.errors import DatasetError, Unreadable
from rollgen.format.commit import WriterSlot
from rollgen.format.done import PlannedSamples
from rollgen.format.journal import read_journal
from rollgen.format.recovery import recover_shards

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


@pytest.mark.parametrize("error", FAILURES_OF_THE_MACHINE.values(), ids=FAILURES_OF_THE_MACHINE)
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


def test_file_that_is_no_shard_of_ours(stored: Stored, tmp_path: Path) -> None:
    """Parquet, but not rollgen's."""
    stored.forget_last_line()
    pq.write_table(pq.read_table(stored.shard(1)).replace_schema_metadata({}), stored.shard(1))
    done, [finding] = stored.recover()
    assert done == SHARD_0_ONLY
    assert "not a rollgen shard" in finding
