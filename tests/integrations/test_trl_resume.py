"""TRL's trainer on stored rollouts, begun again: from a checkpoint, or a second time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.trl_training import Recorder, Train
from transformers import AutoModelForCausalLM

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


def test_a_checkpoint_without_an_order_is_refused(tmp_path: Path, stored: Path, make_trainer: Train) -> None:
    """As plain TRL makes them."""
    make_trainer(stored, save_strategy="steps", save_steps=1, max_steps=1).train()
    path = checkpoint(tmp_path, 1) / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["rollgen"]
    path.write_text(json.dumps(state))
    with pytest.raises(UsageError, match="step 1 does not say which samples were used: load its weights"):
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


def test_a_second_training_begins_with_whole_batches(stored: Path, make_trainer: Train) -> None:
    """The first one ended amid a generation batch; the second one uses every sample once."""
    trainer = make_trainer(stored, steps_per_generation=3, max_steps=1)
    trainer.train()
    trainer.used.clear()
    trainer.args.max_steps = 3
    trainer.train()
    used = [key for keys in trainer.used for key in keys]
    assert len(used) == len(set(used)) == 12
