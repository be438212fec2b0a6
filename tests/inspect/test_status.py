"""How a run stands, live or not, from its own records."""

from __future__ import annotations

import io
import json
import os
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.fake_engine import FakeEngine
from models.runs import Runs
from models.times import begin, set_times
from rich.console import Console

from rollgen.engines.base import SampleRequest
from rollgen.errors import DatasetError, EngineError
from rollgen.format.commit import WriterSlot, quarantine
from rollgen.format.failures import FailureLog
from rollgen.format.journal import JournalLine, list_shards
from rollgen.format.manifest import read_manifest, replace_manifest
from rollgen.format.replacement import COMPACTOR
from rollgen.format.schema import JOURNAL_DIR, PLAN_FILE
from rollgen.inspect.status import Division, RunStatus, run_status
from rollgen.inspect.status_view import render_status


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Content and modification time of every file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_run_that_stopped(make_dataset: Callable[..., Any]) -> None:
    """12 prompts of 4 samples and a skipped row of 5 are planned, 3 samples of each prompt are stored."""
    directory, completions = make_dataset(0)
    before = snapshot(directory)
    status = run_status(directory)
    assert (status.state, status.planned, status.skipped, status.stored) == ("stopped", 53, 5, 36)
    assert (status.owed, status.failed, status.retries) == (12, 0, 0)  # 53 - 5 - 36
    assert status.tokens == sum(len(completion.token_ids) for completion in completions)
    assert status.bytes == sum(path.stat().st_size for path in list_shards(directory))
    assert (status.attempts, status.started_at) == (1, "2026-01-02T03:04:05+00:00")
    (writer,) = status.writers
    assert (writer.name, writer.alive, writer.shards, writer.samples) == ("w0", False, 3, 36)
    assert (writer.tokens, writer.bytes) == (status.tokens, status.bytes)
    assert snapshot(directory) == before


def test_a_live_run(make_dataset: Callable[..., Any]) -> None:
    """A writer whose lock is held is alive; looking does not take its lock away."""
    directory, _ = make_dataset(0)
    with WriterSlot(directory, "w0"):
        begin(directory)
        status = run_status(directory)
        assert (status.state, [writer.alive for writer in status.writers]) == ("running", [True])
        assert run_status(directory).state == "running"
    assert run_status(directory).state == "stopped"


def test_before_the_manifest(tmp_path: Path) -> None:
    """A run that checks prompts or loads its model has a lock and nothing else."""
    with WriterSlot(tmp_path, "w0"):
        status = run_status(tmp_path)
    assert (status.state, status.planned, status.owed, status.stored) == ("starting", None, None, 0)
    assert [(writer.name, writer.alive, writer.last_commit) for writer in status.writers] == [("w0", True, None)]
    with pytest.raises(DatasetError, match=r"rollgen\.json: not found"):
        run_status(tmp_path)


def test_before_the_first_commit(empty_dataset: Path) -> None:
    """Everything is owed, nobody has written, and no rate is made up."""
    status = run_status(empty_dataset)
    assert (status.state, status.planned, status.owed, status.stored) == ("stopped", 12 * 2 + 5, 24, 0)
    assert (status.writers, status.tokens_per_second, status.seconds_left) == ((), None, None)


def test_a_lost_plan(make_dataset: Callable[..., Any]) -> None:
    """What is owed cannot be told: that is said, and not that nothing is."""
    directory, _ = make_dataset(0)
    (directory / PLAN_FILE).unlink()
    with pytest.raises(DatasetError, match=r"plan\.parquet: missing"):
        run_status(directory)


def test_a_cut_shard_is_lost(make_dataset: Callable[..., Any]) -> None:
    """Its size is not the journal's: its samples are not counted as stored."""
    directory, _ = make_dataset(0)
    shard = min((directory / "data").glob("part-*.parquet"))
    os.truncate(shard, shard.stat().st_size - 1)
    status = run_status(directory)
    assert status.lost == (shard.name,)
    assert status.stored < 36


def test_complete(make_dataset: Callable[..., Any], make_completion: Callable[..., Any], commit: Any) -> None:
    """The twelve that were owed arrive, by another writer."""
    directory, _ = make_dataset(0)
    commit(directory, [make_completion(index, 3) for index in range(12)], "w1")
    status = run_status(directory)
    assert (status.state, status.owed, status.stored) == ("complete", 0, 48)
    assert [(writer.name, writer.shards, writer.samples) for writer in status.writers] == [("w0", 3, 36), ("w1", 1, 12)]


