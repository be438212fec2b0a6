"""`score`: every sample that has no reward gets one, once, whatever scoring functions do to their processes.

Datasets have twelve samples of six prompts, whose metadata says `answer`: the number of the prompt.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from models.datasets import read_rows
from models.hung import HungClock

from rollgen.curate import score as module
from rollgen.curate.compact import compact
from rollgen.curate.score import Scored, ScoreError, score
from rollgen.errors import DatasetError, ResumeRefused, RollgenError, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.journal import list_shards
from rollgen.format.keys import read_rows as read_keys
from rollgen.format.manifest import Retry, read_manifest, replace_manifest
from rollgen.format.reader import open_dataset
from rollgen.format.reward_writer import RewardWriter
from rollgen.format.rewards import list_parts, reward_names, rewards_in_force, stored_checksums
from rollgen.format.writer import ShardWriter
from rollgen.rollouts import Completion
from rollgen.verify.repair import repair_dataset

GRADERS = '''
import json, math, os, signal, time
from pathlib import Path

LOG = Path(__file__).with_name("calls")
SWITCH = Path(__file__).with_name("switch")
"""Its text says what goes wrong with the answer to prompt 2, sample 1."""

def note(answers):
    with LOG.open("a") as file:
        for a in answers:
            file.write(json.dumps([len(answers), a.prompt_id, a.sample_index, a.generation]) + "\\n")

def number(answers):
    note(answers)
    return [float(answer.metadata["answer"]) for answer in answers]

def described(answers):
    return [{"reward": 1.0, "length": len(answer.token_ids)} for answer in answers]

def fragile(answers):
    note(answers)
    kind = SWITCH.read_text()
    for answer in answers:
        if (answer.prompt_id, answer.sample_index) == ("p2", 1):
            print("about to go wrong")
            if kind == "raises":
                raise RuntimeError("cannot read /home/me/it")
            if kind == "exits":
                os._exit(7)
            if kind == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "ignores signals":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if kind in ("hangs", "ignores signals"):
                Path(__file__).with_name("hung").joinpath(str(os.getpid())).touch()
                time.sleep(3600)
            if kind == "is short":
                return []
            if kind == "returns nan":
                return [math.nan if a is answer else 1.0 for a in answers]
            if kind == "bad name":
                return [{"reward": 1.0, "a b": 1.0} if a is answer else 1.0 for a in answers]
    return [1.0] * len(answers)

def many_names(answers):
    return [{"reward": 1.0, f"name_{answer.prompt_id}_{answer.sample_index}": 1.0} for answer in answers]
'''


class Graders:
    """The module, and which calls it got."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "graders.py"
        self.path.write_text(GRADERS)
        self.switch("nothing")

    def switch(self, kind: str) -> None:
        """Decide what `fragile` does."""
        self.path.with_name("switch").write_text(kind)

    def calls(self) -> Counter[tuple[str, int, int]]:
        """How often each sample was given to a function since the last time."""
        log = self.path.with_name("calls")
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return Counter(tuple(json.loads(line)[1:]) for line in lines)


