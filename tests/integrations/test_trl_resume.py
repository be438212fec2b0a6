"""TRL's trainer on stored rollouts, begun again: from a checkpoint, or a second time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from models.rewards import write_rewards
from models.trl_training import Recorder, Train, logged
from transformers import AutoModelForCausalLM

from rollgen.curate.compact import compact
from rollgen.errors import UsageError


def test_a_resumed_run_goes_on_where_it_was(
    tmp_path: Path, stored: Path, make_trainer: Train, tiny_model: Path
) -> None:
    """Stopped in the second of three epochs of three steps, it uses the same samples and ends at the same weights."""

    def trainer(**changes: Any) -> Recorder:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        common = {"learning_rate": 1e-3, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4}
        return make_trainer(stored, model=model, **common | changes)

    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-4"))
    assert len(whole.loaded) == 9
    assert resumed.loaded == whole.loaded[4:]
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(resumed.model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_resuming_amid_a_generation_batch_is_refused(tmp_path: Path, stored: Path, make_trainer: Train) -> None:
    """Three steps are made of a generation batch; what TRL had shuffled after one of them is gone."""
    common = {"steps_per_generation": 3, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(stored, **common).train()
    with pytest.raises(UsageError, match=r"step 4 is amid .* one like that of step 3, .*\"epoch\" or save_steps=3$"):
        make_trainer(stored, **common).train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-4"))
    make_trainer(stored, **common).train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-3"))


@pytest.mark.parametrize(
    ("rollouts", "changes", "difference"),
    [
        pytest.param("grown", {}, "the rollouts are others, or more or fewer", id="grown"),
        pytest.param("stored", {"seed": 5}, "seed was 42, is 5", id="seed"),
        pytest.param("stored", {"shuffle_dataset": False}, "shuffle_dataset was True, is False", id="order"),
        pytest.param("stored", {"per_device_train_batch_size": 2}, "generation_batch_size was 4, is 2", id="batch"),
        pytest.param("stored", {"num_iterations": 2}, "num_iterations was 1, is 2", id="iterations"),
    ],
)
def test_another_order_of_samples_is_refused(
    tmp_path: Path,
    stored: Path,
    make_dataset: Callable[..., Path],
    make_trainer: Train,
    rollouts: str,
    changes: dict[str, Any],
    difference: str,
) -> None:
    """Some samples would be used twice, others never."""
    make_dataset(tmp_path / "grown", shards=3, prompts=3, n=2)
    make_trainer(stored, save_strategy="steps", save_steps=1, max_steps=1).train()
    with pytest.raises(UsageError, match=f"^the checkpoint of step 1 is of another order .*{difference}"):
        make_trainer(tmp_path / rollouts, **changes).train(resume_from_checkpoint=str(checkpoint(tmp_path, 1)))


def test_compaction_between_two_runs_changes_nothing(tmp_path: Path, stored: Path, make_trainer: Train) -> None:
    """Groups are in the order of the plan, wherever their samples are stored: here the prompts of two shards in one."""
    common = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make_trainer(stored, **common)
    whole.train()
    assert compact(stored).written == 1
    resumed = make_trainer(stored, **common)
    resumed.train(resume_from_checkpoint=str(checkpoint(tmp_path, 1)))
    assert resumed.used == whole.used[1:]


@pytest.mark.parametrize(
    ("rewards", "difference"),
    [
        pytest.param("right", None, id="same"),
        pytest.param("again", "the stored rewards 'right' are others, or of other tokens", id="scored-again"),
        pytest.param(
            "other", "the stored rewards 'other' are others, .*; the stored rewards 'right'", id="another-name"
        ),
    ],
)
def test_other_rewards_are_refused(
    tmp_path: Path, stored: Path, make_trainer: Train, rewards: str, difference: str | None
) -> None:
    """Of one sample at least: a run that goes on would learn from two scorers."""
    for name in ("right", "other"):
        write_rewards(stored, name, lambda row: float(row["sample_index"]))
    make_trainer(stored, [], rewards="right", save_strategy="steps", save_steps=1, max_steps=1).train()
    if rewards == "again":
        write_rewards(stored, "right", lambda row: row["prompt_index"] / 8, scoring=2, closes=True)
    resumed = make_trainer(stored, [], rewards="other" if rewards == "other" else "right")
    with nullcontext() if difference is None else pytest.raises(UsageError, match=f"of another order .*{difference}"):
        resumed.train(resume_from_checkpoint=str(checkpoint(tmp_path, 1)))


def test_states_of_callbacks_are_restored_without_a_warning(
    tmp_path: Path, stored: Path, make_trainer: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers warns of states of classes that it was not given; the order is kept among them, and is none."""
    common = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    make_trainer(stored, **common).train()
    resumed = make_trainer(stored, restore_callback_states_from_checkpoint=True, **common)
    logging.getLogger("transformers").propagate = True
    try:
        with caplog.at_level(logging.WARNING):
            resumed.train(resume_from_checkpoint=str(checkpoint(tmp_path, 1)))
    finally:
        logging.getLogger("transformers").propagate = False
    assert "callbacks not included" not in caplog.text
    assert "rollgen" in resumed.state.stateful_callbacks
    with pytest.raises(UsageError, match="seed was 42, is 5"):
        make_trainer(stored, restore_callback_states_from_checkpoint=True, seed=5).train(
            resume_from_checkpoint=str(checkpoint(tmp_path, 1))
        )


