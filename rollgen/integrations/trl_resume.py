"""Which checkpoints of TRL a run goes on from: those between two generation batches, of the order that it would make.

Of the samples that were used a checkpoint has only their number, as steps: going on skips as many of the order as it
is now. So what the order follows from is kept in each checkpoint (in `trainer_state.json`), and compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from transformers import TrainerCallback

from rollgen.errors import UsageError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from trl import GRPOConfig

    from rollgen.loader.index import Index

_LOG = logging.getLogger(__name__)
_RECORD: Final = "rollgen"
"""Under which key of the state's `stateful_callbacks` the order is kept."""
_ROLLOUTS: Final = "rollouts"
_REWARDS: Final = "rewards"
_SETTINGS: Final = (
    "num_generations",
    "generation_batch_size",
    "steps_per_generation",
    "num_iterations",
    "gradient_accumulation_steps",
    "shuffle_dataset",
    "seed",
)

Order = Mapping[str, Any]
"""Fingerprints of the samples and of their stored rewards, by name, and these settings of GRPOConfig: JSON values."""


def order_of(index: Index, args: GRPOConfig) -> Order:
    """What the order of the samples, and the step that each is used in, follow from, and what they are worth.

    Not where they are stored: groups are in the order of the plan.
    """
    settings = {name: getattr(args, name) for name in _SETTINGS}
    return {_ROLLOUTS: index.samples_fingerprint(), _REWARDS: index.reward_fingerprints(), **settings}


@contextmanager
def hidden_record(state: TrainerState) -> Iterator[None]:
    """Without the order among the states of callbacks, each of which transformers takes for a class that it has."""
    record = state.stateful_callbacks.pop(_RECORD, None)
    try:
        yield
    finally:
        if record is not None:
            state.stateful_callbacks[_RECORD] = record


class GoesOn(TrainerCallback):  # type: ignore[misc]
    """Refuses to resume where samples would be used twice and others not at all, and warns of checkpoints like that.

    Amid the micro-batches of a generation batch that is so because TRL shuffles these, and keeps no record of it.
    """

    def __init__(self, order: Order, batch_uses: int, updates: int) -> None:
        """`batch_uses` micro-batches are made of a generation batch; an epoch has `updates` optimiser steps."""
        self._order = order
        self._batch_uses = batch_uses
        self._updates = updates
        self._whole = batch_uses // math.gcd(batch_uses, order["gradient_accumulation_steps"])
        """After a multiple of so many steps of an epoch all generation batches are used up."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Raises UsageError; a training that begins is at step 0."""
        if state.global_step:
            self._check_order(state.global_step, state.stateful_callbacks.get(_RECORD))
            self._check_place(state.global_step)
        state.stateful_callbacks[_RECORD] = self._order
        if state.is_world_process_zero and args.save_strategy != "no":
            self._warn_of_saves(state, regular=args.save_strategy == "steps")

    def _check_order(self, step: int, stored: Order | None) -> None:
        if stored is None or _REWARDS not in stored:
            raise UsageError(
                f"the checkpoint of step {step} does not say which samples were used, or with which rewards: load its "
                "weights as the model of a new run"
            )
        if differences := self._differences(stored):
            raise UsageError(
                f"the checkpoint of step {step} is of another order of samples ({'; '.join(differences)}): resume "
                "with what it was made with, or load its weights as the model of a new run"
            )

    def _differences(self, stored: Order) -> list[str]:
        was, now = stored[_REWARDS], self._order[_REWARDS]
        rewards = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
        return [
            *["the rollouts are others, or more or fewer"] * (stored.get(_ROLLOUTS) != self._order[_ROLLOUTS]),
            *(f"the stored rewards {name!r} are others, or of other tokens" for name in rewards),
            *(
                f"{name} was {stored.get(name)!r}, is {self._order[name]!r}"
                for name in _SETTINGS
                if stored.get(name) != self._order[name]
            ),
        ]

    def _check_place(self, step: int) -> None:
        if self._is_amid(step):
            whole = step - step % self._updates % self._whole
            before = f"resume from one like that of step {whole}" if whole else "none before it can be resumed from"
            raise UsageError(
                f"the checkpoint of step {step} is amid a generation batch, whose samples TRL has shuffled: {before}, "
                f"and save with {self._advice}"
            )

    def _warn_of_saves(self, state: TrainerState, *, regular: bool) -> None:
        """Of the first checkpoint, regular or that of the end, which will be refused."""
        saves = range(state.save_steps, state.max_steps, state.save_steps) if regular else ()
        for step in chain(saves, [state.max_steps]):
            if self._is_amid(step):
                _LOG.warning(
                    "the checkpoint of step %s will be amid a generation batch and cannot be resumed from: save with "
                    "%s, and end there (max_steps)",
                    *(step, self._advice),
                )
                return

    def _is_amid(self, step: int) -> bool:
        return step % self._updates % self._whole != 0

    @property
    def _advice(self) -> str:
        """How checkpoints are made that can be resumed from."""
        steps = f" or save_steps={self._whole}" if self._updates % self._whole == 0 else ""
        return f'save_strategy="epoch"{steps}'
