"""The loop, with a fake engine on real asyncio: every planned sample is stored once, whatever happens on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from models.fake_engine import FakeEngine, Key, fake_completion
from models.runs import Runs, keys

from rollgen.engines.base import RequestError, SampleRequest
from rollgen.errors import CaptureError, DatasetError, EngineError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.failures import FailureLog, read_failures
from rollgen.format.journal import list_shards
from rollgen.format.manifest import read_manifest
from rollgen.format.reader import open_dataset, verify_shard
from rollgen.format.schema import PLAN_FILE
from rollgen.loop.report import RunStats
from rollgen.prompts.plan import Plan

TESTS = Path(__file__).parents[1]


def content(directory: Path) -> dict[Path, bytes]:
    """Of all files but the locks, which name the last attempt."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"}


def raising(faults: dict[Key, Exception], *, broken: frozenset[Key] = frozenset()) -> FakeEngine:
    """An engine that fails these requests, and makes invalid completions of `broken`."""

    async def before(request: SampleRequest) -> None:
        await asyncio.sleep(0)
        if error := faults.get((request.prompt.prompt_index, request.sample_index)):
            raise error

    return FakeEngine(before=before, broken=broken)


def test_every_sample_is_stored_once(runs: Runs) -> None:
    """5 prompts of 2 samples: 10 rows, sorted, in one shard, with a manifest, a plan and a tokenizer beside it."""
    stats = runs()
    assert runs.stored() == keys(5, 2)
    assert sorted(runs.engine.asked) == keys(5, 2)
    assert (stats.planned, stats.stored, stats.failed, stats.owed, stats.exit_code) == (10, 10, 0, 0, 0)
    assert sorted(path.name for path in runs.out.iterdir()) == [
        "data",
        "failures",
        "journal",
        "logs",
        "plan.parquet",
        "rollgen.json",
        "tokenizer",
    ]
    assert runs.engine.closed == 1
    for shard in open_dataset(runs.out).shards:
        verify_shard(shard.path, line=shard.line)


def test_rows_are_what_the_engine_made(runs: Runs) -> None:
    """Each row against the completion made once more from the plan: seed, ids, support, texts."""
    runs()
    [path] = list_shards(runs.out)
    rows = {(row["prompt_index"], row["sample_index"]): row for row in pq.read_table(path).to_pylist()}
    for prompt in Plan(runs.out / PLAN_FILE):
        for sample_index in range(2):
            expected, row = (
                fake_completion(SampleRequest(prompt, sample_index)),
                rows[prompt.prompt_index, sample_index],
            )
            assert (row["prompt_id"], row["prompt"]) == (f"p{prompt.prompt_index}", f"Prompt {prompt.prompt_index}")
            assert row["prompt_token_ids"] == prompt.token_ids.tolist()
            assert row["token_ids"] == expected.token_ids.tolist()
            assert row["sampling_mask"] == expected.mask_ids.reshape(-1, 2).tolist()
            assert (row["seed"], row["text"]) == (expected.seed, expected.text)


def test_totals(runs: Runs) -> None:
    """Counted once more from the shard: a support is a pair, so there are two mask ids a token."""
    stats = runs()
    table = pq.read_table(runs.out / "data")
    tokens = sum(table["response_length"].to_pylist())
    assert stats.tokens == tokens
    assert (stats.mask_ids, stats.masked_tokens, stats.mean_support) == (2 * tokens, tokens, 2.0)
    assert stats.length_finishes == table["finish_reason"].to_pylist().count("length")
    assert stats.tokens_per_second == tokens / stats.seconds > 0


def test_untruncated_run_has_no_supports(runs: Runs) -> None:
    """The control run: null masks, no mean."""
    stats = runs(FakeEngine(capture="none"), top_k=0, top_p=1.0)
    assert (stats.mask_ids, stats.masked_tokens, stats.mean_support) == (0, 0, 0.0)
    assert all(mask is None for row in pq.read_table(runs.out / "data")["sampling_mask"].to_pylist() for mask in row)


