"""What engines return to exact supports and rows: used by rollgen's own engine and by loops that bring their own.

The shapes that are understood are listed in `shapes.py`. Every mismatch raises: nothing is padded, cut or mended.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollgen.engines.base import Capture, Extras, SampleRequest
from rollgen.engines.capture import (
    CapturedSupport,
    LogprobTable,
    attach_support_logprobs,
    check_support_logprobs,
    from_masks,
    from_processed_logprobs,
    refuse_truncated,
    sampled_logprobs,
    untruncated,
)
from rollgen.engines.extras import read_experts, read_versions
from rollgen.engines.shapes import Masks, RawSequence, read_sequences
from rollgen.errors import CaptureError, IncompleteSupport, UnfitEngine
from rollgen.rollouts import Completion, Sampling

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array

NO_EXTRAS: Final = Extras()


@dataclass(frozen=True, slots=True, eq=False)
class SampledOutput:
    """One finished sequence of an engine."""

    token_ids: Int32Array
    """int32 [T]"""
    support: CapturedSupport
    finish_reason: str
    stop_reason: str | None
    """JSON text, as in `rollouts.Completion`. SGLang names the id of EOS here, vLLM does not."""
    index: int = 0
    """Which sequence of its request it is: the engine's word, else its place in the answer."""
    prompt_token_ids: Int32Array | None = None
    """int32 [P] of what the engine continued; None when it does not say."""
    weight_versions: Any = None
    routed_experts: Any = None
    """As the engine gave them: see `shapes.RawSequence`."""


def read_outputs(
    output: object, *, truncates: bool, vocab_size: int, capture: Capture, sampling: Sampling | None = None
) -> list[SampledOutput]:
    """All sequences of an engine's answer to one request, in the order of their `index`.

    `truncates` is the request's `Sampling.truncates`. With capture `logprobs` the finite processed logprobs are the
    support, with `native` the engine's own masks are. `sampling`, if given, tells logprobs from before truncation from
    boundary ties, which otherwise would only ask for more and more of them.

    Raises UsageError for an object of no known shape, UnfitEngine when the engine does not return what the capture
    needs, IncompleteSupport when more logprobs of the same sample are needed, and CaptureError for anything else that
    is not exact; the token is named.
    """
    return [
        SampledOutput(
            sequence.token_ids,
            _support(sequence, truncates=truncates, vocab_size=vocab_size, capture=capture, sampling=sampling),
            sequence.finish_reason,
            sequence.stop_reason,
            index,
            sequence.prompt_token_ids,
            sequence.weight_versions,
            sequence.routed_experts,
        )
        for index, sequence in _numbered(read_sequences(output, truncates=truncates))
    ]


def completion_of(
    request: SampleRequest,
    sampled: SampledOutput,
    *,
    replayable: bool,
    support_logprobs: bool,
    text: str | None,
    extras: Extras = NO_EXTRAS,
) -> Completion:
    """The row of a sampled sequence, with those `extras` that are to be stored.

    Raises CaptureError when it continues another prompt or lacks one of the extras, and IncompleteSupport when
    `support_logprobs` are wanted and were not all returned.
    """
    prompt, support = request.prompt, sampled.support
    if sampled.prompt_token_ids is not None and not np.array_equal(sampled.prompt_token_ids, prompt.token_ids):
        raise CaptureError(
            f"the output is of another prompt, or its prompt was cut: it continues {len(sampled.prompt_token_ids)} "
            f"tokens, not the {len(prompt.token_ids)} of the request"
        )
    if support_logprobs and support.support_logprobs is None:
        raise IncompleteSupport(
            "the dataset stores support logprobs, but the output lacks those of some id: ask for more logprobs than "
            "the largest support has ids, or store none"
        )
    tokens = len(sampled.token_ids)
    versions = read_versions(sampled.weight_versions, tokens) if extras.weight_versions else None
    experts = None
    if extras.routed_experts is not None:
        positions = len(prompt.token_ids) + tokens - 1
        experts = read_experts(sampled.routed_experts, positions, extras.routed_experts)
    return Completion(
        prompt_id=prompt.prompt_id,
        sample_index=request.sample_index,
        prompt_index=prompt.prompt_index,
        prompt_token_ids=prompt.token_ids,
        token_ids=sampled.token_ids,
        logprobs=support.logprobs,
        mask_ids=support.mask_ids,
        mask_offsets=support.mask_offsets,
        finish_reason=sampled.finish_reason,
        sampling=prompt.sampling,
        seed=request.seed,
        stop_reason=sampled.stop_reason,
        support_logprobs=support.support_logprobs if support_logprobs else None,
        replayable=replayable,
        text=text,
        prompt=prompt.prompt,
        metadata=prompt.metadata,
        generation=request.generation,
        weight_versions=versions,
        routed_experts=experts,
    )


def _numbered(sequences: list[RawSequence]) -> list[tuple[int, RawSequence]]:
    """The sequences by their index: their place in the answer, unless the engine says it."""
    indices = [sequence.index for sequence in sequences if sequence.index is not None]
    if not indices:
        return list(enumerate(sequences))
    if len(set(indices)) != len(sequences):
        raise CaptureError(
            f"the indices of the {len(sequences)} sequences are {', '.join(map(str, indices))}: they are not those of "
            "one request, which differ; hand over each output with its own request"
        )
    return sorted(zip(indices, sequences, strict=True), key=itemgetter(0))


def _support(
    sequence: RawSequence, *, truncates: bool, vocab_size: int, capture: Capture, sampling: Sampling | None
) -> CapturedSupport:
    """The supports of a sequence, as its capture reads them."""
    token_ids, table, masks = sequence.token_ids, sequence.logprobs, sequence.masks
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise CaptureError(f"a sampled id is outside the model's vocabulary of {vocab_size}")
    if truncates and masks is None and capture != "logprobs":
        raise UnfitEngine(
            "the engine returned no sampling mask although sampling truncates: it was started without "
            "return_sampling_mask, or samples sharded over the batch; start it otherwise, or capture logprobs"
        )
    if table is None and masks is not None and masks.logprobs is not None:
        table = LogprobTable(masks.ids, masks.logprobs, masks.offsets)
    if table is None:
        raise UnfitEngine(
            "the output has no logprobs of the distribution that was sampled from: ask vLLM for logprobs=0 at least, "
            "SGLang for return_sampling_mask (or return_logprob, where nothing truncates)"
        )
    if not truncates:
        logprobs = sampled_logprobs(table, token_ids)
        refuse_truncated(table, None if masks is None else masks.offsets, vocab_size)
        return untruncated(len(token_ids), logprobs)
    if capture == "logprobs" or masks is None:
        return from_processed_logprobs(table, token_ids, vocab_size=vocab_size, sampling=sampling)
    native = _native(token_ids, table, masks, vocab_size)
    check_support_logprobs(native, vocab_size=vocab_size, sampling=sampling)
    return native


def _native(token_ids: Int32Array, table: LogprobTable, masks: Masks, vocab_size: int) -> CapturedSupport:
    """The supports that masks say, with the logprobs of their ids if the output has all of them."""
    native = from_masks(
        masks.ids,
        masks.offsets,
        sampled_logprobs(table, token_ids),
        vocab_size=vocab_size,
        support_logprobs=masks.logprobs,
    )
    if native.support_logprobs is None and not table.has_candidates:
        return native
    return attach_support_logprobs(native, table)
