"""`Rollout`, one sample as tensors, and `RolloutBatch`, B of them ready for a training step.

Axes: P prompt tokens, T generated tokens, L = longest P + T of the batch, B rollouts, N generated tokens of the batch,
nnz support ids, V vocabulary of the logits. Everything about a generated token stands at that token's own place in
`input_ids`; the logits that predicted it stand one place before, and the methods that take logits do that shift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rollgen.errors import UsageError
from rollgen.ops import Support, support_logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One completion with its prompt. Per-token tensors align with `token_ids`; text columns are as stored."""

    prompt_id: str
    sample_index: int
    prompt_index: int
    prompt_ids: Tensor
    """int64 [P]"""
    token_ids: Tensor
    """int64 [T]"""
    logprobs: Tensor
    """float32 [T], log pi_old: after temperature, normalised over the support."""
    support: Support
    """T rows."""
    temperature: float
    """Divides the logits."""
    finish_reason: str
    stop_reason: str | None
    """JSON text; None for EOS and length."""
    top_p: float
    min_p: float
    top_k: int
    max_tokens: int
    seed: int
    replayable: bool
    text: str | None
    prompt: str | None
    """The prompt as given: text, or messages as JSON text."""
    metadata: str | None
    """All other fields of the prompt's row, as one JSON object text."""
    stored_support_logprobs: Tensor | None = None
    """float32 [nnz], log pi_old of every id of the support; None when the dataset does not store them."""
    generation: int = 0
    """0, or which retry of this sample it is: made again, with a larger max_tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """B rollouts, prompts and responses joined and padded on the right."""

    prompt_id: list[str]
    sample_index: Tensor
    """int64 [B]"""
    generation: Tensor
    """int64 [B]"""
    input_ids: Tensor
    """int64 [B, L]"""
    attention_mask: Tensor
    """bool [B, L], false on padding."""
    response_mask: Tensor
    """bool [B, L], true on generated tokens."""
    logprobs: Tensor
    """float32 [B, L], log pi_old, 0 outside the response."""
    temperature: Tensor
    """float32 [B]"""
    support: Support
    """N rows: one a generated token, in row-major order of `response_mask`, at the token's own place."""
    response_places: Tensor
    """int64 [N], the flat places (b * L + t) of generated tokens: `response_mask` without a wait for the device."""
    vocab_size: int
    """Of the model that sampled; support ids lie below it."""
    finish_reason: list[str]
    text: list[str | None]
    metadata: list[str | None]
    """JSON object texts: what a reward function needs."""
    stored_support_logprobs: Tensor | None = None
    """float32 [nnz], parallel to `support.ids`; None when the dataset does not store them."""

    def __len__(self) -> int:
        return len(self.prompt_id)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RolloutBatch:
        """The same batch with all tensors on another device."""
        return self._moved(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RolloutBatch:
        """A copy in page-locked memory; a DataLoader with `pin_memory=True` calls this."""
        return self._moved(lambda part: part.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> RolloutBatch:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: move(part) for name, part in parts.items() if isinstance(part, Tensor | Support)})

    def support_logprobs(self, logits: Tensor) -> Tensor:
        """log pi_theta of the generated tokens, float32 [B, L], 0 outside the response.

        `logits` [B, L, V] are the model's raw output for `input_ids`, contiguous: those at t - 1 predict the token at
        t, and each is divided by its rollout's temperature. Raises UsageError when they do not fit the batch.
        """
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            raise UsageError(f"logits are {list(logits.shape)}, input_ids {list(self.input_ids.shape)}")
        values = support_logprobs(
            logits.flatten(0, 1),
            self.support,
            self.input_ids.flatten()[self.response_places],
            self.temperature[self.response_places // self.input_ids.shape[1]],
            rows=self.response_places - 1,
        )
        result = values.new_zeros(self.input_ids.numel()).index_copy(0, self.response_places, values)
        return result.view(self.input_ids.shape)


def collate(rollouts: Sequence[Rollout], *, pad_id: int = 0) -> RolloutBatch:
    """Join rollouts into a batch, each with a prompt of one token or more: something predicted the first token.

    Raises UsageError for none, for an empty prompt, or for rollouts of different vocabularies.
    """
    for rollout in rollouts:
        if rollout.prompt_ids.numel() == 0:
            raise UsageError(f"{rollout.prompt_id!r}: the prompt is empty: no logits predict the first token")
    support = Support.cat([rollout.support for rollout in rollouts])
    prompt_lengths = torch.tensor([rollout.prompt_ids.numel() for rollout in rollouts]).unsqueeze(1)
    response_lengths = torch.tensor([rollout.token_ids.numel() for rollout in rollouts]).unsqueeze(1)
    lengths = prompt_lengths + response_lengths
    place = torch.arange(int(lengths.max())).unsqueeze(0)
    attention_mask = place < lengths
    response_mask = attention_mask & (place >= prompt_lengths)

    input_ids = torch.full(attention_mask.shape, pad_id, dtype=torch.int64)
    input_ids[attention_mask] = torch.cat([part for r in rollouts for part in (r.prompt_ids, r.token_ids)])
    logprobs = torch.zeros(attention_mask.shape, dtype=torch.float32)
    logprobs[response_mask] = torch.cat([rollout.logprobs for rollout in rollouts])
    return RolloutBatch(
        prompt_id=[rollout.prompt_id for rollout in rollouts],
        sample_index=torch.tensor([rollout.sample_index for rollout in rollouts]),
        generation=torch.tensor([rollout.generation for rollout in rollouts]),
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=response_mask,
        logprobs=logprobs,
        temperature=torch.tensor([rollout.temperature for rollout in rollouts], dtype=torch.float32),
        support=support,
        response_places=response_mask.flatten().nonzero().squeeze(1),
        vocab_size=support.vocab_size,
        finish_reason=[rollout.finish_reason for rollout in rollouts],
        text=[rollout.text for rollout in rollouts],
        metadata=[rollout.metadata for rollout in rollouts],
        stored_support_logprobs=_joined([rollout.stored_support_logprobs for rollout in rollouts]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All parts, or None when any rollout has none."""
    present = [part for part in parts if part is not None]
    return torch.cat(present) if len(present) == len(parts) else None
