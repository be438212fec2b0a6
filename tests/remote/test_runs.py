"""Whole runs into object storage: killed at every kind of step, cut off, taken over, in parts."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models.datasets import planned_keys, write_prompts
from models.ports import kept_port
from models.program import Finished
from models.storage import BUCKET, s3_server
from models.stored_run import StoredRuns

from rollgen.remote.objects import ObjectStore

PROMPTS = 12
COMMITS = ("--commit-interval", 0.01)
"""With a delay of some hundredths of a second a sample: several commits."""
BEATS = {"beat": 0.5}
"""Of writers that see each other alive."""
HASTY = {"hasty": True}
"""Of one that takes over."""

STEPS = {
    "the lock": "create journal/w0.lock",
    "a section": "create journal/start-section.lock",
    "the plan": "put plan.parquet",
    "the manifest": "create rollgen.json",
    "a shard": "upload data/part-w0-000001.parquet",
    "its line": "create journal/w0-000001.jsonl",
}


def assert_refused(woken: Finished) -> None:
    """What became of a process that was suspended. Its connection may be gone by then, and here it has but one try."""
    assert (woken.code, "silent for too long" in woken.stderr) == (4, True) or (
        (woken.code, "see to the connection" in woken.stderr) == (1, True)
    ), woken


def rows_of(runs: StoredRuns) -> dict[Any, dict[str, Any]]:
    rows = runs.verified_rows()
    assert rows.keys() == planned_keys(PROMPTS, 2)
    return rows


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest, bucket: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> dict[Any, dict[str, Any]]:
    """The rows of a run that nobody disturbed; the engine's answers depend on nothing but the request."""
    runs = StoredRuns(
        request.getfixturevalue("program"), tmp_path_factory.mktemp("undisturbed"), tiny_model, f"{bucket}/undisturbed"
    )
    write_prompts(runs.prompts, PROMPTS)
    runs("--n", 2)
    return rows_of(runs)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that is not always there."""
    with kept_port() as port:
        yield port


def test_a_plain_copy_is_the_dataset(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """Journal objects and all: what `aws s3 sync` brings verifies clean, has a card, and the workspace is gone."""
    stored_runs("--n", 1)
    stored_runs("--n", 2, "--resume")
    assert rows_of(stored_runs) == undisturbed
    names = stored_runs.store.list()
    assert {"README.md", "journal/w0-000000.jsonl", "journal/w0-000001.jsonl"} < names.keys()
    assert not list(stored_runs.cache().rglob("*.parquet"))


@pytest.mark.parametrize(
    ("step", "after"),
    [*((step, True) for step in STEPS.values()), (STEPS["a shard"], False), (STEPS["its line"], False)],
    ids=[*(f"after {name}" for name in STEPS), "before a shard", "before its line"],
)
def test_killed(stored_runs: StoredRuns, undisturbed: dict[Any, Any], tmp_path: Path, step: str, after: bool) -> None:
    """SIGKILL around a step: the same machine goes on at once, with every sample there once.

    In front of a step all is as it was after the one before, but for the shards that only this machine has.
    """
    killed = stored_runs("--n", 2, *COMMITS, delay=0.1, storage={"kill_at": step, "after": after}, code=-9)
    assert "Traceback" not in killed.stderr
    stored_runs("--n", 2, "--resume")
    assert rows_of(stored_runs) == undisturbed


def test_killed_and_continued_elsewhere(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """Another machine waits until the lock has been silent, and takes over the shard that had been sent."""
    stored_runs("--n", 2, *COMMITS, delay=0.1, machine="one", code=-9, storage={"kill_at": STEPS["its line"]})
    taken = stored_runs("--n", 2, "--resume", machine="two", storage=HASTY)
    assert "waiting up to 600 s" in taken.stderr
    assert "data/part-w0-000001.parquet: finished, but not committed" in taken.stderr
    assert rows_of(stored_runs) == undisturbed


def test_continued_without_a_plan(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """It is made again; what had been sent without a line is compared with it at the next start."""
    stored_runs("--n", 2, *COMMITS, delay=0.1, storage={"kill_at": STEPS["its line"]}, code=-9)
    stored_runs.store.delete("plan.parquet")
    lost = f"{stored_runs.url}/plan.parquet: missing; --resume with the very command of the last start makes it again"
    left = stored_runs("--n", 2, "--resume").stderr
    assert lost in left
    assert "are left to the next start: 1" in left
    assert "some of it has been stored since" in stored_runs("--n", 2, "--resume").stderr
    assert rows_of(stored_runs) == undisturbed


@pytest.mark.parametrize("damage", [None, b"PAR1"], ids=["lost", "damaged"])
def test_a_plan_is_made_again_where_nothing_is_owed(
    stored_runs: StoredRuns, tmp_path: Path, damage: bytes | None
) -> None:
    """By the same command. One that is there is not sent again."""
    stored_runs("--n", 2)
    plan = stored_runs.store.read("plan.parquet", 1 << 20)
    stored_runs.store.delete("plan.parquet")
    if damage is not None:
        stored_runs.store.create("plan.parquet", damage)
    steps = [tmp_path / "first", tmp_path / "second"]
    for path in steps:
        assert "nothing is owed" in stored_runs("--n", 2, "--resume", storage={"steps": path}).stderr
    assert stored_runs.store.read("plan.parquet", 1 << 20) == plan
    assert ["put plan.parquet" in path.read_text().splitlines() for path in steps] == [True, False]


def test_a_writer_that_was_taken_for_dead(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """It wakes up with a shard in hand, which is refused; the dataset stays that of its successor."""
    silent = stored_runs.start(
        *("--n", 2, *COMMITS), delay=0.1, machine="one", storage={"stop_before": "data/part-w0-000001"}
    )
    stored_runs.wait_until_stopped(silent)
    stored_runs("--n", 2, "--resume", machine="two", storage=HASTY)
    os.killpg(silent.pid, signal.SIGCONT)
    assert_refused(silent.wait())
    assert rows_of(stored_runs) == undisturbed
    late = stored_runs("--n", 2, "--resume", machine="one")
    assert "all of it has been stored since" in late.stderr
    assert rows_of(stored_runs) == undisturbed


def test_a_writer_that_wakes_after_two_replacements(stored_runs: StoredRuns) -> None:
    """Its shard is of prompts that are not there any more: it gets neither into the first nor into the second."""
    silent = stored_runs.start(
        *("--n", 2, *COMMITS), delay=0.1, machine="one", storage={"stop_before": "data/part-w0-000001"}
    )
    stored_runs.wait_until_stopped(silent)
    change_prompts(stored_runs)
    for _ in range(2):
        stored_runs("--n", 2, "--clean", machine="two", storage=HASTY)
    os.killpg(silent.pid, signal.SIGCONT)
    assert_refused(silent.wait())
    late = stored_runs("--n", 2, "--resume", machine="one")
    assert "it is of another dataset; this shard had not been committed, and is kept in" in late.stderr
    rows = rows_of(stored_runs)
    assert {row["prompt"].split()[0] for row in rows.values()} == {"Figure"}
    assert len([*stored_runs.cache("one").rglob("*.aside/*/part-*.parquet")]) >= 1


def change_prompts(runs: StoredRuns) -> None:
    """Other texts under the same ids."""
    runs.prompts.write_text(runs.prompts.read_text().replace("Number", "Figure"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_for_a_lock(stored_runs: StoredRuns, number: signal.Signals) -> None:
    """One line and the code of the signal; no lock is left behind."""
    stored_runs.store.create("journal/w0.lock", b"of somebody elsewhere")
    waiting = stored_runs.start("--n", 2)
    while "waiting up to" not in waiting.output[1]:
        assert waiting.alive, waiting.output
        time.sleep(0.05)
    waiting.signal_group(number)
    ended = waiting.wait()
    assert ended.code == 128 + number
    assert ended.stderr.splitlines()[-1] == "rollgen: error: interrupted"
    assert "Traceback" not in ended.stderr
    assert stored_runs.store.list().keys() == {"journal/w0.lock"}


def test_a_replacement_that_was_taken_for_dead(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """With --clean, suspended while the model loads: it removes nothing of what its successor has made."""
    stored_runs("--n", 1)
    silent = stored_runs.start(
        *("--n", 1, "--clean"),
        machine="one",
        storage={"stop_before": "create journal/start-section.lock", "passing": 3},
    )
    stored_runs.wait_until_stopped(silent)
    assert "loading the model" in silent.output[1]
    stored_runs("--n", 2, "--resume", machine="two", storage=HASTY)
    os.killpg(silent.pid, signal.SIGCONT)
    assert_refused(silent.wait())
    assert rows_of(stored_runs) == undisturbed


def test_in_parts_after_a_kill(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """What one process had sent without its line holds prompts of all parts: each finds them done."""
    stored_runs("--n", 2, *COMMITS, delay=0.1, storage={"kill_at": STEPS["its line"]}, code=-9)
    for part in range(2):
        stored_runs("--n", 2, "--resume", "--shard", f"{part}/2")
    assert rows_of(stored_runs) == undisturbed
    assert "data/part-w0-000001.parquet" in stored_runs.store.list()


def test_a_part_without_its_line(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """A part that ended before it could commit what it had sent: another one starts first, and does that."""
    kill = {"kill_at": "create journal/s1of2-000000.jsonl"}
    stored_runs("--n", 2, *COMMITS, "--shard", "1/2", delay=0.1, storage=kill, code=-9)
    stored_runs.store.delete("journal/s1of2.lock")
    for part in range(2):
        stored_runs("--n", 2, "--resume", "--shard", f"{part}/2")
    assert rows_of(stored_runs) == undisturbed


@pytest.mark.parametrize("machine", ["one", "two"])
def test_two_of_one_name(stored_runs: StoredRuns, machine: str) -> None:
    """The second is refused at once on the same machine, and at the first's next beat on another."""
    first = stored_runs.start("--n", 2, delay=100.0, machine="one", storage=BEATS)
    stored_runs.wait_for("rollgen.json", first)
    second = stored_runs("--n", 2, "--resume", machine=machine, storage=BEATS, code=4)
    assert "another rollgen" in second.stderr
    first.signal_group(signal.SIGTERM)
    assert first.wait().code == 143
    assert "journal/w0.lock" not in stored_runs.store.list()


