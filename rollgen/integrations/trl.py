"""TRL's GRPOTrainer on stored rollouts: pi_theta is normalised over the support that each token was sampled from.

    trainer = RolloutGRPOTrainer(model, reward_func, args=GRPOConfig(...), rollouts="rollouts/")
    trainer.train()

Loss, clipping, advantages, KL, optimiser, logging and checkpoints are TRL's. What is different:

- Completions are the stored ones. A group is `num_generations` samples of one prompt; in an epoch no sample is used
  twice, on any number of processes and after a restart, and what is left out is said.
- `old_per_token_logps` are the stored log pi_old, and log-probabilities and entropies of the policy and of the
  reference model are those on the support, at the temperature of each sample. So TRL's ratios start at 1.
- The metrics `sampling/sampling_logp_difference/*` and `sampling/importance_sampling_ratio/*`, which TRL logs with
  `use_vllm=True` alone, are those of all tokens of the loss since the last log entry: see `trl_figures.py`.

`eval_dataset` is one of TRL's, of prompts: TRL samples their completions and scores them without supports, as ever.
What would train on something else is refused before training starts: see `trl_checks.py` and `trl_resume.py`.

Costs: the logits of a micro-batch's completions, [B, C, V], and their gradient, of which only those of supports are
read; with `from_hidden` none are made, as in TRL 1.16, and of the head only the rows of supports are multiplied.
Where gradient accumulation is no multiple of the micro-batches of a generation batch, TRL makes a forward pass of each
generation batch for `old_per_token_logps`, which the stored ones then replace. TRL's private methods are overridden,
which is why its version is checked.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from rollgen.integrations.groups import GroupSampler, group_samples
from rollgen.integrations.trl_checks import (
    IncompleteGroups,
    check_batches,
    check_evaluation,
    check_groups,
    check_model,
    check_names,
    check_samples,
    check_settings,
    check_tokenizer,
    check_version,
)
from rollgen.integrations.trl_figures import RatioFigures, partial_figures
from rollgen.integrations.trl_resume import GoesOn, hidden_record, order_of
from rollgen.integrations.trl_rows import ROLLOUTS, stored_completions, stored_reward, trl_rows
from rollgen.integrations.trl_scores import Scores, score_hidden, score_logits
from rollgen.loader.batch import Rollout
from rollgen.loader.dataset import RolloutDataset
from rollgen.loader.rewards import names_of

check_version()
with warnings.catch_warnings():
    # It is about sampling with vLLM in TRL, which is refused here.
    warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
    from accelerate.utils import is_peft_model
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

_LOG = logging.getLogger(__name__)
_SAMPLE: Final = "rollgen.sample"
"""The one column of the training set: numbers of samples in the RolloutDataset."""


@dataclass(slots=True)
class _Replay:
    """What TRL is at."""

    rollouts: list[Rollout]
    """[B], in the order of its rows."""
    logprobs: Tensor | None = None
    """float32 [B, C], the last that it was given, without gradient."""


class RolloutGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` whose completions are those of a dataset.

    model              as TRL has it: a model, or where to load it from
    reward_funcs       as TRL has them, one or several. They are given the fields of the prompt's row by name, and
                       `rollouts`, a Rollout for each completion
    args               `trl.GRPOConfig`. What it says about sampling is not used for stored completions: each was
                       sampled, and is scored, at a temperature of its own
    rollouts           the dataset's directory or URL
    rewards            names of stored rewards (`rollgen score`): each is one more reward function, after those given
    incomplete_groups  of samples that are left over because `num_generations` does not divide those of their prompt:
                       "raise" refuses, "drop" trains without them
    allow_unreplayable take samples whose relative logits were changed inside the support (penalties, biases)
    from_hidden        score from the last hidden states and the rows of the head that supports list, without logits.
                       For one process, and for a head that is a linear layer and nothing more
    options            of GRPOTrainer

    Raises UsageError before training for what does not fit, DatasetError for a damaged dataset.
    """

    rollout_func: Callable[..., dict[str, Any]] | None

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        *,
        args: GRPOConfig,
        rollouts: str | os.PathLike[str],
        rewards: str | Sequence[str] | None = (),
        incomplete_groups: IncompleteGroups = "raise",
        allow_unreplayable: bool = False,
        from_hidden: bool = False,
        **options: Any,
    ) -> None:
        functions = (
            [*reward_funcs] if isinstance(reward_funcs, list | tuple) else [reward_funcs] if reward_funcs else []
        )
        names = names_of(rewards)
        check_settings(args, options, functions, names, rollouts)
        self.rollouts = RolloutDataset(rollouts, rewards=names, allow_unreplayable=allow_unreplayable)
        index = self.rollouts.index
        groups = group_samples(index.prompt_index, index.sample_index, args.num_generations)
        check_groups(groups, args, incomplete_groups)
        self._survey = check_samples(index, args.max_completion_length)
        self._groups = groups.samples
        self._from_hidden = from_hidden
        self._has_functions = bool(functions)
        self._replay: _Replay | None = None
        self._ratios = RatioFigures()
        if (classes := options.get("reward_processing_classes")) is not None:
            given = classes if isinstance(classes, list | tuple) else [classes]
            options["reward_processing_classes"] = [*given, *[None] * len(names)]
        super().__init__(
            model,
            [*functions, *map(stored_reward, names)],
            args=args,
            train_dataset=Dataset.from_dict({_SAMPLE: np.arange(len(self.rollouts))}),
            **options,
        )
        check_names(self.reward_func_names, names)
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self._forward_names = inspect.signature(base.forward).parameters.keys()
        check_model(self, self.rollouts.vocab_size, from_hidden=from_hidden)
        check_tokenizer(self._tokenizer, index.datasets[0])
        self.add_callback(GoesOn(order_of(index, args), self._batch_uses, self._updates))
        self._tell_left_out(len(groups.left_out))

    def train(self, *args: Any, **options: Any) -> Any:
        """As TRL has it, and on whole generation batches too when there was a training before."""
        self._step, self._buffered_inputs, self._ratios = 0, None, RatioFigures()
        return super().train(*args, **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As TRL has it, of as many batches as the checkpoints of a run are counted in. Raises UsageError."""
        loader: DataLoader[Any] = super().get_train_dataloader()
        check_batches(len(loader), self._micro_batches)
        return loader

    def load_rollouts(self, numbers: Sequence[int]) -> list[Rollout]:
        """The samples of these numbers, in this order. A subclass may change what is trained on."""
        return self.rollouts.__getitems__(numbers)

    @property
    def _batch_groups(self) -> int:
        """Groups of a generation batch."""
        return int(self.args.generation_batch_size // self.num_generations)

    @property
    def _batch_uses(self) -> int:
        """Micro-batches that a process makes of a generation batch, over all iterations."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def _micro_batches(self) -> int:
        """Those of an epoch, in each process."""
        return len(self._groups) // self._batch_groups * self._batch_uses

    @property
    def _updates(self) -> int:
        """Optimiser steps of an epoch, as transformers counts them."""
        return -(-self._micro_batches // int(self.args.gradient_accumulation_steps))

    def _tell_left_out(self, samples: int) -> None:
        if samples:
            _LOG.warning("%s samples fill no group of %s and are not trained on", samples, self.num_generations)
        if rest := len(self._groups) % self._batch_groups:
            which = "others each time" if self.args.shuffle_dataset else "always the last"
            _LOG.warning(
                "each epoch leaves out %s of %s groups, which fill no generation batch of %s: %s",
                *(rest, len(self._groups), self._batch_groups, which),
            )

    def _load_callback_state(self) -> None:
        """transformers' own, which takes what it is not shown for no state of a callback that is missing."""
        with hidden_record(self.state):
            super()._load_callback_state()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> GroupSampler:
        return GroupSampler(
            self._groups,
            batch_groups=self._batch_groups,
            repeats=self._batch_uses,
            shuffle=bool(self.args.shuffle_dataset),
            seed=self.args.seed,
            epoch=lambda: int(self.state.global_step) // self._updates,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if _SAMPLE not in inputs[0]:  # prompts of an eval_dataset, which may have been given to `evaluate`
            check_evaluation(self.args, inputs[0].keys(), has_functions=self._has_functions)
            return dict(super()._generate_and_score_completions(inputs))
        rollouts = self.load_rollouts([row[_SAMPLE] for row in inputs])
        with self._replaying(rollouts):
            rows = trl_rows(
                rollouts,
                self._tokenizer.decode,
                fields=self._survey.fields,
                conversational=self._survey.all_messages,
            )
            output = dict(super()._generate_and_score_completions(rows))
        output[ROLLOUTS] = rollouts  # TRL shuffles and splits a list as it does tensors
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        if self.args.mask_truncated_completions:
            self._mask_truncated(output, rollouts)
        return output

    def _mask_truncated(self, output: dict[str, Any], rollouts: Sequence[Rollout]) -> None:
        """Take completions that did not come to an end out of the loss.

        TRL's own rule, that the last token is EOS, takes those for cut that a stop string or another stop id ended.
        """
        mask = output["completion_mask"]
        ended = torch.tensor([rollout.finish_reason == "stop" for rollout in rollouts], device=mask.device)
        output["completion_mask"] = mask * ended.unsqueeze(1)
        output["num_items_in_batch"] = self.accelerator.gather(output["completion_mask"].sum()).sum()

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if ROLLOUTS not in inputs:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        with self._replaying(inputs[ROLLOUTS]) as replay:
            loss: Tensor = super()._compute_loss(model, inputs)
        difference = (replay.logprobs - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()]
        self._ratios.add(self.accelerator.gather(partial_figures(difference)))
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, of which the means over micro-batches are joined by the figures of all tokens."""
        if self.model.training:
            self._metrics["train"].update({name: [value] for name, value in self._ratios.take().items()})
        super().log(logs, start_time)

    @contextmanager
    def _replaying(self, rollouts: list[Rollout]) -> Iterator[_Replay]:
        """What TRL does meanwhile is about these, in this order."""
        self._replay = _Replay(rollouts)
        self.rollout_func = partial(stored_completions, rollouts)
        self.mask_truncated_completions = False  # `_mask_truncated` does it
        try:
            yield self._replay
        finally:
            self._replay = self.rollout_func = None
            self.mask_truncated_completions = self.args.mask_truncated_completions

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """log pi_theta and entropies of the completions on their supports, [B, C], and a mixture's auxiliary loss.

        `input_ids` and `attention_mask` are [B, L]; completions are the last C = `logits_to_keep`. `batch_size` rows
        at a time go through the model.
        """
        if self._replay is None:
            scored: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal,
            )
            return scored
        scores, losses = [], []
        size = batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            part = slice(start, start + size)
            inputs = self._model_inputs(input_ids[part], attention_mask[part], logits_to_keep, compute_aux_loss)
            completion_ids, rollouts = input_ids[part, -logits_to_keep:], self._replay.rollouts[part]
            if self._from_hidden:
                scores.append(self._score_hidden(model, inputs, completion_ids, rollouts))
            else:
                with self.accelerator.autocast():
                    outputs = model(**inputs)
                scores.append(score_logits(outputs.logits, completion_ids, rollouts))
                if compute_aux_loss:
                    losses.append(outputs.aux_loss)
        logprobs, entropies = map(torch.cat, zip(*scores, strict=True))
        self._replay.logprobs = logprobs.detach()
        if not self._entropy_bonus_enabled:
            entropies = entropies.detach()
        return logprobs, entropies if compute_entropy else None, torch.stack(losses).mean() if losses else None

    def _model_inputs(
        self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, compute_aux_loss: bool
    ) -> dict[str, Any]:
        """As TRL's own, and `position_ids` that count from the prompt's first token, as those did that it was sampled
        with: left to the model, they would count the padding too."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if "position_ids" in self._forward_names:
            inputs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
        if "logits_to_keep" in self._forward_names and not self._from_hidden:
            inputs["logits_to_keep"] = logits_to_keep + 1  # the place before the first token predicts it
        if compute_aux_loss:
            inputs["output_router_logits"] = True
        return inputs

    def _score_hidden(
        self, model: torch.nn.Module, inputs: dict[str, Any], completion_ids: Tensor, rollouts: Sequence[Rollout]
    ) -> Scores:
        """From the backbone alone, in the precision that it has in the whole model.

        The head is multiplied in that of its weights, under autocast too, where logits would be rounded.
        """
        whole = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():
            hidden = whole.base_model(**inputs).last_hidden_state
        return score_hidden(hidden, whole.get_output_embeddings(), completion_ids, rollouts)