def test_reporter_is_told_everything(runs: Runs) -> None:
    """The phases in order, one start, and totals at the end."""
    stats = runs()
    assert runs.reporter.phases == ["check", "load", "generate"]
    assert runs.reporter.starts == [runs.out]
    assert runs.reporter.last is stats
    assert runs.reporter.notes == []


def test_failures_of_each_stage_are_recorded_and_owed(runs: Runs) -> None:
    """Three samples fail in three ways; the others are stored; --resume makes exactly these three."""
    faults = {(0, 1): RequestError("too long"), (2, 0): CaptureError("no mask")}
    stats = runs(raising(faults, broken=frozenset({(4, 1)})))
    missing = [(0, 1), (2, 0), (4, 1)]
    assert (stats.stored, stats.failed, stats.owed, stats.exit_code) == (7, 3, 3, 3)
    assert runs.stored() == [key for key in keys(5, 2) if key not in missing]
    failures = {(f.prompt_index, f.sample_index): f for f in read_failures(runs.out)}
    assert {key: (f.prompt_id, f.stage) for key, f in failures.items()} == {
        (0, 1): ("p0", "engine"),
        (2, 0): ("p2", "capture"),
        (4, 1): ("p4", "invariant"),
    }
    assert failures[0, 1].error == "too long"
    assert "is not in its support" in failures[4, 1].error
    stats = runs(resume=True)
    assert sorted(runs.engine.asked) == missing
    assert (stats.stored_before, stats.stored, stats.owed, stats.exit_code) == (7, 3, 0, 0)
    assert sorted(runs.stored()) == keys(5, 2)


def test_nothing_owed_loads_no_engine(runs: Runs) -> None:
    """A finished run is confirmed, not made again."""
    runs()
    before = read_manifest(runs.out)
    stats = runs(resume=True)
    assert runs.engine.asked == []
    assert runs.engine.closed == 0
    assert (stats.stored_before, stats.stored, stats.exit_code) == (10, 0, 0)
    assert runs.reporter.phases == ["check"]
    assert runs.reporter.notes == ["nothing is owed: every planned sample is stored"]
    assert read_manifest(runs.out) == before
    assert not list(runs.out.glob(".tmp-*"))


def test_growth_of_n_and_prompts(runs: Runs) -> None:
    """From 5 prompts of 2 to 7 of 3: only what is new is made, and the plan and the manifest say so."""
    runs()
    runs.write_prompts(7)
    stats = runs(resume=True, n=3)
    assert sorted(runs.engine.asked) == [key for key in keys(7, 3) if key not in keys(5, 2)]
    assert sorted(runs.stored()) == keys(7, 3)
    assert (stats.planned, stats.stored_before, stats.stored) == (21, 10, 11)
    assert Plan(runs.out / PLAN_FILE).samples == 21
    assert [attempt.n for attempt in read_manifest(runs.out).attempts] == [2, 3]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"temperature": 0.5}, r"temperature \(1\.0 -> 0\.5\)"),
        ({"seed": 7, "top_p": 0.5}, r"seed \(0 -> 7\), top_p \(0\.95 -> 0\.5\)"),
        ({"n": 1}, "planned with 2 samples, now with 1"),
        ({"limit": 3}, "planned with 5 prompts, now there are 3"),
        ({"capture": "native"}, r'capture \("logprobs" -> "native"\)'),
    ],
)
def test_another_run_is_not_continued(runs: Runs, change: dict[str, Any], expected: str) -> None:
    """Refused with the keys named, before an engine is made; nothing on disk changes."""
    runs()
    before = content(runs.out)
    with pytest.raises(ResumeRefused, match=expected):
        runs(resume=True, **change)
    assert runs.engine.asked == []
    assert content(runs.out) == before


def test_another_dtype_is_not_continued(runs: Runs) -> None:
    """`auto` may resolve differently on another device; the numbers would differ."""
    runs(raising({(0, 0): RequestError("once")}))
    with pytest.raises(ResumeRefused, match="sampled in bfloat16, here dtype is float16; pass --dtype bfloat16"):
        runs(FakeEngine(dtype="float16"), resume=True)
    assert len(runs.stored()) == 9
    assert runs(resume=True, dtype="bfloat16").exit_code == 0


