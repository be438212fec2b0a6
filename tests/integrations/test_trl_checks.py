"""What is refused before TRL trains, and by which words."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from models.rewards import write_rewards
from models.trl_training import Train, first_token
from packaging.specifiers import SpecifierSet
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import rollgen
from rollgen.errors import DatasetError, Unreadable, UsageError
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.integrations import trl_checks
from rollgen.integrations.trl_checks import check_tokenizer
from rollgen.prompts.fingerprint import tokenizer_sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"use_vllm": True}, r"GRPOConfig\(use_vllm=True\): nothing is sampled here", id="vllm"),
        pytest.param({"use_liger_kernel": True}, "supports do not reach its fused loss", id="liger"),
        pytest.param({"remove_unused_columns": True}, "it would remove the numbers", id="columns"),
        pytest.param({"ignore_data_skip": True}, "would use the samples of its epoch again", id="data-skip"),
        pytest.param({"loss_type": "dr_grpo"}, "divides by max_completion_length: set it", id="dr-grpo"),
        pytest.param({"incomplete_groups": "Drop"}, 'incomplete_groups=\'Drop\': "raise" or "drop"', id="groups"),
        pytest.param({"tools": [len]}, "tools: prompts and completions are those of `rollouts`", id="tools"),
        pytest.param({"rollout_func": len}, "rollout_func: prompts and completions are", id="rollout-func"),
        pytest.param({"train_dataset": object()}, "train_dataset: prompts and completions are", id="train-dataset"),
        pytest.param({"max_completion_length": 7}, r"a completion has 8 tokens, more than .*length=7\)", id="length"),
        pytest.param({"num_generations": 4}, "6 prompts have a number of samples that num_generations=4", id="group"),
        pytest.param(
            {"per_device_train_batch_size": 14}, "6 groups .* do not fill a generation batch of 7", id="batch"
        ),
        pytest.param(
            {"accelerator_config": {"split_batches": True}},
            r"accelerator_config=\{'split_batches': True\}: processes would be dealt other samples",
            id="split-batches",
        ),
        pytest.param(
            {"accelerator_config": {"dispatch_batches": True}},
            r"accelerator_config=\{'dispatch_batches': True\}",
            id="dispatch-batches",
        ),
        pytest.param(
            {"eval_dataset": object()}, "would be cut at transformers' default of 20 tokens: set it", id="evaluation"
        ),
        pytest.param({"rewards": 3}, "^rewards must be a name like 'correct'", id="no-name"),
        pytest.param({"rewards": None, "reward_funcs": []}, "no reward: give reward_funcs", id="none-for-a-name"),
        pytest.param({"reward_funcs": []}, "no reward: give reward_funcs", id="no-reward"),
        pytest.param(
            {"reward_funcs": [], "rewards": "right", "eval_dataset": object()},
            "eval_dataset: TRL samples its completions, which have no stored reward",
            id="evaluation-of-stored-rewards",
        ),
    ],
)
def test_what_would_train_otherwise_is_refused(
    stored: Path, make_trainer: Train, changes: dict[str, Any], message: str
) -> None:
    """By one line, before TRL is asked for anything."""
    with pytest.raises(UsageError, match=message):
        make_trainer(stored, **changes)


def test_what_is_no_place_of_rollouts_is_refused(stored: Path, make_trainer: Train) -> None:
    """By the argument's name."""
    for several in ([stored], rollgen.RolloutDataset(stored)):
        with pytest.raises(UsageError, match=r"^rollouts: the directory or URL of one dataset; merge several with"):
            make_trainer(several)
    with pytest.raises(UsageError, match=f"^{stored / 'rollgen.json'}: is a file, not a dataset's directory$"):
        make_trainer(stored / "rollgen.json")


def test_prompts_that_are_only_evaluated_need_a_length_too(stored: Path, make_trainer: Train) -> None:
    """Given to `evaluate`, where no `eval_dataset` was."""
    prompts = Dataset.from_dict({"prompt": ["What is", "Write one"]})
    with pytest.raises(UsageError, match="eval_dataset: without a max_completion_length"):
        make_trainer(stored).evaluate(prompts)


class right:
    """A reward function."""

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return first_token(completion_ids)


@pytest.mark.parametrize("function", [right(), partial(right())], ids=["object", "partial"])
def test_two_rewards_of_one_name_are_refused(stored: Path, make_trainer: Train, function: Any) -> None:
    """By the name that TRL would log them under, of whatever kind a function is."""
    write_rewards(stored, "right", lambda row: 1.0)
    with pytest.raises(UsageError, match="rewards: 'right' is the name of two, which TRL would log as one"):
        make_trainer(stored, function, rewards="right")


