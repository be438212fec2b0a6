"""Every kind of damage, repaired: nothing deleted, nothing wrong left, every sample there once after a resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.damage import (
    COPY,
    FAILURES,
    FIRST,
    GONE,
    JOURNAL,
    RETRIED,
    RETRY,
    SECOND,
    SHARDS,
    append,
    break_line,
    edit_line,
    flip,
    line_of,
    rewrite,
    summary,
    with_column,
)
from models.datasets import read_rows
from models.deaths import assert_kept, contents
from models.runs import Runs

from rollgen.curate.compact import compact
from rollgen.format.journal import JournalLine, read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.verify.dataset import verify_dataset
from rollgen.verify.repair import repair_dataset
from rollgen.verify.terminal import describe_repair


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


def test_many_lines_about_one_shard(copy: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twenty thousand that differ, each is compared with a few, and not with all: all but the right one go."""
    compared, real = 0, JournalLine.__eq__

    def equal(line: JournalLine, other: object) -> bool:
        nonlocal compared
        compared += 1
        return real(line, other)

    line = line_of(copy.out / FIRST)
    append(JOURNAL, b"".join(encode_line(replace(line, tokens=number)) for number in range(1000, 21_000)))(copy.out)
    monkeypatch.setattr(JournalLine, "__eq__", equal)
    assert summary(repair_dataset(copy.out)) == [("rewritten", JOURNAL)]
    assert 20_000 <= compared < 400_000


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


def test_one_of_two_copies_of_each_other_stays(copy: Runs) -> None:
    """Three of the same content: two go."""
    for number in range(2):
        shutil.copy(copy.out / FIRST, copy.out / f"data/part-x-{number:06d}.parquet")
    repair = repair_dataset(copy.out)
    assert summary(repair) == [("quarantined", f"data/part-x-{number:06d}.parquet") for number in range(2)]