@pytest.fixture
def graders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graders:
    """Can be imported, here and in the processes that score."""
    directory = tmp_path / "graders"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "graders", raising=False)
    monkeypatch.setattr("pebble.pool.process.time", HungClock(directory / "hung"))
    return Graders(directory)


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Two shards."""
    return make_dataset(tmp_path / "run")


def rewards_of(directory: Path, name: str, column: str = "reward") -> list[float | None]:
    """Of all stored rows, in order, as readers get them."""
    stored = open_dataset(directory)
    rewards = rewards_in_force(directory, name, stored.manifest.config_digest, None)
    found = rewards.of(read_keys(stored.shards).keys, stored_checksums(stored.shards))[column]
    return [None if math.isnan(value) else value for value in found]


NUMBERS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_every_sample_gets_its_reward(dataset: Path, graders: Graders) -> None:
    """Once, in batches, by two processes; the shards stay as they are. The next time nothing is left to do."""
    before = {path: path.read_bytes() for path in list_shards(dataset)}
    done = score(dataset, "graders:number", processes=2, batch_size=2)
    assert done == Scored("number", "graders:number", 12, 12, 0, 0, 2.5, in_force=True, errors=())
    assert rewards_of(dataset, "number") == NUMBERS
    assert graders.calls() == Counter(dict.fromkeys(read_rows(dataset), 1))
    assert score(dataset, "graders:number") == replace(done, scored=0, kept=12)
    assert graders.calls() == {}
    assert {path: path.read_bytes() for path in list_shards(dataset)} == before
    assert len(list_parts(dataset, "number")) == 1


def test_further_values_and_names(dataset: Path, graders: Graders) -> None:
    """Rewards lie side by side; a function may be given itself, under another name."""
    import graders as functions  # type: ignore[import-not-found]

    score(dataset, functions.described, name="style", processes=1)
    score(dataset, "exact_match", field="answer", processes=1)
    assert reward_names(dataset) == ["exact_match", "style"]
    assert rewards_of(dataset, "style", "length") == [8] * 12
    assert rewards_of(dataset, "exact_match") == [0] * 12  # texts are `text <prompt>.<sample>`


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("raises", "graders.py:28: RuntimeError: cannot read it"),
        ("exits", "its process died with exit code 7"),
        ("is killed", "its process died with exit code -9"),
        ("hangs", "took longer than 1 s, or ended its process with exit code 0"),
        ("returns nan", "the function returned nan for 'reward', not a finite number"),
        ("bad name", "the function returned 'a b' beside the reward, which cannot be the name of a column"),
    ],
)
def test_a_bad_answer_costs_itself(
    dataset: Path, graders: Graders, kind: str, error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others of its batch are scored; it is tried again by the next run. What is printed is no output."""
    graders.switch(kind)
    done = score(dataset, "graders:fragile", processes=1, batch_size=4, timeout=1)
    assert (done.scored, done.failed, done.mean) == (11, 1, 1.0)
    assert done.errors == (ScoreError("p2", 1, error),)
    assert rewards_of(dataset, "fragile") == [*[1] * 5, None, *[1] * 6]
    stored = pq.read_table(list_parts(dataset, "fragile")[0]).to_pylist()
    assert [row["error"] for row in stored if row["reward"] is None] == [error]
    assert capfd.readouterr().out == ""
    graders.calls()
    graders.switch("nothing")
    again = score(dataset, "graders:fragile", processes=1)
    assert (again.scored, again.kept, again.failed) == (1, 11, 0)
    assert list(graders.calls()) == [("p2", 1, 0)]
    assert rewards_of(dataset, "fragile") == [1] * 12


def test_a_function_that_returns_too_few_is_no_answers_fault(dataset: Path, graders: Graders) -> None:
    """One by one a result for the batch would pass for that of an answer. What was scored before is there."""
    graders.switch("is short")
    with pytest.raises(UsageError, match=r"^graders:fragile: the function returned 0 results for 1 answers; it must"):
        score(dataset, "graders:fragile", processes=1, batch_size=1)
    assert [reward for reward in rewards_of(dataset, "fragile") if reward is not None] == [1.0] * 5


def test_a_process_that_ignores_signals(dataset: Path, graders: Graders) -> None:
    """It is killed all the same; nobody is left behind."""
    graders.switch("ignores signals")
    assert score(dataset, "graders:fragile", processes=1, batch_size=12, timeout=1).failed == 1