def test_a_changed_prompt_is_not_continued(runs: Runs) -> None:
    """The row is named; a run with two meanings of p1 is no run."""
    runs()
    runs.prompts.write_text(runs.prompts.read_text().replace("Prompt 1", "Prompt one"))
    with pytest.raises(ResumeRefused, match=r"row 1 of the plan \(id 'p1'\) has another"):
        runs(resume=True)


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_a_lost_plan_is_made_again_from_the_same_prompts(runs: Runs, damage: str) -> None:
    """The manifest knows its hash: the same prompts give the same file, and others do not pass for them."""
    runs(FakeEngine(broken=frozenset({(1, 0)})))
    path = runs.out / PLAN_FILE
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-9])
    else:
        path.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(DatasetError, match=r"plan\.parquet: .*--resume with the very command of the last start"):
        runs(resume=True, n=3)
    stats = runs(resume=True)
    assert (stats.stored_before, stats.stored) == (9, 1)
    assert path.read_bytes() == content
    assert sorted(runs.stored()) == keys(5, 2)


def test_a_run_is_not_overwritten(runs: Runs) -> None:
    """Neither flag: refused, naming both; both flags: refused; nothing is touched."""
    runs()
    with pytest.raises(UsageError, match="continue it with --resume, replace it with --clean"):
        runs()
    with pytest.raises(UsageError, match="exclude each other"):
        runs(resume=True, clean=True)
    assert runs.stored() == keys(5, 2)


def test_clean_replaces_a_run(runs: Runs) -> None:
    """Another configuration, other prompts: nothing of the old run is left, failures and quarantine included."""
    runs(raising({(0, 0): RequestError("once")}))
    (runs.out / "quarantine").mkdir()
    runs.write_prompts(3)
    runs(clean=True, temperature=0.5, n=1)
    assert runs.stored() == keys(3, 1)
    manifest = read_manifest(runs.out)
    assert manifest.identity["temperature"] == 0.5
    assert len(manifest.attempts) == 1
    assert list(read_failures(runs.out)) == []
    assert not (runs.out / "quarantine").exists()
    assert [shard.line is not None for shard in open_dataset(runs.out).shards] == [True]


@pytest.mark.parametrize("name", ["replacement.json", "w0.jsonl"])
def test_clean_starts_over_from_damage(runs: Runs, name: str) -> None:
    """Which is what it is for: a record or a journal that stops everything else is not read."""
    runs()
    (runs.out / "journal" / name).write_text("damaged\n")
    with pytest.raises(DatasetError, match=rf"journal/{name}.*damaged"):
        runs(resume=True)
    runs(clean=True)
    assert runs.stored() == keys(5, 2)
    assert not (runs.out / "journal" / "replacement.json").exists()


def test_clean_waits_until_all_checks_have_passed(runs: Runs) -> None:
    """A bad prompt or an engine that does not start costs nothing of the old run."""
    runs()
    before = content(runs.out)
    with pytest.raises(EngineError, match="no memory"):
        runs(FakeEngine(start_error=EngineError("no memory")), clean=True)
    runs.write_prompts(3, bad=[1])
    with pytest.raises(UsageError, match=r"prompts\.jsonl:2: "):
        runs(clean=True)
    assert content(runs.out) == before


def test_resume_starts_where_there_is_no_run(runs: Runs) -> None:
    """So that one command can be repeated until it is done."""
    assert runs(resume=True).stored == 10
    assert runs(resume=True).stored_before == 10