def test_a_checkpoint_without_an_order_is_refused(tmp_path: Path, stored: Path, make_trainer: Train) -> None:
    """As plain TRL makes them."""
    make_trainer(stored, save_strategy="steps", save_steps=1, max_steps=1).train()
    path = checkpoint(tmp_path, 1) / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["rollgen"]
    path.write_text(json.dumps(state))
    with pytest.raises(UsageError, match=r"step 1 does not say which samples were used, .*: load its weights"):
        make_trainer(stored).train(resume_from_checkpoint=str(path.parent))


def checkpoint(tmp_path: Path, step: int) -> Path:
    """Where `make_trainer` has it."""
    return tmp_path / "output" / f"checkpoint-{step}"


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        pytest.param({"save_strategy": "steps", "save_steps": 2}, 2, id="regular"),
        pytest.param({"save_strategy": "steps", "save_steps": 3, "max_steps": 4}, 4, id="last"),
        pytest.param({"save_strategy": "steps", "save_steps": 3}, None, id="between-batches"),
        pytest.param({"save_strategy": "epoch"}, None, id="epochs"),
        pytest.param({"save_strategy": "no", "max_steps": 4}, None, id="none"),
    ],
)
def test_checkpoints_that_will_be_refused_are_told(
    stored: Path, make_trainer: Train, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], step: int | None
) -> None:
    """When training begins; three steps are made of a generation batch, which is an epoch."""
    with caplog.at_level(logging.WARNING):
        make_trainer(stored, steps_per_generation=3, num_train_epochs=2, **changes).train()
    told = [record.getMessage() for record in caplog.records if "amid a generation batch" in record.getMessage()]
    assert [line.startswith(f"the checkpoint of step {step} will be amid") for line in told] == [True] * (
        step is not None
    )


def test_ratios_of_a_training_that_broke_off_are_forgotten(stored: Path, make_trainer: Train) -> None:
    """After two steps that were not logged: the next one logs those of its own step alone."""
    calls = count()

    def reward(completions: list[str], **_: Any) -> list[float]:
        if next(calls) == 2:
            raise InterruptedError
        return [0.0, 1.0] * (len(completions) // 2)

    trainer = make_trainer(stored, reward, logging_steps=9)
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.args.max_steps = trainer.args.logging_steps = 1
    trainer.train()
    alone = make_trainer(stored, reward, max_steps=1)
    alone.train()
    name = "sampling/importance_sampling_ratio/mean"
    assert logged(trainer, name) == pytest.approx(logged(alone, name), rel=1e-5)


def test_a_second_training_begins_with_whole_batches(stored: Path, make_trainer: Train) -> None:
    """The first one ended amid a generation batch; the second one uses every sample once."""
    trainer = make_trainer(stored, steps_per_generation=3, max_steps=1)
    trainer.train()
    trainer.used.clear()
    trainer.args.max_steps = 3
    trainer.train()
    used = [key for keys in trainer.used for key in keys]
    assert len(used) == len(set(used)) == 12
