"""Rewards in rollouts and batches: each with its own sample, or not at all."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.rewards import write_rewards
from torch.utils.data import DataLoader

from rollgen.errors import DatasetError, ResumeRefused, UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Retry, read_manifest, replace_manifest
from rollgen.format.rewards import ScorerRecord, list_parts
from rollgen.format.writer import ShardWriter
from rollgen.loader import RolloutBatch, RolloutDataset, RolloutStream, collate
from rollgen.rollouts import Completion


@pytest.fixture
def dataset(tmp_path: Path, make_dataset: Callable[..., Path]) -> Path:
    """Twelve samples of six prompts in two shards, with two rewards."""
    directory = make_dataset(tmp_path / "run")
    write_rewards(directory, "correct", lambda row: {"reward": number_of(row), "format": -number_of(row)})
    write_rewards(directory, "other", lambda row: 0.1)
    return directory


def number_of(row: dict[str, Any]) -> float:
    """Another one for each sample."""
    return float(10 * row["prompt_index"] + row["sample_index"])


def wanted(batch: RolloutBatch) -> list[float]:
    return [float(10 * prompt + sample) for prompt, sample in zip(batch.prompt_index, batch.sample_index, strict=True)]


def test_a_rollout_has_its_rewards(dataset: Path) -> None:
    """In float64, by the names that were asked for; without being asked, none."""
    rollouts = RolloutDataset(dataset, rewards=("correct", "correct.format", "other"))
    for rollout in (rollouts[index] for index in range(len(rollouts))):
        number = 10.0 * rollout.prompt_index + rollout.sample_index
        assert rollout.rewards == {"correct": number, "correct.format": -number, "other": 0.1}
    assert RolloutDataset(dataset)[0].rewards == {}
    assert pickle.loads(pickle.dumps(rollouts))[3].rewards == rollouts[3].rewards


@pytest.mark.parametrize("options", [{}, {"group_by_prompt": True}, {"layout": "packed", "bucket_by_length": True}])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_those_of_its_rollouts(dataset: Path, options: dict[str, Any], workers: int) -> None:
    """In float32, in any order, in workers too."""
    stream = RolloutStream(dataset, batch_tokens=40, rewards=["correct", "other"], **options)
    batches = list(DataLoader(stream, batch_size=None, num_workers=workers))
    assert sum(len(batch) for batch in batches) == 12
    for batch in batches:
        assert batch.rewards["correct"].dtype == torch.float32
        assert batch.rewards["correct"].tolist() == wanted(batch)
        assert torch.equal(batch.rewards["other"], torch.full((len(batch),), 0.1))


def test_they_move_with_the_batch(dataset: Path) -> None:
    """Every tensor does."""
    batch = collate([RolloutDataset(dataset, rewards="correct")[index] for index in (3, 1)])
    assert batch.rewards["correct"].tolist() == wanted(batch)
    assert batch.to("meta").rewards["correct"].device.type == "meta"
    plain = collate([RolloutDataset(dataset)[0], RolloutDataset(dataset, rewards="correct")[1]])
    assert plain.rewards == {}, "not all of them have it"


def test_an_empty_batch(dataset: Path) -> None:
    """As a rank gets in the end: no rewards, under their names."""
    stream = RolloutStream(dataset, batch_tokens=10_000, rewards="correct", rank=1, world_size=2)
    (batch,) = stream
    assert (len(batch), batch.rewards["correct"].shape) == (0, (0,))


def test_several_datasets(dataset: Path, tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """Each with its own; one that has none is named."""
    other = make_dataset(tmp_path / "other", shards=1)
    with pytest.raises(UsageError, match=rf"^{other}: has no rewards 'correct' \(there are: none\); make them with"):
        RolloutStream([dataset, other], rewards="correct")
    write_rewards(other, "correct", lambda row: number_of(row) + 0.5)
    for batch in RolloutStream([dataset, other], rewards="correct"):
        shift = 0.5 * batch.dataset_index
        assert torch.equal(batch.rewards["correct"], torch.tensor(wanted(batch)) + shift)


def test_samples_without_a_reward(dataset: Path) -> None:
    """How many, and the command; what a filter leaves out needs none."""
    write_rewards(dataset, "correct", lambda row: None, only=lambda row: row["prompt_index"] == 2)
    command = rf"`rollgen score {dataset} --with scorers:score --name correct` scores what it can of them"
    others = (
        "if they cannot have a reward, score with a function that returns 0, or leave them out with the filter= of "
    )
    with pytest.raises(UsageError, match=rf"^{dataset}: 2 of 12 samples have no 'correct'; {command}; {others}"):
        RolloutDataset(dataset, rewards="correct")
    import pyarrow.compute as pc

    stream = RolloutStream(dataset, rewards="correct", filter=pc.field("prompt_index") != 2)
    assert sum(len(batch) for batch in stream) == 10


def test_samples_without_a_further_value(dataset: Path) -> None:
    """They have a reward, so that the command alone would find nothing to do."""
    write_rewards(dataset, "correct", lambda row: 1.0, only=lambda row: row["prompt_index"] == 2)
    assert len(RolloutDataset(dataset, rewards="correct")) == 12
    with pytest.raises(UsageError, match=r"2 of 12 samples have no 'correct.format'; .*only `--rescore` scores again"):
        RolloutDataset(dataset, rewards="correct.format")


def test_rewards_of_two_scorers(dataset: Path, tmp_path: Path, make_dataset: Callable[..., Path]) -> None:
    """One name in two datasets: they are not comparable, and a batch would have both."""
    other = make_dataset(tmp_path / "other")
    write_rewards(other, "correct", number_of, scorer=ScorerRecord("scorers:another", "0" * 64))
    message = rf"^{other}: its rewards 'correct' are by another scorer .* with the other's scorer and --rescore$"
    with pytest.raises(UsageError, match=message):
        RolloutStream([dataset, other], rewards="correct")
    assert RolloutStream([other], rewards="correct").samples == 12


def test_a_state_is_of_its_rewards(dataset: Path) -> None:
    """A resumed run that learned from others would not notice; what was scored again to the same values is the same."""
    state = RolloutStream(dataset, rewards="correct").state_dict()
    write_rewards(dataset, "correct", number_of, scoring=2, closes=True)
    RolloutStream(dataset, rewards="correct").load_state_dict(json.loads(json.dumps(state)))
    write_rewards(dataset, "correct", lambda row: number_of(row) + 1, scoring=3, closes=True)
    message = "other rewards were asked for, or the samples were scored again since"
    for rewards in ("correct", "other", None):
        with pytest.raises(ResumeRefused, match=message):
            RolloutStream(dataset, rewards=rewards).load_state_dict(state)
    with pytest.raises(ResumeRefused, match=message):
        RolloutStream(dataset, rewards="other").load_state_dict(RolloutStream(dataset).state_dict())


def test_a_state_that_does_not_say_its_rewards(dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It continues, with one line in the log where there is something to compare."""
    state = RolloutStream(dataset, rewards="correct").state_dict()
    del state["rewards"]
    RolloutStream(dataset).load_state_dict(state)
    assert not caplog.records
    RolloutStream(dataset, rewards="other").load_state_dict(state)
    (line,) = caplog.messages
    assert line.startswith("the state does not say which rewards it is of")


