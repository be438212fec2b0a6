"""The nouns: what a prompt, a way of sampling and a finished completion are. Frozen, plain numpy, no I/O.

Axis names: P prompt tokens, T generated tokens, K ids over all supports of one completion. A *support* (sampling mask)
is the set of vocabulary ids that survived top-k / top-p / min-p for one generated token. Supports are held as CSR:
the ids of token t are `mask_ids[mask_offsets[t]:mask_offsets[t + 1]]`; an empty range means *not truncated*, that is,
every id of the model's vocabulary, and occurs only where `Sampling.truncates` is false.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int16Array = npt.NDArray[np.int16]
    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]

FINISH_REASONS = ("stop", "length", "repetition")
"""The finish reasons that are stored. An aborted or failed completion is never stored: it is owed again."""
REWARD = "reward"
"""What a scoring function gives each sample: its name in a mapping, and as a column; further ones are the scorer's."""
LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32, the largest magnitude of a reward: trainers compute in float32."""
TEXTS = ("prompt_id", "stop_reason", "text", "prompt", "metadata")
"""What a completion has of texts that may be long."""
OVERHEAD_BYTES = 2048
"""Of one completion's Python objects and short texts, about."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Effective sampling parameters of one prompt: what the engine really applies, not what was asked for."""

    temperature: float = 1.0
    """Divides the logits before any truncation; > 0. vLLM raises 0 < T < 0.01 to 0.01, and so do we."""
    top_p: float = 1.0
    """In (0, 1]; 1 is off."""
    top_k: int = 50
    """At least 1, or 0 for off. A support may be larger than top_k: ties at the boundary are kept."""
    min_p: float = 0.0
    """In [0, 1]; 0 is off."""
    max_tokens: int = 1024
    """Upper bound of generated tokens, already clamped to the context that the prompt leaves."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether a support is stored for each token; false for the full-vocabulary control run."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


TRUNCATING: Final = ("top_k", "top_p", "min_p")
"""The parameters, and columns, that say whether a row truncates."""


def truncates(top_k: npt.NDArray[Any], top_p: npt.NDArray[Any], min_p: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """bool [N]: `Sampling.truncates` of N rows, from their columns TRUNCATING."""
    rows: npt.NDArray[np.bool_] = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row of the plan."""

    prompt_id: str
    prompt_index: int
    """Place in the plan, from 0."""
    token_ids: Int32Array
    """int32 [P], what the engine is given. Empty when `error` is set."""
    sampling: Sampling
    n: int
    """Samples wanted for this prompt: sample_index 0 .. n-1."""
    seed: int
    """The row's seed, or else the run's. Seeds of samples derive from it: `sample_seed`."""
    prompt: str | None = None
    """The prompt as given: raw text, or messages as JSON text; None when given as token ids."""
    metadata: str | None = None
    """All other fields of the input row as one JSON object text; None when there are none."""
    error: str | None = None
    """Why this row is a tombstone (a bad input row that the user chose to skip); None for a usable prompt."""


class WeightVersions(NamedTuple):
    """Which weights sampled which tokens, S spans in their order: weights may be replaced while a sample is made."""

    versions: tuple[str, ...]
    """[S], what the engine calls them; never empty."""
    starts: tuple[int, ...]
    """[S], the first token of each span: 0, then rising. It ends where the next one starts, the last one at T."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished sample with the support of every token. All per-token arrays align with `token_ids`."""

    prompt_id: str
    sample_index: int
    prompt_index: int
    prompt_token_ids: Int32Array
    """int32 [P]"""
    token_ids: Int32Array
    """int32 [T], T >= 1"""
    logprobs: Float32Array
    """float32 [T], log pi_old of each sampled token: after temperature, normalised over its support."""
    mask_ids: Int32Array
    """int32 [K], strictly increasing inside each token's range."""
    mask_offsets: Int64Array
    """int64 [T + 1]"""
    finish_reason: str
    sampling: Sampling
    seed: int
    stop_reason: str | None = None
    """JSON text of the engine's stop reason (token id 2 is `2`, stop string "2" is `"2"`); None for EOS and length."""
    support_logprobs: Float32Array | None = None
    """float32 [K], log pi_old of every id in `mask_ids`; None when the dataset does not store them."""
    replayable: bool = True
    """False when relative logits inside the support were changed (penalties, biases): cannot be replayed."""
    text: str | None = None
    prompt: str | None = None
    metadata: str | None = None
    generation: int = 0
    """0, or which retry of this sample it is: the highest one stored is current, earlier ones are kept."""
    run: str | None = None
    """Of a dataset of several runs, which one it is of; None in any other."""
    weight_versions: WeightVersions | None = None
    """None when the dataset does not store them."""
    routed_experts: Int16Array | None = None
    """int16 [P + T - 1, layers, top_k], the experts that each token of prompt and response was sent to in each layer;
    the last token never went through the model. None when the dataset does not store them."""

    @property
    def nbytes(self) -> int:
        """Memory held, the unit of the writer's bound: array data, and OVERHEAD_BYTES for the objects around it."""
        optional = sum(each.nbytes for each in (self.support_logprobs, self.routed_experts) if each is not None)
        tokens = self.prompt_token_ids.nbytes + self.token_ids.nbytes + self.logprobs.nbytes
        return tokens + self.mask_ids.nbytes + self.mask_offsets.nbytes + optional + OVERHEAD_BYTES


def text_length(completion: Completion) -> int:
    """Characters of its texts: TEXTS and weight versions."""
    length = sum(len(getattr(completion, name) or "") for name in TEXTS)
    return length if completion.weight_versions is None else length + sum(map(len, completion.weight_versions.versions))


def expert_ids(completion: Completion) -> int:
    """Numbers of experts that it holds."""
    return 0 if completion.routed_experts is None else completion.routed_experts.size


def sample_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one sample: 63 bits of SHA-256 over `seed`, `prompt_id` and `sample_index`, newline separated.

    Independent of order, batching and the number of engines, so a sample owed again is asked with the same seed.
    Consecutive base seeds share no streams (vLLM gives child k of an n > 1 request `seed + k`, which does).
    """
    digest = hashlib.sha256(f"{seed}\n{prompt_id}\n{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
