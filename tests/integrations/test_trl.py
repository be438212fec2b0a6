"""TRL's own trainer on stored rollouts: its figures against those of batches, and what it uses when."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.rewards import write_rewards
from models.trl_training import Train, first_token, logged
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rollgen
from rollgen.errors import UsageError
from rollgen.format.commit import WriterSlot
from rollgen.format.manifest import Manifest, create_manifest
from rollgen.format.writer import ShardWriter
from rollgen.ops import support_logprobs
from rollgen.rollouts import Completion


@torch.no_grad()
def scores(model: PreTrainedModel, rollouts: Path) -> dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]:
    """log pi_theta, log pi_old and the entropy of each sample's tokens, [T], one sample at a time, without padding."""
    found = {}
    for rollout in rollgen.RolloutDataset(rollouts):
        batch = rollgen.collate([rollout])
        logits = model.eval()(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        scored = support_logprobs(
            logits.flatten(0, 1),
            batch.support,
            batch.response_ids(),
            batch.response_temperature(),
            rows=batch.response_places - 1,
            entropy=True,
        )
        found[rollout.prompt_id, rollout.sample_index] = scored.logprobs, rollout.logprobs, scored.entropy
    return found


def mixed_dataset(
    directory: Path, make_completion: Callable[..., Completion], manifest: Manifest, **changes: Any
) -> Path:
    """3 prompts, 2 samples each: of 3 or 11 tokens, with temperatures of their own, one of them not truncated."""
    assert create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for prompt in range(3):
            for number in range(2):
                full = (prompt, number) == (1, 0)
                made = make_completion(prompt, number, tokens=3 + 8 * number, full=full, **changes)
                own = {"temperature": 0.5 + prompt / 4} | ({"top_k": 0, "top_p": 1.0} if full else {})
                writer.add(replace(made, sampling=replace(made.sampling, **own)))
    return directory


@pytest.mark.parametrize("from_hidden", [False, True])
def test_metrics_are_those_of_the_supports(
    tmp_path: Path,
    make_trainer: Train,
    model: PreTrainedModel,
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
    from_hidden: bool,
) -> None:
    """TRL's padded batch gives what samples give alone: each at its own temperature, on its own supports.

    One step of all samples in one micro-batch, so that TRL's means are those over all tokens.
    """
    (tmp_path / "mixed").mkdir()
    stored = mixed_dataset(tmp_path / "mixed", make_completion, make_manifest())
    trainer = make_trainer(stored, per_device_train_batch_size=6, max_steps=1, from_hidden=from_hidden)
    expected = scores(model, stored)
    trainer.train()
    new, old, entropy = (torch.cat(parts) for parts in zip(*expected.values(), strict=True))
    assert len(new) == 3 * (3 + 11)
    ratio = (new - old).exp()
    figures = {
        "sampling/importance_sampling_ratio/mean": ratio.mean(),
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
        "sampling/sampling_logp_difference/mean": (new - old).abs().mean(),
        "sampling/sampling_logp_difference/max": (new - old).abs().max(),
        "entropy": entropy.mean(),
    }
    for name, value in figures.items():
        assert logged(trainer, name) == [pytest.approx(value.item(), rel=2e-4)], name
    advantages = zip(expected.values(), advantages_of(stored), strict=True)
    signs = torch.cat([torch.full_like(new, advantage) for (new, _, _), advantage in advantages])
    clipped = ((ratio < 0.8) & (signs < 0)) | ((ratio > 1.2) & (signs > 0))
    assert logged(trainer, "clip_ratio/region_mean") == [pytest.approx(clipped.float().mean().item())]
    assert 0.1 < clipped.float().mean() < 0.9


def advantages_of(stored: Path) -> list[float]:
    """The sign of each sample's advantage in its group of two."""
    rewards = [first_token([rollout.token_ids.tolist()])[0] for rollout in rollgen.RolloutDataset(stored)]
    means = [sum(rewards[start : start + 2]) / 2 for start in range(0, len(rewards), 2)]
    return [reward - means[number // 2] for number, reward in enumerate(rewards)]


def test_logits_and_hidden_states_train_the_same_weights(stored: Path, make_trainer: Train, tiny_model: Path) -> None:
    """Two steps of each; the gradient goes through either op."""
    trained = []
    for from_hidden in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        make_trainer(stored, model=model, optim="sgd", learning_rate=0.1, max_steps=2, from_hidden=from_hidden).train()
        trained.append(model)
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for name, parameter in trained[0].named_parameters():
        torch.testing.assert_close(parameter, trained[1].get_parameter(name), rtol=1e-4, atol=1e-6)
    moved = (trained[0].lm_head.weight - before.lm_head.weight).abs().max()
    assert moved > 1e-4


def test_reference_model_is_scored_on_the_support(
    stored: Path, make_trainer: Train, model: PreTrainedModel, tiny_model: Path
) -> None:
    """TRL's KL, the mean of exp(d) - d - 1 with d = log pi_ref - log pi_theta, of log-probabilities on the support."""
    reference = scores(model, stored)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    policy = scores(model, stored)
    trainer = make_trainer(stored, per_device_train_batch_size=12, max_steps=1, beta=0.1, use_bias_correction_kl=False)
    trainer.train()
    difference = torch.cat([reference[key][0] - policy[key][0] for key in policy])
    expected = (difference.expm1() - difference).mean().item()
    assert expected > 0.01
    assert logged(trainer, "kl") == [pytest.approx(expected, rel=1e-3)]


@pytest.mark.parametrize(
    ("changes", "uses", "loads"),
    [
        pytest.param({}, 1, 3, id="plain"),
        pytest.param({"gradient_accumulation_steps": 3}, 1, 1, id="accumulation"),
        pytest.param({"steps_per_generation": 3}, 1, 1, id="one-generation-many-steps"),
        pytest.param({"num_iterations": 2}, 2, 3, id="iterations"),
        pytest.param({"num_iterations": 2, "steps_per_generation": 3}, 2, 1, id="both"),
        pytest.param({"shuffle_dataset": False}, 1, 3, id="in-order"),
        pytest.param({"dataloader_num_workers": 1}, 1, 3, id="worker"),
    ],
)
def test_every_sample_is_used_once_an_epoch(
    stored: Path, make_trainer: Train, changes: dict[str, Any], uses: int, loads: int
) -> None:
    """As often as `num_iterations` says, in two epochs of 12 samples, 4 to a micro-batch; groups are loaded whole."""
    trainer = make_trainer(stored, num_train_epochs=2, **changes)
    trainer.train()
    assert len(trainer.loaded) == 2 * loads
    for numbers in trainer.loaded:
        assert all(second == first + 1 for first, second in zip(numbers[::2], numbers[1::2], strict=True))
    micro_batches = len(trainer.used) // 2
    for epoch in (trainer.used[:micro_batches], trainer.used[micro_batches:]):
        counts = Counter(key for keys in epoch for key in keys)
        assert counts == dict.fromkeys(((f"p{prompt}", number) for prompt in range(6) for number in range(2)), uses)
    if not changes.get("shuffle_dataset", True):
        assert [number for numbers in trainer.loaded for number in numbers] == [*range(12), *range(12)]


def test_a_prompt_with_more_samples_is_several_groups(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train
) -> None:
    """4 samples of each of 3 prompts are 6 groups of 2; advantages are those of the group."""
    stored = make_dataset(tmp_path / "four", shards=1, prompts=3, n=4)
    trainer = make_trainer(stored)
    trainer.train()
    assert Counter(number for numbers in trainer.loaded for number in numbers) == dict.fromkeys(range(12), 1)


def test_samples_without_a_group_are_refused_or_dropped(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """3 samples of each of 4 prompts, in groups of 2: the last one of each prompt is left."""
    stored = make_dataset(tmp_path / "three", shards=1, prompts=4, n=3)
    with pytest.raises(
        UsageError, match=r"^4 prompts have .* num_generations=2 does not divide: 4 samples would never"
    ):
        make_trainer(stored)
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(stored, incomplete_groups="drop")
    assert "4 samples fill no group of 2 and are not trained on" in caplog.text
    trainer.train()
    assert sorted(number for numbers in trainer.loaded for number in numbers) == [0, 1, 3, 4, 6, 7, 9, 10]


def test_groups_that_fill_no_batch_are_told(
    stored: Path, make_trainer: Train, caplog: pytest.LogCaptureFixture
) -> None:
    """6 groups, 4 to a generation batch: others are left out in each epoch when it is shuffled."""
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(stored, per_device_train_batch_size=8, num_train_epochs=4)
    assert "each epoch leaves out 2 of 6 groups, which fill no generation batch of 4: others each time" in caplog.text
    trainer.train()
    assert [len(numbers) for numbers in trainer.loaded] == [8] * 4
    assert len(set(map(frozenset, trainer.loaded))) > 1


def test_cut_completions_are_masked_by_their_finish_reason(
    tmp_path: Path,
    make_trainer: Train,
    model: PreTrainedModel,
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
) -> None:
    """Not by their last token, which hardly any of these has as EOS: second samples are cut, first ones ended."""
    directory = tmp_path / "cut"
    directory.mkdir()
    manifest = make_manifest()
    assert create_manifest(directory, manifest)
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for prompt in range(3):
            for number, reason in enumerate(("stop", "length")):
                made = make_completion(prompt, number)
                sampling = replace(made.sampling, max_tokens=8)
                writer.add(replace(made, finish_reason=reason, sampling=sampling))
    trainer = make_trainer(directory, per_device_train_batch_size=6, max_steps=1, mask_truncated_completions=True)
    expected = scores(model, directory)
    trainer.train()
    ended = torch.cat([(new - old).exp() for (_, number), (new, old, _) in expected.items() if number == 0])
    name = "sampling/importance_sampling_ratio/mean"
    assert logged(trainer, name) == [pytest.approx(ended.mean().item(), rel=2e-4)]


def test_reward_functions_are_given_what_the_row_had(stored: Path, make_trainer: Train) -> None:
    """The prompt as given, the fields of its row, and the rollouts themselves; completions are decoded by TRL."""
    seen: list[dict[str, Any]] = []

    def reward(**given: Any) -> list[float]:
        seen.append(given)
        return [float(number) for number in range(len(given["prompts"]))]

    make_trainer(stored, reward, max_steps=1, shuffle_dataset=False).train()
    (given,) = seen
    assert given["prompts"] == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]
    assert given["answer"] == [0, 0, 1, 1]
    assert [rollout.sample_index for rollout in given["rollouts"]] == [0, 1, 0, 1]
    assert given["completion_ids"] == [rollout.token_ids.tolist() for rollout in given["rollouts"]]
    assert all(isinstance(completion, str) for completion in given["completions"])


def test_fields_that_only_some_prompts_have_are_there_for_all(
    tmp_path: Path,
    make_trainer: Train,
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
) -> None:
    """None in a batch of prompts that have none: what a reward function takes does not depend on the order."""
    (tmp_path / "some").mkdir()
    manifest = make_manifest()
    assert create_manifest(tmp_path / "some", manifest)
    with WriterSlot(tmp_path / "some", "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for prompt, metadata in enumerate(['{"answer": 3, "self": 1}', '{"other": 1}']):
            for number in range(2):
                writer.add(make_completion(prompt, number, metadata=metadata))
    seen = []

    def reward(answer: list[int | None], other: list[int | None], **given: Any) -> list[float]:
        seen.append((answer, other, "self" in given))
        return [0.0, 1.0]

    make_trainer(tmp_path / "some", reward, per_device_train_batch_size=2, shuffle_dataset=False).train()
    assert seen == [([3, 3], [None, None], False), ([None, None], [1, 1], False)]


def test_messages_make_completions_messages(
    tmp_path: Path, make_dataset: Callable[..., Path], make_trainer: Train
) -> None:
    """As TRL has it for conversational data sets; names that mean something to TRL are not handed on."""
    messages = [{"role": "user", "content": "What is the sum?"}]
    metadata = json.dumps({"image": "a.png", "prompts": 1, "level": [1, {"x": None}]})
    stored = make_dataset(tmp_path / "chat", shards=1, prompts=2, n=2, prompt=json.dumps(messages), metadata=metadata)
    seen: list[dict[str, Any]] = []

    def reward(**given: Any) -> list[float]:
        seen.append(given)
        return [0.0, 1.0] * 2

    make_trainer(stored, reward, max_steps=1).train()
    (given,) = seen
    assert given["prompts"] == [messages] * 4
    assert [completion[0]["role"] for completion in given["completions"]] == ["assistant"] * 4
    assert given["level"] == [[1, {"x": None}]] * 4
    assert "image" not in given
    assert given["rollouts"][0].metadata == metadata


def test_stored_rewards_are_reward_functions(stored: Path, make_trainer: Train) -> None:
    """Under their names, after those given, in the order of the weights: 1 x 0 or 1, 2 x a tenth of the prompt."""
    write_rewards(stored, "right", lambda row: {"reward": row["sample_index"], "format": row["prompt_index"] / 10})
    trainer = make_trainer(
        stored, [], rewards=("right", "right.format"), reward_weights=[1.0, 2.0], shuffle_dataset=False, max_steps=1
    )
    trainer.train()
    assert logged(trainer, "rewards/right/mean") == [0.5]
    assert logged(trainer, "rewards/right.format/mean") == [pytest.approx(0.05)]  # prompts 0 and 1
    assert logged(trainer, "reward") == [pytest.approx(0.6)]
    with pytest.raises(UsageError, match="rollgen score"):
        make_trainer(stored, [], rewards="wrong")
    with pytest.raises(UsageError, match="rewards: 'right' is the name of two"):
        make_trainer(stored, [], rewards=("right", "right"))
    assert make_trainer(
        stored, (first_token,), rewards="right", reward_processing_classes=[None]
    ).reward_func_names == [
        "first_token",
        "right",
    ]


def test_evaluation_samples_prompts_as_trl_does(stored: Path, make_trainer: Train) -> None:
    """Of an `eval_dataset`, with the trained model; training goes on with stored completions."""
    from datasets import Dataset

    prompts = Dataset.from_dict({"prompt": ["What is", "Write one", "The sea", "The dog"]})
    trainer = make_trainer(
        stored,
        max_steps=2,
        eval_dataset=prompts,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        max_completion_length=16,
    )
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 2
    assert all(1 <= length <= 16 for length in logged(trainer, "eval_completions/mean_length"))
    assert logged(trainer, "completions/mean_length") == [8.0, 8.0]
    assert len(trainer.loaded) == 2
    assert not logged(trainer, "eval_sampling/importance_sampling_ratio/mean")


def test_prompts_of_two_kinds_are_text(
    tmp_path: Path,
    make_trainer: Train,
    make_completion: Callable[..., Completion],
    make_manifest: Callable[..., Manifest],
    tiny_model: Path,
) -> None:
    """TRL makes completions of a batch messages or text by its first prompt: here that does not depend on the order."""
    directory = tmp_path / "kinds"
    directory.mkdir()
    manifest = make_manifest()
    assert create_manifest(directory, manifest)
    given = ['[{"role": "user", "content": "x"}]', "[1] is a list", None]
    with WriterSlot(directory, "w0") as slot, ShardWriter(slot, manifest, commit_interval=math.inf) as writer:
        for prompt, text in enumerate(given):
            for number in range(2):
                writer.add(make_completion(prompt, number, prompt=text))
    seen: list[dict[str, Any]] = []

    def reward(**told: Any) -> list[float]:
        seen.append(told)
        return [0.0, 1.0] * 3

    make_trainer(directory, reward, per_device_train_batch_size=6, shuffle_dataset=False, max_steps=1).train()
    decode = AutoTokenizer.from_pretrained(tiny_model).decode
    ids = [make_completion(prompt).prompt_token_ids for prompt in range(3)]
    expected = [decode(ids[0]), "[1] is a list", decode(ids[2])]
    assert seen[0]["prompts"] == [prompt for prompt in expected for _ in range(2)]
    assert all(isinstance(completion, str) for completion in seen[0]["completions"])
