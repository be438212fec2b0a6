"""What an engine is: it is started, samples one request at a time (many concurrently), and is closed.

Adding an engine: one file here that implements `Engine`, turns its native output into a `Completion` through
`capture.py`, and maps its errors as `sample` documents. The loop in `loop.py` needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rollgen.format.manifest import EngineRecord
from rollgen.rollouts import Completion, Prompt, sample_seed

Capture = Literal["native", "logprobs", "none"]
"""How supports are read: the engine's own masks, finite processed logprobs, or not at all (nothing truncates)."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to make: the k-th of a prompt. Always its own request (n = 1); the prefix cache shares the prompt."""

    prompt: Prompt
    sample_index: int
    generation: int = 0
    """Of a retry: see `rollouts.Completion.generation`. `prompt.sampling` is then the retry's."""

    @property
    def request_id(self) -> str:
        """Unique in a run, and readable in the engine's log."""
        suffix = f"-r{self.generation}" if self.generation else ""
        return f"{self.prompt.prompt_index}-{self.sample_index}{suffix}"

    @property
    def seed(self) -> int:
        """The sample's own seed: independent of order, batching and the number of engines."""
        return sample_seed(self.prompt.seed, self.prompt.prompt_id, self.sample_index)


class RequestError(Exception):
    """The engine refused or failed this one request; other requests are unaffected."""


class Engine(Protocol):
    """A started engine."""

    record: EngineRecord
    capture: Capture
    dtype: str
    """Of weights and activations, resolved: never `auto`."""
    window: int
    """Requests to keep in flight: enough to keep the engine's batch full, few enough to bound memory."""
    resampled: int
    """Samples asked for again because a boundary tie went past the returned logprobs."""

    async def start(self) -> None:
        """Load the model. Raises EngineError."""

    async def sample(self, request: SampleRequest) -> Completion:
        """One finished sample with the exact support of every token.

        Raises RequestError for this request alone, CaptureError when no exact support came back, and EngineError when
        the engine is dead. Cancelling the call aborts the request in the engine.
        """
        ...

    def close(self) -> None:
        """Stop the engine and its processes. Safe to call twice."""