def test_tombstones_are_recorded_once_and_never_made(runs: Runs) -> None:
    """Row 1 of 4 has no prompt: its two samples are planned, not owed, and the run says 3."""
    runs.write_prompts(4, bad=[1])
    stats = runs(on_bad_row="skip")
    assert runs.stored() == [key for key in keys(4, 2) if key[0] != 1]
    assert (stats.planned, stats.tombstones, stats.owed, stats.exit_code) == (8, 2, 0, 3)
    [failure] = read_failures(runs.out)
    assert (failure.prompt_id, failure.prompt_index, failure.stage) == ("p1", 1, "input")
    assert failure.error.startswith("prompts.jsonl:2: no prompt")
    runs.write_prompts(6, bad=[1, 4])
    runs(on_bad_row="skip", resume=True)
    assert runs.engine.asked == [(5, 0), (5, 1)]
    assert [failure.prompt_id for failure in read_failures(runs.out)] == ["p1", "p4"]


def test_new_tombstones_are_recorded_also_when_nothing_is_owed(runs: Runs) -> None:
    """A row was added and it is bad: nothing to make, but nothing missing in silence."""
    runs(on_bad_row="skip")
    runs.write_prompts(6, bad=[5])
    stats = runs(on_bad_row="skip", resume=True)
    assert (stats.planned, stats.tombstones, stats.owed, stats.exit_code) == (12, 2, 0, 3)
    assert [failure.prompt_id for failure in read_failures(runs.out)] == ["p5"]
    runs(on_bad_row="skip", resume=True)
    assert [failure.prompt_id for failure in read_failures(runs.out)] == ["p5"]


