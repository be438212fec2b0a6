"""`Rollout`, one sample as tensors, and `RolloutBatch`, B of them ready for a training step.

Axes: P prompt tokens, T generated tokens, B rollouts, N generated tokens of the batch, nnz support ids, V vocabulary of
the logits. Token tensors are [R, L]: *padded*, a row for each rollout (R = B, L the longest P + T), padding on the
right; or *packed*, all rollouts one after the other in a single row (R = 1, L the sum of P + T), for attention that
takes `cu_seqlens` or `position_ids`. Everything about a generated token stands at that token's own place in
`input_ids`; the logits that predicted it stand one place before, and the methods that take logits do that shift.

A batch without rollouts, B = 0 and N = 0, has one token of padding all the same, R = L = 1, that attends to itself: a
model can run on it, forward and backward, so that ranks with and without rollouts stay in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollgen.arguments import check_choices, check_numbers, list_of
from rollgen.errors import UsageError
from rollgen.format.ragged import Ragged
from rollgen.loader.samples import RUN, VERSIONS, Experts, Samples, offsets_of
from rollgen.loader.schedule import Cursor
from rollgen.ops import Support, support_logprobs, support_logprobs_from_hidden

if TYPE_CHECKING:
    from rollgen.rollouts import Int64Array, WeightVersions

Layout = Literal["padded", "packed"]

BATCH_SCALARS: Final = (
    "prompt_id",
    "sample_index",
    "generation",
    "prompt_index",
    "temperature",
    "finish_reason",
    "text",
    "metadata",
)
"""Columns of one value a row that a batch has."""


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
    weight_versions: WeightVersions | None = None
    """Which weights sampled which tokens; None when the dataset does not store them."""
    run: str | None = None
    """Of a merged dataset, which of its runs this is of; None of any other."""
    dataset: str = ""
    """Which dataset this is of: the real path of its directory, or its URL."""
    routed_experts: Tensor | None = None
    """int16 [P + T - 1, layers, top_k], where each token of prompt and response but the last one was sent; None unless
    asked for."""
    rewards: dict[str, float] = field(default_factory=dict)
    """By name, those that were asked for, as they are stored: in float64."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RolloutBatch:
    """B rollouts, prompts and responses joined, padded or packed."""

    prompt_id: list[str]
    sample_index: Tensor
    """int64 [B]"""
    generation: Tensor
    """int64 [B]"""
    prompt_index: Tensor
    """int64 [B]"""
    dataset_index: Tensor
    """int64 [B], which of a stream's datasets; of rollouts that were joined, 0 is that of the first, and so on."""
    group: Tensor
    """int64 [B], from 0: the rollouts of one prompt of one dataset have the same number."""
    input_ids: Tensor
    """int64 [R, L]"""
    attention_mask: Tensor
    """bool [R, L], false on padding; true on that of an empty batch."""
    position_ids: Tensor
    """int64 [R, L], place of each token in its rollout."""
    cu_seqlens: Tensor
    """int32 [B + 1], running sum of the rollouts' lengths P + T from 0: of a packed batch, where each starts.

    (0, 1) of an empty one.
    """
    max_length: int
    """Longest P + T."""
    response_mask: Tensor
    """bool [R, L], true on generated tokens."""
    logprobs: Tensor
    """float32 [R, L], log pi_old, 0 outside the response."""
    temperature: Tensor
    """float32 [B]"""
    support: Support
    """N rows: one a generated token, in row-major order of `response_mask`, at the token's own place."""
    response_places: Tensor
    """int64 [N], the flat places (r * L + t) of generated tokens: `response_mask` without a wait for the device."""
    response_rollouts: Tensor
    """int64 [N], the rollout (below B) of each generated token: `advantages[batch.response_rollouts]`."""
    vocab_size: int
    """Of the model that sampled; support ids lie below it."""
    finish_reason: list[str]
    text: list[str | None]
    metadata: list[str | None]
    """JSON object texts: what a reward function needs."""
    stored_support_logprobs: Tensor | None = None
    """float32 [nnz], parallel to `support.ids`; None when the dataset does not store them."""
    weight_versions: list[WeightVersions] | None = None
    """[B]; None when the dataset does not store them."""
    run: list[str] | None = None
    """[B], which run of a merged dataset each is of; None when some dataset is no merged one."""
    routed_experts: Tensor | None = None
    """int16 [R, L, layers, top_k], the experts that took each token of `input_ids`; 0 on padding and at the last token
    of each rollout, which never went through the model that sampled. None unless asked for."""
    rewards: dict[str, Tensor] = field(default_factory=dict)
    """float32 [B] by name, those that were asked for: rounded, whole numbers beyond 2^24 too; none overflows."""
    cursor: Cursor | None = None
    """Of a stream: for `state_dict`."""
    lost: int = 0
    """Rollouts of this batch that damage took, in a stream that was told to skip them."""

    def __len__(self) -> int:
        return len(self.prompt_id)

    def __repr__(self) -> str:
        return (
            f"RolloutBatch({len(self)} rollouts, input_ids {list(self.input_ids.shape)}, "
            f"{len(self.response_places)} generated tokens, {self.support})"
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RolloutBatch:
        """The same batch with all tensors on another device."""
        return self._moved(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RolloutBatch:
        """A copy in page-locked memory; a DataLoader with `pin_memory=True` calls this."""
        return self._moved(lambda part: part.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> RolloutBatch:
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {name: move(part) for name, part in parts.items() if isinstance(part, Tensor | Support)}
        return replace(self, **moved, rewards={name: move(reward) for name, reward in self.rewards.items()})

    def support_logprobs(self, logits: Tensor) -> Tensor:
        """log pi_theta of the generated tokens, float32 [R, L], 0 outside the response.

        `logits` [R, L, V] are the model's raw output for `input_ids`, contiguous: those at t - 1 predict the token at
        t, and each is divided by its rollout's temperature. Raises UsageError when they do not fit the batch.

        The entropy over the supports, or the mass that they keep, comes from the op itself, with `rows` in place of the
        shift: `ops.support_logprobs(logits.flatten(0, 1), batch.support, batch.response_ids(),
        batch.response_temperature(), rows=batch.response_places - 1, entropy=True)`.
        """
        places = self._predictors("logits", logits)
        return self._spread(
            support_logprobs(
                logits.flatten(0, 1), self.support, self.response_ids(), self.response_temperature(), rows=places
            )
        )

    def support_logprobs_from_hidden(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What `support_logprobs` gives for the logits `hidden @ weight.T + bias`, which are never made.

        `hidden` [R, L, H] are the model's last hidden states for `input_ids`, `weight` [V, H] that of its `lm_head`.
        Not for models that scale or cap their logits after that product (Gemma 2, Granite, Cohere).
        """
        places = self._predictors("hidden", hidden)
        return self._spread(
            support_logprobs_from_hidden(
                hidden.flatten(0, 1),
                weight,
                self.support,
                self.response_ids(),
                self.response_temperature(),
                bias=bias,
                rows=places,
            )
        )

    def response_temperature(self) -> Tensor:
        """float32 [N], the temperature of each generated token."""
        return self.temperature[self.response_rollouts]

    def response_ids(self) -> Tensor:
        """int64 [N], the generated tokens."""
        return self.input_ids.flatten()[self.response_places]

    def _predictors(self, name: str, outputs: Tensor) -> Tensor:
        """int64 [N], the flat places whose outputs predict the generated tokens: each has a token before it."""
        if outputs.dim() != 3 or outputs.shape[:2] != self.input_ids.shape:
            raise UsageError(f"{name} are {list(outputs.shape)}, input_ids {list(self.input_ids.shape)}")
        return self.response_places - 1

    def _spread(self, values: Tensor) -> Tensor:
        result = values.new_zeros(self.input_ids.numel()).index_copy(0, self.response_places, values)
        return result.view(self.input_ids.shape)


def collate(rollouts: Sequence[Rollout], *, layout: Layout = "padded", pad_id: int = 0) -> RolloutBatch:
    """Join rollouts into a batch, each with a prompt of one token or more: something predicted the first token.

    Raises UsageError for none, for an empty prompt, or for rollouts of different vocabularies.
    """
    check_choices(layout=(layout, Layout))
    check_numbers(0, pad_id=pad_id)
    rollouts = list_of(Rollout, rollouts, "rollouts: give a list of Rollouts")
    sizes = {rollout.support.vocab_size for rollout in rollouts}
    if len(sizes) != 1:
        raise UsageError(f"only rollouts of one vocabulary can be joined, these have {sorted(sizes) or 'none'}")
    stored = [rollout.stored_support_logprobs for rollout in rollouts if rollout.stored_support_logprobs is not None]
    supports = [rollout.support for rollout in rollouts]
    versions = [rollout.weight_versions for rollout in rollouts if rollout.weight_versions is not None]
    optional = {VERSIONS: len(versions) == len(rollouts), RUN: all(rollout.run is not None for rollout in rollouts)}
    scalars = (*BATCH_SCALARS, *(name for name, is_stored in optional.items() if is_stored))
    samples = Samples(
        prompt_ids=_joined([rollout.prompt_ids for rollout in rollouts]),
        token_ids=_joined([rollout.token_ids for rollout in rollouts]),
        logprobs=_joined([rollout.logprobs for rollout in rollouts]).values,
        mask_ids=_joined([support.ids for support in supports]).values,
        mask_lengths=_joined([support.lengths for support in supports]).values.astype(np.int32),
        mask_offsets=_joined([support.ids for support in supports]).offsets,
        support_logprobs=_joined(stored).values if len(stored) == len(rollouts) else None,
        scalars={name: _scalars([getattr(rollout, name) for rollout in rollouts]) for name in scalars},
        vocab_size=sizes.pop(),
        experts=_joined_experts(rollouts),
        rewards=_joined_rewards(rollouts),
    )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(rollout.dataset for rollout in rollouts))}
    dataset_index = np.array([numbers[rollout.dataset] for rollout in rollouts])
    return assemble(samples, layout=layout, pad_id=pad_id, dataset_index=dataset_index)


def assemble(
    samples: Samples,
    *,
    layout: Layout = "padded",
    pad_id: int = 0,
    dataset_index: npt.NDArray[Any] | None = None,
    cursor: Cursor | None = None,
    lost: int = 0,
) -> RolloutBatch:
    """Samples as a batch. Raises UsageError for an empty prompt."""
    prompt_lengths, response_lengths = np.diff(samples.prompt_ids.offsets), np.diff(samples.token_ids.offsets)
    if (prompt_lengths == 0).any():
        prompt_id = samples.scalars["prompt_id"][int(prompt_lengths.argmin())]
        raise UsageError(f"{prompt_id!r}: the prompt is empty: no logits predict the first token")
    lengths = prompt_lengths + response_lengths
    if not len(samples):
        lengths = np.ones(1, np.int64)  # the token of an empty batch
    longest = int(lengths.max())
    cu_seqlens = offsets_of(lengths)
    if layout == "padded":
        shape, starts = (len(lengths), longest), np.arange(len(samples)) * longest
        attention_mask = np.arange(longest) < lengths[:, None]
        position_ids = np.broadcast_to(np.arange(longest), shape).copy()
    else:
        shape, starts = (1, int(cu_seqlens[-1])), cu_seqlens[: len(samples)]
        attention_mask = np.ones(shape, np.bool_)
        position_ids = _places(cu_seqlens, np.zeros_like(lengths)).reshape(shape)
    response_places = _places(samples.token_ids.offsets, starts + prompt_lengths)
    size = shape[0] * shape[1]
    input_ids = np.full(size, pad_id, np.int64)
    input_ids[_places(samples.prompt_ids.offsets, starts)] = samples.prompt_ids.values
    input_ids[response_places] = samples.token_ids.values
    logprobs = np.zeros(size, np.float32)
    logprobs[response_places] = samples.logprobs
    response_mask = np.zeros(size, np.bool_)
    response_mask[response_places] = True
    dataset = np.zeros(len(samples)) if dataset_index is None else dataset_index
    versions, runs = samples.scalars.get(VERSIONS), samples.scalars.get(RUN)
    return RolloutBatch(
        prompt_id=samples.scalars["prompt_id"].tolist(),
        sample_index=_int64(samples.scalars["sample_index"]),
        generation=_int64(samples.scalars["generation"]),
        prompt_index=_int64(samples.scalars["prompt_index"]),
        dataset_index=_int64(dataset),
        group=_int64(_numbered(dataset, samples.scalars["prompt_index"])),
        input_ids=torch.from_numpy(input_ids).view(shape),
        attention_mask=torch.from_numpy(attention_mask),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_length=longest,
        response_mask=torch.from_numpy(response_mask).view(shape),
        logprobs=torch.from_numpy(logprobs).view(shape),
        temperature=torch.from_numpy(samples.scalars["temperature"].astype(np.float32)),
        support=Support(
            torch.from_numpy(samples.mask_ids),
            torch.from_numpy(offsets_of(samples.mask_lengths)),
            samples.vocab_size,
            bool((samples.mask_lengths == 0).any()),
        ),
        response_places=torch.from_numpy(response_places),
        response_rollouts=torch.from_numpy(np.repeat(np.arange(len(samples)), response_lengths)),
        vocab_size=samples.vocab_size,
        finish_reason=samples.scalars["finish_reason"].tolist(),
        text=samples.scalars["text"].tolist(),
        metadata=samples.scalars["metadata"].tolist(),
        stored_support_logprobs=_optional(samples.support_logprobs),
        weight_versions=None if versions is None else versions.tolist(),
        run=None if runs is None else runs.tolist(),
        routed_experts=None if samples.experts is None else _placed_experts(samples.experts, starts, shape),
        rewards={name: torch.from_numpy(each.astype(np.float32)) for name, each in samples.rewards.items()},
        cursor=cursor,
        lost=lost,
    )


def _placed_experts(experts: Experts, starts: Int64Array, shape: tuple[int, int]) -> Tensor:
    """int16 [R, L, layers, top_k], those of each row from its place in `starts` on."""
    (numbers, offsets), layers, top_k = experts
    placed = np.zeros((shape[0] * shape[1], layers, top_k), np.int16)
    placed[_places(offsets // (layers * top_k), starts)] = numbers.reshape(-1, layers, top_k)
    return torch.from_numpy(placed).view(*shape, layers, top_k)


def _joined_experts(rollouts: Sequence[Rollout]) -> Experts | None:
    """None unless all have them. Raises UsageError for those of different models."""
    parts = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    if len(parts) < len(rollouts):
        return None
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) != 1:
        raise UsageError(f"only rollouts of as many layers and experts can be joined, these have {sorted(shapes)}")
    return Experts(_joined([part.flatten() for part in parts]), *shapes.pop())


def _joined_rewards(rollouts: Sequence[Rollout]) -> dict[str, npt.NDArray[np.float64]]:
    """Those that all have."""
    names = [name for name in rollouts[0].rewards if all(name in rollout.rewards for rollout in rollouts)]
    return {name: np.array([rollout.rewards[name] for rollout in rollouts], np.float64) for name in names}


def _numbered(*keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Equal keys to equal numbers, from 0."""
    return np.unique(np.stack([key.astype(np.int64) for key in keys], 1), axis=0, return_inverse=True)[1].reshape(-1)


def _places(offsets: Int64Array, starts: Int64Array) -> Int64Array:
    """Where the values of rows go that begin at `starts`: one place after the other, for each row."""
    places = np.arange(offsets[-1])
    places += np.repeat(starts - offsets[:-1], np.diff(offsets))
    return places


def _joined(parts: Sequence[Tensor]) -> Ragged:
    return Ragged(torch.cat(list(parts)).numpy(), offsets_of(np.array([part.numel() for part in parts])))


def _scalars(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Numbers as numbers; texts as objects, None among them or not."""
    return np.array(values) if isinstance(values[0], int | float) else np.fromiter(values, np.object_, len(values))


def _int64(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _optional(values: npt.NDArray[np.float32] | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)
