"""Every kind of damage, repaired: nothing deleted, nothing wrong left, every sample there once after a resume.

The dataset has four prompts of two samples and a fifth row that was skipped, in three shards of one writer: prompts 0
and 1, prompts 2 and 3, and the samples that a retry made again because they were cut at five tokens.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from models.datasets import read_rows
from models.deaths import Killed, assert_kept, contents, dying
from models.disk import largest_file
from models.runs import Runs

from rollgen.config import digest
from rollgen.curate.compact import compact
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import Part, WriterSlot
from rollgen.format.journal import JournalLine, file_sha256, footer_sha256, list_shards, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.manifest import PLANLESS, Manifest, create_manifest
from rollgen.format.parquet import CheckedParquet
from rollgen.format.reader import open_dataset
from rollgen.format.writer import ShardWriter
from rollgen.prompts.single import id_number
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.repair import Change, Repair, repair_dataset
from rollgen.verify.terminal import describe_repair

JOURNAL, FAILURES = "journal/w0.jsonl", "failures/w0.jsonl"
FIRST, SECOND, RETRIED = (f"data/part-w0-{number:06d}.parquet" for number in range(3))
SHARDS = (FIRST, SECOND, RETRIED)
COPY = "data/part-x-000000.parquet"
RETRY = {"retry": "finish_reason=length", "max_tokens": 16}


@pytest.fixture(scope="module")
def origin(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset in `out/`, its prompts beside it."""
    runs = Runs(tmp_path_factory.mktemp("origin"), tiny_model)
    runs.write_prompts(5, bad=[4])
    runs(on_bad_row="skip", limit=2)
    (runs.out.parent / "older").mkdir()
    for name in ("rollgen.json", "plan.parquet"):
        shutil.copy(runs.out / name, runs.out.parent / "older")
    runs(on_bad_row="skip", resume=True)
    runs(on_bad_row="skip", resume=True, **RETRY)
    assert [str(path.relative_to(runs.out)) for path in list_shards(runs.out)] == list(SHARDS)
    assert verify_dataset(runs.out).is_clean
    return runs.out.parent


@pytest.fixture
def copy(origin: Path, tmp_path: Path, tiny_model: Path) -> Runs:
    """A copy of it, to be damaged and to be resumed."""
    return Runs(Path(shutil.copytree(origin, tmp_path / "copy")), tiny_model)


@pytest.fixture(scope="module")
def rows(origin: Path) -> dict[Any, dict[str, Any]]:
    """Its rows by their keys."""
    return read_rows(origin / "out")


def summary(repair: Repair) -> list[tuple[str, str]]:
    return [(change.action, change.file) for change in repair.changes]


def flip(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)


def edit_line(number: int, **changes: Any) -> Callable[[Path], None]:
    """Damage that leaves a line of the journal readable."""

    def damage(out: Path) -> None:
        lines = (out / JOURNAL).read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | changes)
        (out / JOURNAL).write_text("".join(line + "\n" for line in lines))

    return damage


def break_line(name: str, number: int = 0) -> Callable[[Path], None]:
    """A line that is none any more: its first brace."""

    def damage(out: Path) -> None:
        lines = (out / name).read_bytes().splitlines(keepends=True)
        flip(out / name, len(b"".join(lines[:number])))

    return damage


def append(name: str, line: bytes) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        with (out / name).open("ab") as file:
            file.write(line)

    return damage


def line_of(path: Path, **changes: Any) -> JournalLine:
    """The line of a shard, whatever it holds."""
    table = pq.read_table(path)
    masks = sum(len(ids or ()) for row in table["sampling_mask"].to_pylist() for ids in row)
    tokens = sum(table["response_length"].to_pylist())
    line = JournalLine(
        path.name, path.stat().st_size, file_sha256(path), footer_sha256(path), len(table), tokens, masks
    )
    return replace(line, **changes)