def test_more_rows_than_planned(make_dataset: Callable[..., Any], commit: Callable[..., None]) -> None:
    """Two shards twice, of 48 rows that were planned: nothing is owed, and it is not complete."""
    directory, completions = make_dataset(0)
    commit(directory, completions[:24], "w1")
    status = run_status(directory)
    assert (status.state, status.stored, status.owed, status.surplus) == ("stopped", 60, 0, 12)
    assert "12 rows more than planned: run `rollgen verify`" in shown(status)


def test_lost_shards_are_not_complete(
    make_dataset: Callable[..., Any], make_completion: Callable[..., Any], commit: Callable[..., None]
) -> None:
    """As many rows as planned, and a file that nobody can read."""
    directory, _ = make_dataset(0)
    commit(directory, [make_completion(index, 3) for index in range(12)])
    (directory / "data" / "part-w0-000009.parquet").write_bytes(b"PAR1")
    status = run_status(directory)
    assert (status.state, status.owed, status.lost) == ("stopped", 0, ("part-w0-000009.parquet",))
    assert "1 shard missing or not readable" in shown(status)


def test_failures(make_dataset: Callable[..., Any], make_completion: Callable[..., Any], commit: Any) -> None:
    """Failed are samples with a failure line that are not stored; the latest stage counts, skipped rows do not."""
    directory, _ = make_dataset(0)
    log = FailureLog(directory, "w0")
    log.record("p0", 0, 0, "engine", "stored after all")
    log.record("p0", 0, 3, "engine", "first")
    log.record("p0", 0, 3, "capture", "then")
    log.record("p7", 7, 3, "engine", "once")
    log.record("bad", 12, 0, "input", "a skipped row")
    status = run_status(directory)
    assert (status.failed, status.failed_by_stage) == (2, {"capture": 1, "engine": 1})
    commit(directory, [make_completion(7, 3)])
    assert run_status(directory).failed_by_stage == {"capture": 1}


def test_failures_beside_a_damaged_shard(make_dataset: Callable[..., Any]) -> None:
    """What cannot be read is made again, so that its failed samples count; looking goes on."""
    directory, _ = make_dataset(0)
    log = FailureLog(directory, "w0")
    log.record("p0", 0, 0, "engine", "stored after all")
    log.record("p4", 4, 0, "engine", "stored, and damaged since")
    shard = list_shards(directory)[1]
    content = bytearray(shard.read_bytes())
    content[60] ^= 1  # in the first page of the first column: prompt_id
    shard.write_bytes(content)
    assert run_status(directory).failed == 1


def test_retries_are_owed_too(make_again: Callable[..., Any]) -> None:
    """Two samples were to be made again, one was: 53 - 5 + 2 - 37 are owed."""
    status = run_status(make_again().directory)
    assert (status.retries, status.stored, status.owed) == (2, 37, 13)


def test_a_shard_without_its_line(make_dataset: Callable[..., Any]) -> None:
    """A commit just before its journal line counts as soon as it can be read, and is lost if it cannot."""
    directory, _ = make_dataset(0)
    whole = run_status(directory)
    journal = directory / JOURNAL_DIR / "w0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))
    status = run_status(directory)
    assert (status.stored, status.tokens, status.bytes) == (whole.stored, whole.tokens, whole.bytes)
    list_shards(directory)[-1].write_bytes(b"PAR1")
    status = run_status(directory)
    assert (status.stored, status.owed, status.lost) == (24, 24, ("part-w0-000002.parquet",))


def test_shards_that_are_gone(make_dataset: Callable[..., Any]) -> None:
    """A missing one is lost, a quarantined one set aside; neither counts, as `--resume` makes their samples again."""
    directory, _ = make_dataset(0)
    first, second, _ = list_shards(directory)
    first.unlink()
    with WriterSlot(directory, "w0") as slot:
        line = json.loads((directory / JOURNAL_DIR / "w0.jsonl").read_text().splitlines()[1])
        slot.retire(JournalLine(**line))
        quarantine(directory, second)
    status = run_status(directory)
    assert (status.lost, status.quarantined) == ((first.name,), (second.name,))
    assert (status.stored, status.owed) == (12, 36)