def test_only_so_many_names(dataset: Path, graders: Graders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a column: a name for each sample is a mistake. Here the twelve have one, and ten are allowed."""
    monkeypatch.setattr(module, "MAX_FURTHER", 10)
    done = score(dataset, "graders:many_names", processes=1)
    assert (done.scored, done.failed) == (10, 2)
    assert done.errors[0].error == "the function returned more than 10 names beside the reward over all answers"


def test_another_scorer_is_refused(dataset: Path, graders: Graders) -> None:
    """Its rewards would be mixed with those that are there; and so for a changed source, and other settings."""
    score(dataset, "graders:number", name="r", processes=1)
    with pytest.raises(ResumeRefused, match=r"rewards 'r': were made by graders:number, not graders:described; give"):
        score(dataset, "graders:described", name="r")
    graders.path.write_text(GRADERS + "\n# changed\n")
    with pytest.raises(
        ResumeRefused, match=r"made by graders:number as its source file was before it changed; .*--name"
    ):
        score(dataset, "graders:number", name="r")
    score(dataset, "exact_match", field="answer", processes=1)
    with pytest.raises(ResumeRefused, match=r"exact_match with field 'answer' and extract None; .*--rescore"):
        score(dataset, "exact_match", field="answer", extract="x")
    assert graders.calls() == Counter(dict.fromkeys(read_rows(dataset), 1))


def test_rescoring(dataset: Path, graders: Graders) -> None:
    """By another scorer: the old rewards are in force until all are new, and then gone."""
    score(dataset, "graders:number", name="r", processes=1)
    graders.switch("raises")
    done = score(dataset, "graders:fragile", name="r", rescore=True, processes=1)
    assert (done.scored, done.failed, done.in_force) == (11, 1, False)
    assert rewards_of(dataset, "r") == NUMBERS
    with pytest.raises(ResumeRefused, match="were made by graders:number, not graders:fragile"):
        score(dataset, "graders:fragile", name="r")
    assert score(dataset, "graders:number", name="r").kept == 12, "the old scorer still may"
    graders.switch("nothing")
    done = score(dataset, "graders:fragile", name="r", rescore=True, processes=1)
    assert (done.scored, done.kept, done.in_force) == (1, 11, True)
    assert rewards_of(dataset, "r") == [1] * 12
    assert [path.name for path in list_parts(dataset, "r")] == [f"r-00000{number}.parquet" for number in (1, 2, 3)]
    assert score(dataset, "graders:fragile", name="r").kept == 12


def test_a_rescoring_that_another_one_takes_the_place_of(dataset: Path, graders: Graders) -> None:
    """What was begun by one scorer is not finished by the other."""
    score(dataset, "graders:number", name="r", processes=1)
    graders.switch("raises")
    score(dataset, "graders:fragile", name="r", rescore=True, processes=1)
    done = score(dataset, "graders:described", name="r", rescore=True, processes=1)
    assert (done.scored, done.kept) == (12, 0)
    assert rewards_of(dataset, "r", "length") == [8] * 12


def test_scoring_again_by_the_same(dataset: Path, graders: Graders) -> None:
    """Everything, for a function that is not the same every time."""
    score(dataset, "graders:number", processes=1)
    graders.calls()
    assert score(dataset, "graders:number", rescore=True, processes=1).scored == 12
    assert sum(graders.calls().values()) == 12
    assert rewards_of(dataset, "number") == NUMBERS


def test_what_a_kill_leaves_of_a_rescoring(dataset: Path, graders: Graders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the part that closes it and the removal of the old: the new rewards are in force, the next run tidies."""
    score(dataset, "graders:number", name="r", processes=1)
    with monkeypatch.context() as patch:
        patch.setattr(RewardWriter, "remove", lambda writer, parts: None)
        score(dataset, "graders:described", name="r", rescore=True, processes=1)
    assert rewards_of(dataset, "r") == [1] * 12
    assert len(list_parts(dataset, "r")) == 3
    score(dataset, "graders:described", name="r", processes=1)
    assert [path.name for path in list_parts(dataset, "r")] == ["r-000001.parquet", "r-000002.parquet"]


def test_samples_that_were_made_since(
    dataset: Path, graders: Graders, make_completion: Callable[..., Completion]
) -> None:
    """By a retry and by a run that goes on: they alone are scored, a superseded row never."""
    score(dataset, "graders:number", processes=1)
    graders.calls()
    retry = Retry(generation=1, started_at="", where={"finish_reason": "length"}, max_tokens=99, samples=1)
    manifest = read_manifest(dataset).with_retry(retry)
    replace_manifest(dataset, manifest)
    with WriterSlot(dataset, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        writer.add(make_completion(1, 0, tokens=9, generation=1))
        writer.add(make_completion(6, 0))
    done = score(dataset, "graders:number", processes=1)
    assert (done.samples, done.scored, done.kept) == (13, 2, 11)
    assert graders.calls() == {("p1", 0, 1): 1, ("p6", 0, 0): 1}
    assert rewards_of(dataset, "number") == [*NUMBERS, 1, 6]


def test_a_sample_made_again_after_damage(
    dataset: Path, graders: Graders, make_completion: Callable[..., Completion]
) -> None:
    """It has the same key and other tokens: the old reward is not its own."""
    score(dataset, "graders:number", processes=1)
    graders.calls()
    rows = {key: row for key, row in read_rows(dataset).items() if row["prompt_index"] >= 3}
    list_shards(dataset)[1].unlink()
    repair_dataset(dataset)
    manifest = read_manifest(dataset)
    with WriterSlot(dataset, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for prompt_id, sample, _ in rows:
            prompt = int(prompt_id[1:])
            writer.add(make_completion(prompt, sample, tokens=9 if (prompt, sample) == (4, 1) else 8))
    assert rewards_of(dataset, "number") == [*NUMBERS[:9], None, *NUMBERS[10:]]
    assert score(dataset, "graders:number", processes=1).scored == 1
    assert graders.calls() == {("p4", 1, 0): 1}


def test_rewards_survive_compaction_and_repair(dataset: Path, graders: Graders) -> None:
    """Keys and tokens stay."""
    score(dataset, "graders:number", processes=1)
    compact(dataset, shard_tokens=1000)
    repair_dataset(dataset)
    assert rewards_of(dataset, "number") == NUMBERS
    assert score(dataset, "graders:number").kept == 12


def test_commits_while_it_goes_on(dataset: Path, graders: Graders, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many rows, and after some time."""
    monkeypatch.setattr(module, "COMMIT_ROWS", 5)
    score(dataset, "graders:number", processes=1, batch_size=1)
    counts = [pq.read_metadata(path).num_rows for path in list_parts(dataset, "number")]
    assert sum(counts) == 12
    assert len(counts) >= 2
    monkeypatch.setattr(module, "COMMIT_SECONDS", 0.0)
    score(dataset, "graders:described", processes=1, batch_size=1)
    assert len(list_parts(dataset, "described")) > len(counts)


def test_commits_become_rarer() -> None:
    """Ten hours of scoring are some 225 files, and not 1,800; a kill costs five minutes at most."""
    seconds, parts = 0.0, 0
    while seconds < 36_000:
        assert 20 <= module._commit_seconds(parts) <= 300
        seconds, parts = seconds + module._commit_seconds(parts), parts + 1
    assert 200 < parts < 250


def test_a_dataset_that_another_takes_the_place_of(
    dataset: Path, graders: Graders, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `--clean`, just before the rewards have their lock: nothing of the two is mixed."""

    class Late(RewardWriter):
        def __enter__(self) -> Late:
            shutil.rmtree(dataset)
            make_dataset(dataset, support_logprobs=True)
            return super().__enter__()

    monkeypatch.setattr(module, "RewardWriter", Late)
    with pytest.raises(ResumeRefused, match="another dataset has just taken its place; start again"):
        score(dataset, "graders:number", processes=1)
    assert list_parts(dataset, "number") == []


def test_a_module_that_changes_the_working_directory(
    tmp_path: Path, graders: Graders, make_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset is the one that was named, also where another one of that name is there."""
    here, there = (make_dataset(tmp_path / place / "run") for place in ("here", "there"))
    graders.path.write_text(f"import os\nos.chdir({str(there.parent)!r})\n{GRADERS}")
    monkeypatch.chdir(here.parent)
    assert score("run", "graders:number", processes=1).scored == 12
    assert Path.cwd() == here.parent
    assert (reward_names(here), reward_names(there)) == (["number"], [])


def test_an_interruption_commits_what_is_finished(dataset: Path, graders: Graders) -> None:
    """Here after the first three; the rest is scored by the next run."""

    def interrupt(done: int, total: int) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(dataset, "graders:number", processes=1, batch_size=1, progress=interrupt)
    kept = sum(value is not None for value in rewards_of(dataset, "number"))
    assert kept >= 3
    assert score(dataset, "graders:number", processes=1).kept == kept


def test_damage_is_an_error(dataset: Path, graders: Graders) -> None:
    """Of a shard, and of the rewards; what was scored before is kept."""
    score(dataset, "graders:number", processes=1)
    path = list_parts(dataset, "number")[0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DatasetError, match=r"number-000000.parquet: damaged"):
        score(dataset, "graders:number")
    path.unlink()
    shard = list_shards(dataset)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=shard.name):
        score(dataset, "graders:number", processes=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a-b"}, r"^a-b: no name for rewards; use --name with letters, digits and underscores"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, not 0"),
        ({"processes": 0}, "processes must be a whole number, 1 or more, not 0"),
        ({"timeout": 0}, "timeout must be a finite number of seconds above 0"),
        ({"timeout": math.inf}, "timeout must be a finite number of seconds above 0"),
    ],
)
def test_what_cannot_be(dataset: Path, graders: Graders, options: dict[str, Any], message: str) -> None:
    """Refused before anything is written."""
    with pytest.raises(UsageError, match=message):
        score(dataset, "graders:number", **options)
    assert not (dataset / "rewards").exists()


def test_a_dataset_in_object_storage() -> None:
    """For now."""
    with pytest.raises(UsageError, match=r"^s3://bucket/run: is in object storage; score a copy of it"):
        score("s3://bucket/run", "graders:number")


def test_a_module_that_ends_its_process(dataset: Path, graders: Graders) -> None:
    """As soon as it is imported there: nothing can be scored, and nobody waits for ever."""
    graders.path.write_text(GRADERS + "\nif os.environ.get('ROLLGEN_TEST_PARENT') != str(os.getpid()): os._exit(3)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLGEN_TEST_PARENT", str(os.getpid()))
        with pytest.raises(RollgenError, match=r"die as they start: does importing graders:number end them.*__main__"):
            score(dataset, "graders:number", processes=1)


def test_no_process_is_left(dataset: Path, graders: Graders) -> None:
    """Each is ended when there is nothing more to score."""
    score(dataset, "graders:number", processes=2)
    deadline = time.monotonic() + 180
    while (children := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children


def _children() -> list[str]:
    """Command lines of the processes that this one started by spawning."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # of a process that ends meanwhile
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if parent == os.getpid() and "spawn_main" in command:
                found.append(command)
    return found