def test_parts_at_the_same_time(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """Two machines begin one dataset together: one makes plan and manifest, the other takes them over."""
    options = ("--n", 2, *COMMITS, "--resume")
    parts = [
        stored_runs.start(*options, "--shard", f"{part}/2", machine=f"m{part}", delay=0.05, storage=BEATS)
        for part in range(2)
    ]
    for part in parts:
        finished = part.wait()
        assert finished.code == 0, finished
    assert rows_of(stored_runs) == undisturbed
    assert "| rows | 24 |" in stored_runs.store.read("README.md", 1 << 20).decode()


def test_a_storage_that_fails(make_runs: Callable[[str], StoredRuns], undisturbed: dict[Any, Any], port: int) -> None:
    """What was finished waits on the machine, and goes first when the storage is back."""
    with s3_server(port):
        runs = make_runs(f"s3://{BUCKET}")
        running = runs.start("--n", 2, *COMMITS, delay=0.2, storage={"stop_before": "data/part-w0-000001"})
        runs.wait_until_stopped(running)
    os.killpg(running.pid, signal.SIGCONT)
    failed = running.wait()
    assert failed.code == 1, failed
    assert "cannot be" in failed.stderr
    assert re.search("finished shards that could not be sent: [12]; they wait in", failed.stderr)
    assert "Traceback" not in failed.stderr
    with s3_server(port):
        resumed = runs("--n", 2, "--resume")
        assert "finished, but not committed by the last attempt; verified, sent and added" in resumed.stderr
        runs.store = ObjectStore(runs.url)
        assert rows_of(runs) == undisturbed


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_storage_that_fails_for_a_while(
    make_runs: Callable[[str], StoredRuns], undisturbed: dict[Any, Any], port: int, interrupted: bool
) -> None:
    """Sampling goes on, the user is told once, and all is sent when it is back. Ctrl-C does not wait for that."""
    with s3_server(port):
        runs = make_runs(f"s3://{BUCKET}")
        running = runs.start(
            *("--n", 2, *COMMITS), delay=0.2, storage={"stop_before": "data/part-w0-000001", "outage": 600.0}
        )
        runs.wait_until_stopped(running)
    os.killpg(running.pid, signal.SIGCONT)
    while "the commit is tried again for 600 s" not in running.output[1]:
        assert running.alive, running.output
        time.sleep(0.05)
    if interrupted:
        running.signal_group(signal.SIGINT)
        ended = running.wait()
        assert ended.code == 130, ended
        assert "they wait in" in ended.stderr
        assert "the samples that were finished last could not be committed: s3://" in ended.stderr
        assert "Traceback" not in ended.stderr
    with s3_server(port):
        if interrupted:
            runs("--n", 2, "--resume")
        else:
            ended = running.wait()
            assert ended.code == 0, ended
        runs.store = ObjectStore(runs.url)
        assert rows_of(runs) == undisturbed
        logs = [path.read_text() for path in runs.copy().glob("logs/*.log")]
    assert ended.stderr.count("is tried again") == 1
    assert sum(log.count("is tried again") for log in logs) == 1


def test_lost_and_damaged_objects(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """A shard that is gone, cut short or whose keys are damaged is retired and made again; nothing is removed."""
    stored_runs("--n", 1, "--limit", 6)
    stored_runs("--n", 1, "--resume")
    stored_runs("--n", 2, "--resume")
    store = stored_runs.store
    shards = sorted(store.list("data"))
    assert len(shards) == 3
    content = store.read(shards[2], 1 << 20)
    store.delete(shards[0])
    store.replace(shards[1], store.read(shards[1], 1 << 20)[:-9])
    store.replace(shards[2], content[:8] + bytes(64) + content[72:])  # the first page, of prompt_id
    mended = stored_runs("--n", 2, "--resume")
    assert mended.stderr.count("its samples are owed again") == 3
    copy = stored_runs.copy()
    assert (copy / shards[1]).exists()
    assert stored_runs.verified_rows() == undisturbed


def test_clean(stored_runs: StoredRuns, undisturbed: dict[Any, Any]) -> None:
    """A run is only replaced on request, and only what is a run's; the new one is as if nothing had been."""
    stored_runs("--n", 3)
    refused = stored_runs("--n", 2, code=2)
    assert "holds a run already" in refused.stderr
    stored_runs.store.create("notes.txt", b"mine")
    stored_runs("--n", 2, "--clean")
    assert stored_runs.store.read("notes.txt", 10) == b"mine"
    stored_runs.store.delete("notes.txt")
    assert rows_of(stored_runs) == undisturbed


def test_other_peoples_objects(stored_runs: StoredRuns) -> None:
    """Nothing is written among them, with or without --clean."""
    stored_runs.store.create("model/weights.bin", b"mine")
    for options in ((), ("--clean",)):
        refused = stored_runs("--n", 2, *options, code=2)
        assert "holds objects that are not a rollgen run, such as model/weights.bin" in refused.stderr
    assert [*stored_runs.store.list()] == ["model/weights.bin"]


def test_a_retry(stored_runs: StoredRuns) -> None:
    """Samples that were cut are made again, as in a directory; which ones is read from columns of remote shards."""
    stored_runs("--n", 1)
    retried = stored_runs("--n", 1, "--resume", "--retry", "finish_reason=length", "--max-tokens", 32)
    assert "samples that were cut are made again with 32 tokens" in retried.stderr
    rows = stored_runs.verified_rows()
    cut = {prompt for (prompt, _, generation), row in rows.items() if not generation and row["response_length"] == 16}
    assert {prompt for prompt, _, generation in rows if generation == 1} <= cut
    assert any(generation for _, _, generation in rows)


def test_no_bucket(make_runs: Callable[[str], StoredRuns]) -> None:
    """A usage error, before a model loads."""
    missing = make_runs("s3://no-such-bucket")("--n", 2, code=2)
    assert "does the bucket exist?" in missing.stderr
    assert "loading the model" not in missing.stderr