def rewrite(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Another content of the first shard, with a line that is right: no storage does that, but somebody might."""

    def damage(out: Path) -> None:
        path = out / FIRST
        pq.write_table(change(pq.read_table(path)), path, write_page_checksum=True)
        line = asdict(line_of(path))
        edit_line(0, **line)(out)

    return damage


def with_column(name: str, values: Callable[[list[Any]], list[Any]]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        place, field = table.schema.get_field_index(name), table.schema.field(name)
        return table.set_column(place, field, pa.array(values(table[name].to_pylist()), field.type))

    return change


def of_another_dataset(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(table.schema.metadata | {b"rollgen.config_digest": b"0" * 64})


def truncate(out: Path) -> None:
    (out / FIRST).write_bytes((out / FIRST).read_bytes()[:-1000])


def copy_with_line(name: str) -> Callable[[Path], None]:
    """The first shard again, committed by another writer."""

    def damage(out: Path) -> None:
        path = Path(shutil.copy(out / FIRST, out / "data" / f"part-{name}-000000.parquet"))
        (out / "journal" / f"{name}.jsonl").write_bytes(encode_line(line_of(path)))

    return damage


def retire_in_place(out: Path) -> None:
    append(JOURNAL, encode_line(line_of(out / FIRST, retired=True)))(out)


def stranger(out: Path) -> None:
    failure = json.loads((out / FAILURES).read_text().splitlines()[0])
    append(FAILURES, json.dumps(failure | {"prompt_index": 99}).encode() + b"\n")(out)


def exchange_names_of_lines(out: Path) -> None:
    for number, name in enumerate((SECOND, FIRST)):
        edit_line(number, file=Path(name).name)(out)


def exchange_shards(out: Path) -> None:
    first = (out / FIRST).read_bytes()
    shutil.copy(out / SECOND, out / FIRST)
    (out / SECOND).write_bytes(first)


GONE = [("quarantined", FIRST)]
EXCHANGED = [("journalled", FIRST), ("journalled", SECOND), ("rewritten", JOURNAL)]
NEW_LINE = [("journalled", FIRST), ("rewritten", JOURNAL)]
DAMAGE: dict[str, tuple[Callable[[Path], Any], list[tuple[str, str]]]] = {
    "nothing": (lambda _: None, []),
    "a torn last line": (append(JOURNAL, b'{"file": "part'), []),
    "foreign files and leftovers": (lambda out: [(out / "data" / name).touch() for name in ("x", ".tmp-w0-7")], []),
    "a flipped bit of a page": (lambda out: flip(out / FIRST, 1000), GONE),
    "a flipped bit of the footer": (lambda out: flip(out / FIRST, -1000), GONE),
    "a flipped bit of its last byte": (lambda out: flip(out / FIRST, -1), GONE),
    "truncated": (truncate, GONE),
    "empty": (lambda out: (out / FIRST).write_bytes(b""), GONE),
    "another shard's content": (lambda out: shutil.copy(out / SECOND, out / FIRST), GONE),
    "positive logprobs": (rewrite(with_column("logprobs", lambda rows: [[1.0] * len(row) for row in rows])), GONE),
    "unsorted rows": (rewrite(lambda table: table.take(list(range(len(table)))[::-1])), GONE),
    "a row twice": (rewrite(lambda table: table.take([0, *range(len(table))])), GONE),
    "retired, in its place": (retire_in_place, GONE),
    "missing": (lambda out: (out / FIRST).unlink(), [("retired", FIRST)]),
    "a retried one missing": (lambda out: (out / RETRIED).unlink(), [("retired", RETRIED)]),
    "without a line": (
        lambda out: (out / JOURNAL).write_bytes(b"".join((out / JOURNAL).read_bytes().splitlines(keepends=True)[:2])),
        [("journalled", RETRIED)],
    ),
    "without a journal": (lambda out: (out / JOURNAL).unlink(), [("journalled", name) for name in SHARDS]),
    "a damaged line": (break_line(JOURNAL), NEW_LINE),
    "a line in zeros": (
        lambda out: (out / JOURNAL).write_bytes(b"\0" * 99 + b"\n" + (out / JOURNAL).read_bytes().partition(b"\n")[2]),
        NEW_LINE,
    ),
    "a line with other bytes": (edit_line(0, bytes=1), NEW_LINE),
    "a line with another hash": (edit_line(0, sha256="0" * 64), NEW_LINE),
    "a line with another footer": (edit_line(0, footer_sha256="0" * 64), NEW_LINE),
    "a line with other rows": (edit_line(0, rows=5), NEW_LINE),
    "a line with other tokens": (edit_line(0, tokens=0), NEW_LINE),
    "a line with other mask ids": (edit_line(0, mask_ids=-1), NEW_LINE),
    "a line with neither hash": (edit_line(0, sha256="0" * 64, footer_sha256="0" * 64), GONE),
    "a line with another name": (
        edit_line(0, file="part-w0-000007.parquet"),
        [("journalled", FIRST), ("retired", "data/part-w0-000007.parquet")],
    ),
    "a line with the name of the next": (edit_line(0, file="part-w0-000001.parquet"), NEW_LINE),
    "lines with each other's names": (exchange_names_of_lines, EXCHANGED),
    "shards with each other's names": (exchange_shards, EXCHANGED),
    "a shard with the name of another": (
        lambda out: (out / SECOND).rename(out / FIRST),
        [("journalled", FIRST), ("retired", SECOND), ("rewritten", JOURNAL)],
    ),
    "a line with no shard's name": (edit_line(0, file="../passwd"), NEW_LINE),
    "a second line that says something else": (
        lambda out: append(JOURNAL, encode_line(line_of(out / FIRST, tokens=1)))(out),
        [("rewritten", JOURNAL)],
    ),
    "a copied shard": (lambda out: shutil.copy(out / FIRST, out / COPY), [("quarantined", COPY)]),
    "a copy with a line, of a later name": (copy_with_line("x"), [("quarantined", COPY)]),
    "a copy with a line, of an earlier name": (copy_with_line("a"), GONE),
    "a damaged line of failures": (break_line(FAILURES), [("rewritten", FAILURES)]),
    "a failure of nothing planned": (stranger, [("rewritten", FAILURES)]),
}


@pytest.mark.parametrize(("damage", "changes"), DAMAGE.values(), ids=DAMAGE)
def test_repaired(
    copy: Runs,
    rows: dict[Any, dict[str, Any]],
    damage: Callable[[Path], Any],
    changes: list[tuple[str, str]],
) -> None:
    """Clean afterwards, as foreseen, nothing deleted; again there is nothing to do, and a resume makes the rest."""
    damage(copy.out)
    damaged = contents(copy.out)
    foreseen = repair_dataset(copy.out, dry_run=True)
    assert contents(copy.out) == damaged
    repair = repair_dataset(copy.out)
    assert summary(repair) == changes
    assert repair.changes == foreseen.changes
    assert repair.verification == verify_dataset(copy.out)
    assert repair.verification.is_clean, repair.verification
    assert_kept(damaged, copy.out)
    repaired = contents(copy.out)
    assert repair_dataset(copy.out).changes == ()
    assert contents(copy.out) == repaired
    assert all(rows[key] == row for key, row in read_rows(copy.out).items())
    copy(on_bad_row="skip", resume=True, **RETRY)
    assert read_rows(copy.out) == rows
    assert verify_dataset(copy.out).is_clean


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


FAILURES_OF_THE_MACHINE = {
    "disk": OSError(errno.EIO, "Input/output error"),
    "memory": pa.ArrowMemoryError("malloc of size 1 failed"),
    "memory of libzstd": OSError("ZSTD decompression failed: Allocation error : not enough memory"),
    "memory of Python": MemoryError(),
}


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


def test_many_lines_about_one_shard(copy: Runs) -> None:
    """Twenty thousand that differ take no longer than as many of one: all but the right one go."""
    line = line_of(copy.out / FIRST)
    append(JOURNAL, b"".join(encode_line(replace(line, tokens=number)) for number in range(1000, 21_000)))(copy.out)
    started = time.process_time()
    assert summary(repair_dataset(copy.out)) == [("rewritten", JOURNAL)]
    assert time.process_time() - started < 15, "it compares each line with each: a minute"


def test_many_changes_are_counted(copy: Runs) -> None:
    """Twenty of a kind are listed, in JSON and in text."""
    line = line_of(copy.out / FIRST)
    lost = (encode_line(replace(line, file=f"part-lost-{number:06d}.parquet")) for number in range(50))
    append(JOURNAL, b"".join(lost))(copy.out)
    flip(copy.out / SECOND, 1000)
    repair = repair_dataset(copy.out)
    told = repair.to_json()
    assert told["changes_by_action"] == {"quarantined": 1, "retired": 50}
    assert [change["action"] for change in told["changes"]] == ["quarantined", *["retired"] * 20]
    text = list(describe_repair(repair))
    assert sum("taken out of the journal: missing" in line for line in text) == 20
    assert "taken out of the journal: 30 more" in text


def test_interrupted_between_the_new_line_and_the_wrong_one(copy: Runs, rows: dict[Any, dict[str, Any]]) -> None:
    """Both are there: nobody guesses which is right, whoever reads or writes is told to repair, and that works."""
    [right] = [line for line in read_journal(copy.out).committed.values() if line.file == Path(FIRST).name]
    edit_line(0, sha256="0" * 64)(copy.out)
    (copy.out / "journal" / "repair.jsonl").write_bytes(encode_line(right))
    damaged = contents(copy.out)
    told = r"w0\.jsonl:1: part-w0-000000\.parquet has another line, which says something else; `rollgen repair`"
    for attempt in (open_dataset, compact):
        with pytest.raises(DatasetError, match=told):
            attempt(copy.out)
    with pytest.raises(DatasetError, match=told):
        copy(on_bad_row="skip", resume=True, **RETRY)
    assert contents(copy.out) == damaged
    assert summary(repair_dataset(copy.out)) == [("rewritten", JOURNAL)]
    assert_kept(damaged, copy.out)
    copy(on_bad_row="skip", resume=True, **RETRY)
    assert read_rows(copy.out) == rows


def everything_at_once(out: Path) -> None:
    """Something for each step: a broken shard, a missing one, a copy, wrong and damaged lines, also of failures."""
    shutil.copy(out / RETRIED, out / COPY)
    flip(out / FIRST, 1000)
    (out / SECOND).unlink()
    edit_line(2, tokens=0)(out)
    append(JOURNAL, b"garbage\n")(out)
    (out / "journal" / "repair.jsonl").write_bytes(b"garbage\n{torn")
    break_line(FAILURES)(out)


EVERYTHING = [
    ("quarantined", FIRST),
    ("journalled", RETRIED),
    ("quarantined", COPY),
    ("retired", SECOND),
    ("rewritten", "journal/repair.jsonl"),
    ("rewritten", JOURNAL),
    ("rewritten", FAILURES),
]


def check_resume(run: Runs, out: Path, place: Path, rows: dict[Any, dict[str, Any]]) -> None:
    """On a copy of `out`: it makes what is missing, or it is refused."""
    shutil.copytree(out, place / "out")
    shutil.copy(run.prompts, place)
    with suppress(DatasetError):
        Runs(place, run.model)(on_bad_row="skip", resume=True, **RETRY)
        assert read_rows(place / "out") == rows


def test_killed_at_every_step(copy: Runs, tmp_path: Path, rows: dict[Any, dict[str, Any]]) -> None:
    """What is read then is right or refused, nothing is gone, and the next repair does what is left.

    A file that was linked into quarantine/ is not linked there again.
    """
    everything_at_once(copy.out)
    damaged = contents(copy.out)
    undisturbed = Path(shutil.copytree(copy.out, tmp_path / "undisturbed"))
    assert summary(repair_dataset(undisturbed)) == EVERYTHING
    seen = Counter[str]()
    for at in itertools.count(1):
        out = Path(shutil.copytree(copy.out, tmp_path / f"out-{at}"))
        with dying(at) as count, suppress(Killed):
            repair_dataset(out)
        assert_kept(damaged, out)
        try:
            assert all(rows[key] == row for key, row in read_rows(out).items())
            seen["read"] += 1
        except DatasetError:
            seen["refused"] += 1
        if at % 5 == 0:
            check_resume(copy, out, tmp_path / f"resumed-{at}", rows)
        repair = repair_dataset(out)
        assert repair.verification.is_clean
        assert_kept(damaged, out)
        assert contents(out).keys() == contents(undisturbed).keys()
        if count[0] < at:  # it was not killed: that was the last step
            assert repair.changes == ()
            break
    assert set(seen) == {"read", "refused"}
    assert at > 20, "fewer steps than shards, files and directories need"
    shutil.rmtree(copy.out)
    out.rename(copy.out)
    copy(on_bad_row="skip", resume=True, **RETRY)
    assert read_rows(copy.out) == rows


def test_names_are_not_used_again(copy: Runs) -> None:
    """Not those of shards that went, nor those that only a wrong line knew."""
    everything_at_once(copy.out)
    edit_line(0, file="part-w0-000007.parquet")(copy.out)
    repair_dataset(copy.out)
    with WriterSlot(copy.out, "w0") as slot:
        assert slot.temporary().name == ".tmp-w0-000008"


def test_quarantine_takes_no_name_twice(copy: Runs) -> None:
    """What is there already stays, whoever put it there: a later file gets a number."""
    for content in ("first", "second"):
        append(JOURNAL, b"garbage\n")(copy.out)
        (copy.out / COPY).write_text(content)
        repair_dataset(copy.out)
        (copy.out / "journal" / "repair.jsonl").unlink()
    names = {path.name for path in (copy.out / "quarantine").iterdir()}
    assert names == {
        "part-x-000000.parquet",
        "part-x-000000.1.parquet",
        "journal-w0.jsonl",
        "journal-w0.1.jsonl",
    }
    assert (copy.out / "quarantine" / "part-x-000000.parquet").read_text() == "first"


def test_lines_stay_as_they_are(copy: Runs) -> None:
    """Keys of a later version too; a torn last line is in the old file only."""
    edit_line(1, later="é")(copy.out)
    append(JOURNAL, b"garbage\n")(copy.out)
    append(JOURNAL, b"{torn")(copy.out)
    old = (copy.out / JOURNAL).read_bytes()
    repair_dataset(copy.out)
    assert (copy.out / JOURNAL).read_bytes() == old.removesuffix(b"garbage\n{torn")
    assert (copy.out / "quarantine" / "journal-w0.jsonl").read_bytes() == old


def test_a_damaged_retirement(copy: Runs) -> None:
    """Of shards that were replaced: they are missing now, and retired again. Nothing is owed."""
    compact(copy.out)
    journal = copy.out / "journal" / "compact.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"retired": true', b'"retired": trve', 2))
    repair = repair_dataset(copy.out)
    assert summary(repair) == [("retired", FIRST), ("retired", SECOND), ("rewritten", "journal/compact.jsonl")]
    assert repair.verification.is_clean
    assert repair.verification.samples.owed == 0


def test_a_retirement_of_the_wrong_shard(copy: Runs, rows: dict[Any, dict[str, Any]]) -> None:
    """One digit of its name: it contradicts the commit of a shard that is there, and that shard stays."""
    (copy.out / FIRST).unlink()
    retired = replace(read_journal(copy.out).committed[Path(FIRST).name], retired=True)
    append(JOURNAL, encode_line(replace(retired, file=Path(SECOND).name)))(copy.out)
    repair = repair_dataset(copy.out)
    assert summary(repair) == [("retired", FIRST), ("rewritten", JOURNAL)]
    assert repair.verification.is_clean
    assert read_rows(copy.out).keys() == {key for key in rows if key[0] in {"p2", "p3"} or key[2] == 1}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(("writer", "part"), [("w0", Part(0, 1)), ("w3", Part(3, 4)), ("repair", Part(0, 1))])
def test_live_writers_exclude_it(copy: Runs, writer: str, part: Part, dry_run: bool) -> None:
    """Whatever part they make; another repair too."""
    with WriterSlot(copy.out, writer, part):
        everything_at_once(copy.out)
        before = contents(copy.out)
        with pytest.raises(ResumeRefused, match=r"writing this dataset|is alive"):
            repair_dataset(copy.out, dry_run=dry_run)
        assert contents(copy.out) == before


@pytest.mark.parametrize("room", [0, 600])
def test_no_room(copy: Runs, room: int) -> None:
    """For the lock, or for a journal: the error names the file, nothing is lost, and with room it is repaired."""
    everything_at_once(copy.out)
    before = contents(copy.out)
    with largest_file(room), pytest.raises((UsageError, DatasetError), match=r"cannot be (read or )?written: File too"):
        repair_dataset(copy.out)
    assert_kept(before, copy.out)
    assert not list(copy.out.rglob(".tmp-*"))
    assert repair_dataset(copy.out).verification.is_clean


def test_quarantine_is_in_the_way(copy: Runs) -> None:
    """A file of that name: the error names it, and the shard is out of the journal but where it was."""
    flip(copy.out / FIRST, 1000)
    (copy.out / "quarantine").touch()
    with pytest.raises(DatasetError, match=r"quarantine: cannot be read or written: File exists; nothing is lost"):
        repair_dataset(copy.out)
    (copy.out / "quarantine").unlink()
    assert summary(repair_dataset(copy.out)) == GONE


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


def test_one_of_two_copies_of_each_other_stays(copy: Runs) -> None:
    """Three of the same content: two go."""
    for number in range(2):
        shutil.copy(copy.out / FIRST, copy.out / f"data/part-x-{number:06d}.parquet")
    repair = repair_dataset(copy.out)
    assert summary(repair) == [("quarantined", f"data/part-x-{number:06d}.parquet") for number in range(2)]


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