def test_data_that_is_dealt_otherwise_is_refused(stored: Path, make_trainer: Train) -> None:
    """Whatever does it: half a micro-batch at a time would be twice as many steps an epoch as a resumed run counts."""
    trainer = make_trainer(stored)
    assert len(trainer.get_train_dataloader()) == 3
    trainer._train_batch_size //= 2
    with pytest.raises(UsageError, match="each process would be dealt 6 batches an epoch and not 3"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize("metadata", ["{", "[1]", '"text"'])
def test_metadata_that_is_damaged(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train, metadata: str
) -> None:
    """Where, and how to find out more."""
    stored = make_dataset(tmp_path / "damaged", shards=1, prompts=2, n=2, metadata=metadata)
    with pytest.raises(DatasetError, match=r"parquet: row group 0: its metadata is no JSON object; `rollgen verify`"):
        make_trainer(stored)


def test_metadata_that_is_null(tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train) -> None:
    """No fields."""
    make_trainer(make_dataset(tmp_path / "null", shards=1, prompts=2, n=2, metadata="null"), max_steps=1).train()


def test_a_tokenizer_that_cannot_be_read(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train
) -> None:
    """Is no damage, and no other tokenizer: one line, as for any file."""
    stored = make_dataset(tmp_path / "loop", shards=1, prompts=2, n=2)
    (stored / "tokenizer").mkdir()
    (stored / "tokenizer" / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(Unreadable, match=r"tokenizer\.json: this machine could not read it: "):
        make_trainer(stored)


def test_another_tokenizer_is_refused(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train, tiny_model: Path
) -> None:
    """Where the dataset has its own: two tokens have changed places. A token more, for padding, is none of them."""
    own = AutoTokenizer.from_pretrained(tiny_model)
    stored = make_dataset(tmp_path / "told", shards=1, prompts=2, n=2, said={"tokenizer_sha256": tokenizer_sha256(own)})
    own.save_pretrained(stored / "tokenizer")
    trainer = make_trainer(stored)
    own.add_special_tokens({"pad_token": "<more>"})
    check_tokenizer(own, trainer.rollouts.index.datasets[0])
    settings = json.loads((stored / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(settings)))
    with pytest.raises(UsageError, match=r"^2 of [\d,]+ ids are other tokens in the trainer's tokenizer"):
        check_tokenizer(other, trainer.rollouts.index.datasets[0])


def test_samples_that_cannot_be_replayed_are_taken_when_asked_for(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train
) -> None:
    """As the loader has it."""
    stored = make_dataset(tmp_path / "biased", shards=1, prompts=2, n=2, replayable=False)
    with pytest.raises(UsageError, match="allow_unreplayable=True"):
        make_trainer(stored)
    make_trainer(stored, allow_unreplayable=True)


def test_a_dataset_without_samples_is_refused(
    tmp_path: Path, make_manifest: Callable[..., Manifest], make_trainer: Train
) -> None:
    """Not as groups that are too few."""
    (tmp_path / "empty").mkdir()
    assert create_manifest(tmp_path / "empty", make_manifest())
    with pytest.raises(UsageError, match="the dataset has no samples that are finished"):
        make_trainer(tmp_path / "empty")


def test_a_narrower_model_is_refused(stored: Path, make_trainer: Train, model: PreTrainedModel) -> None:
    """Supports are over 512 ids."""
    model.resize_token_embeddings(500, mean_resizing=False)
    with pytest.raises(UsageError, match="logits are 500 wide, the rollouts were sampled from 512 ids"):
        make_trainer(stored, model=model)


def test_hidden_states_of_a_model_that_caps_its_logits_are_refused(stored: Path, make_trainer: Train) -> None:
    """Its logits are not what its head makes."""
    sizes = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("gemma2", final_logit_softcapping=0.1, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UsageError, match="from_hidden: gemma2 scales, shifts or caps its logits"):
        make_trainer(stored, model=model, from_hidden=True)
    make_trainer(stored, model=model)


def test_a_version_of_trl_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which are."""
    monkeypatch.setattr(trl_checks, "SUPPORTED", SpecifierSet(">=99,<100"))
    with pytest.raises(UsageError, match=r"^trl \S+: .* pip install 'trl(>=99,<100|<100,>=99)'$"):
        trl_checks.check_version()


def test_without_trl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no package is to be found."""
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError, match=r"^trl is not installed: pip install -e '\.\[trl\]' in the clone"):
        trl_checks.check_version()
