"""What an engine is: it is started, samples one request at a time (many concurrently), and is closed.

Adding an engine: one file here that implements `Engine`, turns its native output into a `Completion` through
`capture.py`, and maps its errors as `sample` documents. `loop/` needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollgen.format.manifest import EngineRecord, Manifest, RoutedExperts
from rollgen.rollouts import Completion, Prompt, sample_seed

Capture = Literal["native", "logprobs", "none"]
"""How supports are read: the engine's own masks, finite processed logprobs, or not at all (nothing truncates)."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What an engine returns with every sample, or a dataset stores of it, beside tokens, logprobs and supports."""

    weight_versions: bool = False
    routed_experts: RoutedExperts | None = None
    """What their numbers mean; None for none."""

    @classmethod
    def of(cls, manifest: Manifest) -> Extras:
        """What a dataset stores."""
        return cls(manifest.weight_versions, manifest.routed_experts)

    def missing(self, offered: Extras) -> str | None:
        """What of these an engine that offers others lacks, in words."""
        if self.weight_versions and not offered.weight_versions:
            return "weight versions"
        wanted, found = self.routed_experts, offered.routed_experts
        if wanted is None or (found is not None and (wanted.layers, wanted.top_k) == (found.layers, found.top_k)):
            return None
        return f"routed experts, {wanted.top_k} in each of {wanted.layers} layers"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to make: the k-th of a prompt. Always its own request (n = 1); the prefix cache shares the prompt."""

    prompt: Prompt
    sample_index: int
    generation: int = 0
    """Of a retry: see `rollouts.Completion.generation`. `prompt.sampling` is then the retry's."""
    given_seed: int | None = None
    """The sample's own seed where someone else chose it; None for the usual one."""

    @property
    def request_id(self) -> str:
        """Unique in a run, and readable in the engine's log."""
        suffix = f"-r{self.generation}" if self.generation else ""
        return f"{self.prompt.prompt_index}-{self.sample_index}{suffix}"

    @property
    def seed(self) -> int:
        """The sample's own seed: independent of order, batching and the number of engines."""
        if self.given_seed is not None:
            return self.given_seed
        return sample_seed(self.prompt.seed, self.prompt.prompt_id, self.sample_index)

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Keyword arguments for an engine's sampling parameters, under the names that vLLM gave them."""
        sampling = self.prompt.sampling
        return {
            "seed": self.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
        }


class RequestError(Exception):
    """The engine refused or failed this one request; other requests are unaffected."""


class Engine(Protocol):
    """A started engine."""

    record: EngineRecord
    capture: Capture
    dtype: str
    """Of weights and activations, resolved: never `auto`."""
    extras: Extras
    """What each completion has beside. At first all that is offered, which a new dataset stores; then what the dataset
    stores that is made, and nothing else is read."""
    window: int
    """Requests to keep in flight: enough to keep the engine's batch full, few enough to bound memory."""
    resampled: int
    """Samples asked for again because a boundary tie went past the returned logprobs."""
    tokens: int
    """Generated so far, of unfinished samples too: that it grows is the only sign of life that counts."""
    notes: tuple[str, ...]
    """What the user should know about the choice of capture and the like."""

    async def start(self) -> None:
        """Load the model; again after `close`, when the engine has died. Raises EngineError."""

    async def sample(self, request: SampleRequest) -> Completion:
        """One finished sample with the exact support of every token.

        Raises RequestError for this request alone, CaptureError when no exact support came back, EngineError when the
        engine is dead, and UnfitEngine when it lives but no request can get what is asked for. Cancelling the call
        aborts the request in the engine.
        """
        ...

    def close(self) -> None:
        """Stop the engine and its processes. Safe to call twice."""