def test_a_continued_run_that_has_not_begun(make_dataset: Callable[..., Any]) -> None:
    """While it loads its model, speed and time left would be those of the attempt before: neither is shown."""
    directory, _ = make_dataset(0)
    set_times(directory, [10, 30, 50])
    with WriterSlot(directory, "w0"):  # whose lock is younger than the manifest
        status = run_status(directory)
        assert (status.state, status.stored, status.owed) == ("starting", 36, 12)
        assert (status.tokens_per_second, status.seconds_left) == (None, None)


def test_a_run_from_its_start_to_its_end(runs: Runs) -> None:
    """As it loads for the first time, samples, has ended, loads for more, and samples again."""
    seen: list[tuple[str, int | None]] = []

    def look() -> None:
        status = run_status(runs.out)
        seen.append((status.state, status.owed))

    class Looking(FakeEngine):
        async def start(self) -> None:
            look()

    async def before(request: SampleRequest) -> None:
        if not runs.engine.asked[1:]:
            look()

    runs(Looking(before=before))
    look()
    runs(Looking(before=before), n=3, resume=True)
    assert seen == [("starting", None), ("running", 10), ("complete", 0), ("starting", 0), ("running", 5)]


def test_compaction_is_no_start(make_dataset: Callable[..., Any]) -> None:
    """It has a lock and adds no attempt."""
    directory, _ = make_dataset(0)
    with WriterSlot(directory, COMPACTOR):
        assert run_status(directory).state == "running"


def test_a_job_array(runs: Runs) -> None:
    """Two of four parts, one of which died before its first commit and was started again: who began when, and who not.

    The start that is shown is the first one, and stays that; a task without a commit is listed.
    """

    async def dies(request: SampleRequest) -> None:
        raise EngineError("dead")

    runs(shard="0/4", resume=True)
    before = run_status(runs.out)
    for _ in range(2):
        with pytest.raises(EngineError):
            runs(FakeEngine(before=dies), shard="2/4", resume=True, max_restarts=0)
    status = run_status(runs.out)
    assert before.division is not None
    assert status.division == replace(before.division, started=(0, 2), attempts=3)
    assert [(writer.name, writer.samples, writer.last_commit is None) for writer in status.writers] == [
        ("s0of4", 4, False),
        ("s2of4", 0, True),
    ]
    output = shown(status)
    assert "· 2 of 4 parts · 3 starts\n" in re.sub(" +\n", "\n", output)
    assert "not begun: parts 1, 3" in output
    assert re.search("s2of4 +no .*none yet", output)
    runs(resume=True)
    assert run_status(runs.out).division is None