def test_rewards_of_other_tokens_are_others(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that was made again and scored the same is not the one that a run has learned from."""
    index = RolloutDataset(dataset, rewards=["correct", "correct.format", "other"]).index
    monkeypatch.setattr("models.rewards.crc_of", lambda ids: 1)
    write_rewards(dataset, "correct", lambda row: {"reward": number_of(row), "format": -number_of(row)})
    made_again = RolloutDataset(dataset, rewards=["correct", "correct.format", "other"]).index
    assert made_again.samples_fingerprint() == index.samples_fingerprint()
    was, now = index.reward_fingerprints(), made_again.reward_fingerprints()
    assert [name for name in was if was[name] != now[name]] == ["correct", "correct.format"]


@pytest.mark.parametrize("rewards", [3, [None], b"v", {"correct": 1}])
def test_what_are_no_names(dataset: Path, rewards: Any) -> None:
    """Of another type."""
    with pytest.raises(UsageError, match=r"^rewards must be a name like 'correct' or 'correct.format', or a list of"):
        RolloutDataset(dataset, rewards=rewards)


def test_the_command_has_the_options_of_a_built_in_scorer(dataset: Path) -> None:
    """Quoted for a shell."""
    scorer = ScorerRecord("exact_match", None, field="answer", extract=r"\d+ (x)")
    write_rewards(dataset, "exact", lambda row: None, scorer=scorer)
    with pytest.raises(UsageError, match=r"--with exact_match --field answer --extract '\\d\+ \(x\)' --name exact`"):
        RolloutDataset(dataset, rewards="exact")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corect", r"has no rewards 'corect' \(there are: correct, other\); make them with `rollgen score"),
        ("correct.style", r"the scorer of rewards 'correct' gave no 'style'"),
        ("correct.", r"^rewards: 'correct.' is no name of rewards; give one like 'correct' or 'correct.format'"),
        (".format", r"^rewards: '.format' is no name of rewards"),
        ("../x", r"^rewards: '../x' is no name of rewards"),
    ],
)
def test_names_that_are_none(dataset: Path, name: str, message: str) -> None:
    """Said at opening."""
    with pytest.raises(UsageError, match=message):
        RolloutDataset(dataset, rewards=name)


def test_tokens_that_are_not_those_that_were_scored(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when they are read: a shard was replaced by one with the same keys."""
    monkeypatch.setattr("models.rewards.crc_of", lambda ids: 1)
    write_rewards(dataset, "correct", number_of, only=lambda row: row["prompt_index"] == 5)
    rollouts = RolloutDataset(dataset, rewards="correct")
    assert rollouts[0].rewards == {"correct": 0.0}
    with pytest.raises(
        UsageError, match=r"row group 0: 2 samples were made again since rewards 'correct' were; `rollgen"
    ):
        rollouts[11]
    with pytest.raises(UsageError, match="2 samples were made again"):
        list(RolloutStream(dataset, rewards="correct", on_damage="skip"))
    assert not math.isnan(RolloutDataset(dataset, rewards="other")[11].rewards["other"])


def test_a_retry_needs_a_reward_of_its_own(dataset: Path, make_completion: Callable[..., Completion]) -> None:
    """The one of the row that it supersedes is not its own."""
    retry = Retry(generation=1, started_at="", where={"finish_reason": "length"}, max_tokens=99, samples=1)
    manifest = read_manifest(dataset).with_retry(retry)
    replace_manifest(dataset, manifest)
    with WriterSlot(dataset, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        writer.add(make_completion(1, 0, tokens=9, generation=1))
    with pytest.raises(UsageError, match="1 of 12 samples have no 'correct'"):
        RolloutDataset(dataset, rewards="correct")
    write_rewards(
        dataset,
        "late",
        lambda row: 1.0,
        only=lambda row: row["generation"] == 1 or (row["prompt_index"], row["sample_index"]) != (1, 0),
    )
    assert len(RolloutDataset(dataset, rewards="late")) == 12
    with pytest.raises(UsageError, match=r"1 of 13 samples have no 'late', and get none: .* leave out all_generations"):
        RolloutDataset(dataset, rewards="late", all_generations=True)
    write_rewards(dataset, "correct", lambda row: 77.0, only=lambda row: row["generation"] == 1)
    rollouts = RolloutDataset(dataset, rewards="correct")
    again = next(rollouts[index] for index in range(12) if rollouts[index].generation)
    assert again.rewards == {"correct": 77.0}
    everything = RolloutDataset(dataset, rewards="correct", all_generations=True)
    assert {everything[index].rewards["correct"] for index in range(13)} == {
        77.0,
        *(10.0 * prompt + sample for prompt in range(6) for sample in range(2)),
    }


def test_damage_in_the_rewards(dataset: Path) -> None:
    """Named, at opening."""
    path = list_parts(dataset, "correct")[0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DatasetError, match=r"correct-000000\.parquet: damaged"):
        RolloutDataset(dataset, rewards="correct")


def test_object_storage() -> None:
    """For now."""
    from rollgen.loader.index import Index
    from rollgen.loader.places import place_of
    from rollgen.loader.rewards import with_rewards

    index: Index = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"^s3://bucket/run: rewards are not read from object storage; copy"):
        with_rewards(index, [place_of("s3://bucket/run")], ["correct"])