def test_tombstones_of_a_start_that_was_cut_short(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second of three lines, when the manifest is there: the next start writes what lacks."""
    record, fails = FailureLog.record, iter([False, True])

    def recorded(log: FailureLog, *values: Any, **more: Any) -> None:
        if next(fails):
            raise DatasetError("no room")
        record(log, *values, **more)

    runs.write_prompts(6, bad=[1, 3, 4])
    with monkeypatch.context() as patched:
        patched.setattr(FailureLog, "record", recorded)
        with pytest.raises(DatasetError, match="no room"):
            runs(on_bad_row="skip")
    assert skipped(runs) == ["p1"]
    runs(on_bad_row="skip", resume=True)
    assert skipped(runs) == ["p1", "p3", "p4"]
    runs(on_bad_row="skip", resume=True)
    assert skipped(runs) == ["p1", "p3", "p4"]


def skipped(runs: Runs) -> list[str]:
    assert all(failure.stage == "input" for failure in read_failures(runs.out))
    return [failure.prompt_id for failure in read_failures(runs.out)]


@pytest.mark.parametrize("ruin", [b"", b"{}\n", b"\x00\n"], ids=["lost", "no such line", "damaged"])
def test_tombstones_whose_lines_are_gone(runs: Runs, ruin: bytes) -> None:
    """They are written again, also when nothing is owed; a damaged line keeps nobody from a start."""
    runs.write_prompts(4, bad=[1])
    runs(on_bad_row="skip")
    path = runs.out / "failures/w0.jsonl"
    path.write_bytes(ruin)
    runs(on_bad_row="skip", resume=True)
    assert path.read_bytes().startswith(ruin)
    path.write_bytes(path.read_bytes().removeprefix(ruin))
    assert skipped(runs) == ["p1"]


def test_each_part_records_its_own_tombstones(runs: Runs) -> None:
    """So that two which start at once do not both record one; a line of another writer counts too."""
    runs.write_prompts(6, bad=[1, 2, 5])
    runs(on_bad_row="skip", shard="1/2")
    assert skipped(runs) == ["p1", "p5"]
    runs(on_bad_row="skip", shard="0/2", resume=True)
    assert skipped(runs) == ["p2", "p1", "p5"]  # s0of2 comes first
    runs(on_bad_row="skip", resume=True)
    assert skipped(runs) == ["p2", "p1", "p5"]


def test_no_usable_prompt(runs: Runs) -> None:
    """Every row skipped: an error, and no directory."""
    runs.write_prompts(2, bad=[0, 1])
    with pytest.raises(UsageError, match="no usable prompt: every row was skipped"):
        runs(on_bad_row="skip")
    assert not runs.out.exists()


def test_a_straggler_blocks_nobody(runs: Runs) -> None:
    """The first request ends only when all others have: with a window of 2, one worker makes them all meanwhile."""
    others = asyncio.Event()
    finished: list[Key] = []

    async def before(request: SampleRequest) -> None:
        key = (request.prompt.prompt_index, request.sample_index)
        if key == (0, 0):
            await others.wait()
        await asyncio.sleep(0)
        finished.append(key)
        if len(finished) == 9:
            others.set()

    runs(FakeEngine(before=before, window=2))
    assert finished[-1] == (0, 0)
    assert runs.stored() == keys(5, 2)


@pytest.mark.parametrize(("window", "expected"), [(1, 1), (3, 3), (100, 10)])
def test_window_is_kept_full_and_respected(runs: Runs, window: int, expected: int) -> None:
    """As many in flight as the engine wants, never more; with 10 samples in all, at most 10."""
    runs(FakeEngine(window=window))
    assert runs.engine.most_in_flight == expected


def test_commits_while_sampling(runs: Runs) -> None:
    """The last request waits until it sees a committed shard: what is finished does not wait for the end."""

    async def before(request: SampleRequest) -> None:
        while (request.prompt.prompt_index, request.sample_index) == (4, 1) and not list_shards(runs.out):
            await asyncio.sleep(0.01)

    runs(FakeEngine(before=before), commit_interval=0.01)
    assert len(list_shards(runs.out)) >= 2
    assert sorted(runs.stored()) == keys(5, 2)


def test_an_error_of_the_writer_ends_the_run(runs: Runs) -> None:
    """`data/` turns into a file: the run stops at the next tick instead of sampling for nothing."""

    async def before(request: SampleRequest) -> None:
        if (request.prompt.prompt_index, request.sample_index) == (0, 0):  # before anything can be committed
            (runs.out / "data").rmdir()
            (runs.out / "data").touch()
            await asyncio.Event().wait()

    with pytest.raises(DatasetError, match="cannot be written"):
        runs(FakeEngine(before=before), commit_interval=0.01)
    assert runs.engine.closed == 1


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_check_leaves_nothing_behind(runs: Runs, exists: bool) -> None:
    """A bad row, an engine that cannot be made, one that does not start: the directory is as it was, or is not."""
    if exists:
        runs.out.mkdir()
    runs.write_prompts(2, bad=[1])
    with pytest.raises(UsageError):
        runs()
    assert runs.out.exists() is exists
    assert not list(runs.out.rglob("*.parquet"))
    runs.write_prompts(2)
    with pytest.raises(EngineError):
        runs(FakeEngine(start_error=EngineError("no memory")))
    assert runs.out.exists() is exists
    assert not list(runs.out.rglob("*.parquet"))
    assert runs().stored == 4


def test_a_second_run_at_the_same_time_is_refused(runs: Runs) -> None:
    """And takes nothing away from the first, whose plan is still a temporary file."""
    with WriterSlot(runs.out, "w0"):
        plan = runs.out / ".tmp-w0-plan.parquet"
        plan.touch()
        with pytest.raises(ResumeRefused, match="another rollgen is writing this dataset"):
            runs()
        assert plan.exists()


def test_a_directory_that_cannot_be_made(runs: Runs) -> None:
    """Below a file, for example: one line that names it."""
    runs.out = runs.prompts / "out"
    with pytest.raises(UsageError, match=r"prompts\.jsonl.*: cannot be a directory: Not a directory"):
        runs()


@pytest.mark.parametrize(
    ("stats", "owed", "exit_code"),
    [
        (RunStats(planned=4, stored=4), 0, 0),
        (RunStats(planned=4, stored=3), 1, 3),
        (RunStats(planned=4, stored_before=2, stored=2), 0, 0),
        (RunStats(planned=4, tombstones=1, stored=3), 0, 3),
        (RunStats(planned=4, stored=4, failed=2), 0, 0),
    ],
)
def test_exit_code_says_whether_all_is_stored(stats: RunStats, owed: int, exit_code: int) -> None:
    """A sample that failed and was stored after all is no failure; a skipped row is."""
    assert (stats.owed, stats.exit_code) == (owed, exit_code)
    assert (stats.tokens_per_second, stats.mean_support) == (0.0, 0.0)
