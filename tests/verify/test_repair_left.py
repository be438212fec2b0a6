"""What a repair leaves alone: what was committed, and what nothing is known about."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.damage import (
    COPY,
    EVERYTHING,
    FAILURES,
    FAILURES_OF_THE_MACHINE,
    FIRST,
    RETRIED,
    SECOND,
    SHARDS,
    break_line,
    everything_at_once,
    flip,
    rewrite,
    summary,
    with_column,
)
from models.datasets import read_rows
from models.deaths import contents
from models.runs import Runs

from rollgen.config import digest
from rollgen.errors import DatasetError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards, read_journal
from rollgen.format.manifest import PLANLESS, Manifest, create_manifest
from rollgen.format.parquet import CheckedParquet
from rollgen.format.writer import ShardWriter
from rollgen.prompts.single import id_number
from rollgen.verify.repair import Change, repair_dataset


def of_another_dataset(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(table.schema.metadata | {b"rollgen.config_digest": b"0" * 64})


COMMITTED = "yet it is what was committed: manifest, plan or retry list may be wrong"
ACCUSED: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "another dataset's": (of_another_dataset, "foreign"),
    "another seed": (with_column("seed", lambda seeds: [*seeds[:-1], 7]), "seed"),
    "other sampling": (with_column("temperature", lambda rows: [0.5] * len(rows)), "mismatch"),
    "a prompt that was not planned": (with_column("prompt_index", lambda rows: [*rows[:-1], 77]), "unplanned"),
}


@pytest.mark.parametrize(("change", "kind"), ACCUSED.values(), ids=ACCUSED)
def test_what_was_committed_accuses_the_records(copy: Runs, change: Callable[[pa.Table], pa.Table], kind: str) -> None:
    """The journal vouches for its bytes: it stays, which is said; what else is wrong is mended."""
    rewrite(change)(copy.out)
    break_line(FAILURES)(copy.out)
    line = read_journal(copy.out).committed[Path(FIRST).name]
    repair = repair_dataset(copy.out)
    assert summary(repair) == [("rewritten", FAILURES)]
    [left] = repair.left
    assert (left.action, left.file) == ("left", FIRST)
    assert left.reason.endswith(COMMITTED)
    assert kind in repair.verification.by_kind
    assert not repair.is_settled
    assert read_journal(copy.out).committed[Path(FIRST).name] == line
    foreseen = repair_dataset(copy.out, dry_run=True)
    assert (foreseen.changes, foreseen.left) == ((), repair.left)
    assert not foreseen.is_settled


def test_an_older_copy_of_manifest_and_plan(copy: Runs, rows: dict[Any, dict[str, Any]]) -> None:
    """They know nothing of prompts 2 and 3, nor of the retry: no shard goes, and with the right ones all is well."""
    names = ("rollgen.json", "plan.parquet")
    right = {name: (copy.out / name).read_bytes() for name in names}
    for name in names:
        shutil.copy(copy.out.parent / "older" / name, copy.out / name)
    before = contents(copy.out)
    repair = repair_dataset(copy.out)
    assert repair.changes == ()
    assert [left.file for left in repair.left] == [SECOND, RETRIED]
    assert set(repair.verification.by_kind) == {"unplanned", "failures"}
    assert contents(copy.out) == before
    for name, content in right.items():
        (copy.out / name).write_bytes(content)
    assert repair_dataset(copy.out).is_settled
    assert read_rows(copy.out) == rows


@contextmanager
def failing(shard: str, error: Exception, *, times: float) -> Iterator[None]:
    """The first so many reads of row groups of this shard fail."""
    read, count = CheckedParquet.read, itertools.count(1)

    def fail(file: CheckedParquet, *arguments: Any, **named: Any) -> pa.Table:
        if file.path.name == Path(shard).name and next(count) <= times:
            raise error
        return read(file, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedParquet, "read", fail)
        yield


@pytest.mark.parametrize("error", FAILURES_OF_THE_MACHINE.values(), ids=FAILURES_OF_THE_MACHINE)
def test_the_machine_fails(copy: Runs, error: Exception) -> None:
    """Nothing is known about the shard then: it stays, which is said, and the next repair finds nothing wrong."""
    before = contents(copy.out)
    with failing(SECOND, error, times=math.inf):
        repair = repair_dataset(copy.out)
    assert repair.changes == ()
    [left] = repair.left
    assert left.file == SECOND
    assert left.reason.startswith("nothing is known about it: ")
    assert repair.verification.by_kind == {"unreadable": 1}
    assert contents(copy.out) == before
    with failing(SECOND, error, times=1):
        passing = repair_dataset(copy.out)
    assert len(passing.left) == 1
    assert passing.verification.is_clean
    assert not passing.is_settled
    assert repair_dataset(copy.out).is_settled
    assert contents(copy.out) == before


@pytest.mark.parametrize("content", [None, b"{}", b"garbage"])
def test_no_manifest(copy: Runs, content: bytes | None) -> None:
    """Nothing can be judged without it, and nothing is touched."""
    everything_at_once(copy.out)
    (copy.out / "rollgen.json").unlink()
    if content is not None:
        (copy.out / "rollgen.json").write_bytes(content)
    before = contents(copy.out)
    with pytest.raises(DatasetError, match=r"rollgen\.json"):
        repair_dataset(copy.out)
    assert contents(copy.out) == before
    assert not (copy.out / "journal" / "repair.lock").exists()


@pytest.mark.parametrize(("name", "kind"), [("plan.parquet", "plan"), ("retry-1.parquet", "retries")])
def test_a_damaged_record_is_no_measure(copy: Runs, name: str, kind: str) -> None:
    """Of rows against the plan; what is wrong with shards and journal is mended all the same. It is left."""
    everything_at_once(copy.out)
    flip(copy.out / name, (copy.out / name).stat().st_size // 2)
    repair = repair_dataset(copy.out)
    assert summary(repair) == EVERYTHING
    assert repair.verification.by_kind.keys() >= {kind}
    assert [path.name for path in list_shards(copy.out)] == [Path(RETRIED).name]


def test_a_manifest_that_does_not_vouch_for_itself(copy: Runs) -> None:
    """Of a writer of 1.0: where all shards contradict it, it is the one that is wrong. They stay where they are."""
    path = copy.out / "rollgen.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"vocab_size": 256, "format_version": "1.0"}))
    repair = repair_dataset(copy.out)
    assert repair.changes == ()
    assert repair.verification.by_kind["footer"] == len(SHARDS)


def test_shards_that_overlap_stay(copy: Runs) -> None:
    """Which rows to keep is not for a program to say: one shard has a row of each of two others."""
    table = pa.concat_tables([pq.read_table(copy.out / name)[-1:] for name in (FIRST, SECOND)])
    extra = pq.read_table(copy.out / FIRST)[:1]
    (copy.out / SECOND).unlink()
    pq.write_table(pa.concat_tables([extra, table]), copy.out / COPY, write_page_checksum=True)
    repair = repair_dataset(copy.out)
    assert summary(repair) == [("journalled", COPY), ("retired", SECOND)]
    assert repair.verification.by_kind == {"duplicate": 1}


def test_what_cannot_be_read_is_left_alone(copy: Runs) -> None:
    """Nothing is known of it: its lines stay, and the verification tells."""
    (copy.out / FIRST).unlink()
    (copy.out / FIRST).mkdir()
    repair = repair_dataset(copy.out)
    assert repair.changes == ()
    assert not repair.verification.is_clean
    assert Path(FIRST).name in read_journal(copy.out).committed


def test_planless(tmp_path: Path, make_manifest: Callable[..., Manifest], make_completion: Callable[..., Any]) -> None:
    """Rows are checked against their ids; nothing is owed."""
    identity = {PLANLESS: True}
    manifest = make_manifest(identity=identity, config_digest=digest(identity))
    create_manifest(tmp_path, manifest)
    with WriterSlot(tmp_path, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for sample, number in enumerate((id_number("p1"), 1)):
            writer.add(replace(make_completion(1, sample), prompt_index=number))
            writer.flush()
    repair = repair_dataset(tmp_path)
    reason = "row group 0, row 0 (p1, 1): prompt_index is not the number of its prompt_id"
    assert repair.changes == ()
    assert repair.left == (Change("left", SECOND, f"{reason}; {COMMITTED}"),)
    assert repair.verification.samples is None
