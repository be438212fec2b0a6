"""What must hold for every token of a completion before it may become a row.

Checked on arrival, in numpy, without a loop over tokens (about 0.1 us a token). The list, in the order it is checked:

    1  at least one token and at most max_tokens; logprobs, supports and tokens have equal lengths; no more ids and
       text than a row may have; a storable finish reason; a generation
    2  a support is empty (not truncated) exactly where sampling does not truncate
    3  support ids are strictly increasing and inside the model's vocabulary
    4  the sampled id is inside its support (inside the vocabulary, for an untruncated token)
    5  the logprob is finite, <= 0, and exactly 0 where the support is a singleton
    6  support_logprobs, when present: parallel to the ids, finite, <= 0, probabilities summing to 1, and the sampled
       id's entry equal to its logprob
    7  weight_versions, when present: spans that start at 0 and rise below the number of tokens, each with a version
    8  routed_experts, when present: of all tokens of prompt and response but the last one; no negative number, and
       more than zeros at each

5 is a free end-to-end check of the alignment of masks and logprobs: 15-45 % of tokens are singletons.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rollgen.rollouts import FINISH_REASONS, Completion, expert_ids, text_length

MAX_IDS = 1 << 27
"""Support ids of a row: 1,024 a token at 131,072 tokens."""
MAX_CHARACTERS = 1 << 27
"""Of a row's texts."""
MAX_EXPERT_IDS = 1 << 27
"""Numbers of experts of a row. All three keep its row group below what a reader accepts (`parquet.py`)."""
SUM_TOLERANCE = 1e-4
"""Of the float32 probabilities of one support; the engines' own rounding is below 3e-7."""


def find_problem(completion: Completion, vocab_size: int) -> str | None:
    """The first invariant that `completion` breaks, in words that name the token, or None."""
    return (
        _lengths_problem(completion)
        or _support_problem(completion, vocab_size)
        or _logprob_problem(completion)
        or _support_logprobs_problem(completion)
        or _versions_problem(completion)
        or _experts_problem(completion)
    )


def _lengths_problem(completion: Completion) -> str | None:
    tokens = len(completion.token_ids)
    if tokens == 0:
        return "no token was generated"
    if tokens > completion.sampling.max_tokens:
        return f"{tokens} tokens, more than max_tokens {completion.sampling.max_tokens}"
    if len(completion.logprobs) != tokens:
        return f"{len(completion.logprobs)} logprobs for {tokens} tokens"
    offsets = completion.mask_offsets
    if len(offsets) != tokens + 1:
        return f"{len(offsets) - 1} supports for {tokens} tokens"
    if len(completion.mask_ids) > MAX_IDS:
        return f"{len(completion.mask_ids)} support ids, more than the {MAX_IDS} of a row"
    if text_length(completion) > MAX_CHARACTERS:
        return f"{text_length(completion)} characters of text, more than the {MAX_CHARACTERS} of a row"
    if offsets[0] != 0 or offsets[-1] != len(completion.mask_ids):
        return "support offsets do not span the support ids"
    if completion.finish_reason not in FINISH_REASONS:
        return f"finish reason {completion.finish_reason!r} is not a finished one"
    if completion.generation < 0:
        return f"generation {completion.generation} is negative"
    return None


def _support_problem(completion: Completion, vocab_size: int) -> str | None:
    token_ids, ids, offsets = completion.token_ids, completion.mask_ids, completion.mask_offsets
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        return f"a sampled id is outside the model's vocabulary of {vocab_size}"
    if not completion.sampling.truncates:
        return "a support is listed although nothing truncates" if len(ids) or offsets.any() else None
    sizes = np.diff(offsets)
    if sizes.min() <= 0:
        return f"token {int(sizes.argmin())}: empty support"
    if ids[offsets[:-1]].min() < 0 or ids[offsets[1:] - 1].max() >= vocab_size:
        return f"a support id is outside the model's vocabulary of {vocab_size}"
    rising = ids[1:] > ids[:-1]
    rising[offsets[1:-1] - 1] = True  # a new support may start lower
    if not rising.all():
        return f"token {_token_at(offsets, int(rising.argmin()))}: support ids are not strictly increasing"
    inside = ids == np.repeat(token_ids, sizes)
    if np.count_nonzero(inside) != len(token_ids):  # at most one match a token, ids being distinct
        found = np.add.reduceat(inside, offsets[:-1])
        return f"token {int(found.argmin())}: the sampled id {token_ids[found.argmin()]} is not in its support"
    return None


def _logprob_problem(completion: Completion) -> str | None:
    logprobs = completion.logprobs
    valid = (logprobs <= 0) & (logprobs > -np.inf)  # NaN fails both
    if not valid.all():
        token = int(valid.argmin())
        return f"token {token}: logprob {logprobs[token]} is not a finite number <= 0"
    if not completion.sampling.truncates:
        return None
    wrong = (np.diff(completion.mask_offsets) == 1) & (logprobs != 0)
    if wrong.any():
        token = int(wrong.argmax())
        return f"token {token}: logprob {logprobs[token]} of a singleton support is not 0"
    return None


def _support_logprobs_problem(completion: Completion) -> str | None:
    support = completion.support_logprobs
    if support is None or not completion.sampling.truncates:
        return None
    ids, offsets = completion.mask_ids, completion.mask_offsets
    if len(support) != len(ids):
        return f"{len(support)} support logprobs for {len(ids)} support ids"
    valid = (support <= 0) & (support > -np.inf)
    if not valid.all():
        return f"token {_token_at(offsets, int(valid.argmin()))}: a support logprob is not a finite number <= 0"
    mass_error = np.abs(np.add.reduceat(np.exp(support, dtype=np.float64), offsets[:-1]) - 1)
    if mass_error.max() > SUM_TOLERANCE:
        return f"token {int(mass_error.argmax())}: support probabilities do not sum to 1"
    sampled = support[ids == np.repeat(completion.token_ids, np.diff(offsets))]
    if not np.array_equal(sampled, completion.logprobs):
        return "support_logprobs disagree with the sampled tokens' logprobs"
    return None


def _versions_problem(completion: Completion) -> str | None:
    if completion.weight_versions is None:
        return None
    (versions, starts), tokens = completion.weight_versions, len(completion.token_ids)
    if len(versions) != len(starts):
        return f"{len(versions)} weight versions and {len(starts)} starts of them"
    if not starts or starts[0] != 0 or any(one >= other for one, other in pairwise([*starts, tokens])):
        return f"the weight versions do not start at 0 and rise below {tokens} tokens"
    return None if all(versions) else "a weight version is empty"


def _experts_problem(completion: Completion) -> str | None:
    experts = completion.routed_experts
    if experts is None:
        return None
    positions = len(completion.prompt_token_ids) + len(completion.token_ids) - 1
    if experts.ndim != 3 or len(experts) != positions:
        return f"routed experts are {list(experts.shape)}, not those of {positions} tokens in layers"
    if expert_ids(completion) > MAX_EXPERT_IDS:
        return f"{expert_ids(completion)} numbers of experts, more than the {MAX_EXPERT_IDS} of a row"
    if experts.size and experts.min() < 0:
        return "a number of an expert is negative"
    recorded = experts.any(axis=(1, 2))
    if experts.shape[2] > 1 and not recorded.all():
        return f"position {int(recorded.argmin())}: expert 0 alone in all layers: none was recorded"
    return None


def _token_at(offsets: np.ndarray, position: int) -> int:
    """The token whose support holds the id at `position`."""
    return int(np.searchsorted(offsets, position, side="right")) - 1