def test_what_slurm_means_is_recorded(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of parts is known to whoever looks later."""
    for name, value in {"TASK_ID": 5, "TASK_MIN": 4, "TASK_MAX": 6, "TASK_STEP": 1, "TASK_COUNT": 3}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", str(value))
    runs(shard="slurm", resume=True)
    assert run_status(runs.out).division == Division(3, (1,), 1, read_manifest(runs.out).attempts[0].started_at)


def test_times_that_are_none(make_dataset: Callable[..., Any]) -> None:
    """A record that was written by somebody else is shown as it is."""
    status = run_status(make_dataset(0).directory)
    for text in ("yesterday", "0001-01-01T00:00:00+23:00"):
        assert f"Started  {text} · attempt 1" in shown(replace(status, started_at=text))


def test_json(make_dataset: Callable[..., Any]) -> None:
    """Plain finite values, names of the class."""
    status = run_status(make_dataset(0).directory)
    shown = json.loads(json.dumps(status.to_json(), allow_nan=False))
    assert shown.keys() == set(RunStatus.__slots__)
    assert shown["writers"][0]["name"] == "w0"


def shown(status: RunStatus, name: str = "data", width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    render_status(name, status, console)
    return console.file.getvalue()


def test_view(make_dataset: Callable[..., Any]) -> None:
    """What there is, what is missing, who is at it."""
    directory, _ = make_dataset(0)
    set_times(directory, [10, 30, 50])
    with WriterSlot(directory, "w0"):
        begin(directory)
        status = replace(
            run_status(directory), failed=1, failed_by_stage={"engine": 1}, lost=("a", "b", "c", "d"), retries=2
        )
    output = shown(status, width=120)
    for text in (
        "data · running",
        "36 of 50 rows (72.0%) · 2 of these are retries",
        "1, owed again · engine 1",
        "5 of bad input rows",
        "2026-01-02 03:04:05 UTC · attempt 1",
        "tokens/s at the last commits",
        "about 0:00:17",
        "4 shards missing or not readable: --resume makes what they held again · a · b · c · and 1 more",
        "w0      yes         3       36",
        "2026-01-02 03:04:55 UTC",
    ):
        assert text in output


def test_tasks_of_a_cluster_are_one_row(make_dataset: Callable[..., Any]) -> None:
    """With their counts, the latest commit, and whether their driver lives, who has no row unless it has shards."""
    status = run_status(make_dataset(0).directory)
    [whole] = status.writers
    tasks = tuple(
        replace(whole, name=f"r{number:016x}", last_commit=f"2026-01-02T03:04:5{number}+00:00") for number in range(3)
    )
    driver = replace(whole, alive=True, shards=0)
    output = shown(replace(status, writers=(*tasks, driver)), width=80)
    [row] = [row for row in output.splitlines() if "Ray tasks" in row]
    assert row.split()[:6] == ["Ray", "tasks:", "3", "yes", "9", "108"]  # 3 shards and 36 samples each
    assert row.rstrip().endswith("2026-01-02 03:04:52 UTC")
    assert "w0" not in output
    output = shown(replace(status, writers=(*tasks, replace(whole, alive=False))))
    assert re.search(r"^w0 +no +3 ", output, re.MULTILINE)
    assert "Ray tasks: 3  no " in output


def test_view_of_almost_nothing(tmp_path: Path, empty_dataset: Path, make_dataset: Callable[..., Any]) -> None:
    """Before the manifest, before the first commit, without a plan."""
    with WriterSlot(tmp_path / "new", "w0"):
        assert "none yet" in shown(run_status(tmp_path / "new"))
    assert "0 of 24 samples (0.0%)" in shown(run_status(empty_dataset))
    status = replace(run_status(make_dataset(0).directory), planned=None, skipped=None, owed=None)
    assert "36 samples · no plan: nothing is owed" in shown(status)


def test_view_of_a_stopped_run(make_dataset: Callable[..., Any]) -> None:
    """The next step, and none where nothing is owed."""
    status = run_status(make_dataset(0).directory)
    assert "Owed     12 · --resume continues" in shown(status)
    assert "--resume" not in shown(replace(status, owed=0, state="complete"))


def test_view_is_inert(make_dataset: Callable[..., Any]) -> None:
    """Names and times come from files."""
    hostile = "\x1b[2J\u202e[red]x[/red]"
    status = run_status(make_dataset(0).directory)
    writer = replace(status.writers[0], name=hostile)
    names = {"lost": (hostile,), "quarantined": (hostile,), "started_at": hostile, "failed_by_stage": {hostile: 1}}
    status = replace(status, writers=(writer,), failed=1, **names)
    output = shown(status, hostile, width=300)
    assert {c for c in output if unicodedata.category(c) in {"Cc", "Cf"}} == {"\n"}
    assert output.count("[red]x[/red]") == 6


def test_many_writers_are_bounded(make_dataset: Callable[..., Any]) -> None:
    """Fifty rows, the living first, and how many more there are."""
    status = run_status(make_dataset(0).directory)
    writers = tuple(replace(status.writers[0], name=f"w{index}", alive=index == 59) for index in range(60))
    output = shown(replace(status, writers=writers))
    assert "and 10 more" in output
    assert [line.split()[:2] for line in output.splitlines() if line.startswith("w59")] == [["w59", "yes"]]
    assert "w55 " not in output


def test_without_attempts(make_dataset: Callable[..., Any]) -> None:
    """A manifest that records none has no start to measure from."""
    directory, _ = make_dataset(0)
    replace_manifest(directory, read_manifest(directory).model_copy(update={"attempts": []}))
    status = run_status(directory)
    assert (status.attempts, status.started_at, status.tokens_per_second) == (0, None, None)
