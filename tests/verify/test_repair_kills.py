"""A repair that is killed, has no room or is not alone: nothing is lost, and the next one does what is left."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from models.damage import (
    COPY,
    EVERYTHING,
    FIRST,
    GONE,
    JOURNAL,
    RETRY,
    append,
    edit_line,
    everything_at_once,
    flip,
    summary,
)
from models.datasets import read_rows
from models.deaths import Killed, assert_kept, contents, dying
from models.disk import largest_file
from models.runs import Runs

from rollgen.curate.compact import compact
from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import Part, WriterSlot
from rollgen.format.journal import read_journal
from rollgen.format.jsonlines import encode_line
from rollgen.format.reader import open_dataset
from rollgen.verify.repair import repair_dataset


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
