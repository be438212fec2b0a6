"""What a server is asked before the first prompt: whether what it would return is what a dataset needs.

A server's flags cannot be looked up, but what they do can be seen. A few requests of a few tokens show

    what it knows      which sampling parameters its version has: it ignores others in silence
    the model          does its tokenizer give the ids that ours gives, and is its vocabulary as large as ours
    how it answers     are supports, sampled ids and *processed* logprobs consistent, and do masks come with them
    the run's sampling are its parameters and as many logprobs as its capture needs accepted
    no truncation      is that accepted, where some prompt wants it: a server that returns masks refuses it

How large a vocabulary is shows in the ids at which a request may stop: vLLM refuses those that no model of its has, and
one that does not look takes no harm from them, as it would from such an id in a prompt. Whatever is wrong is one
UsageError that names the flag to start the server with.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import orjson

from rollgen.config import INT32_MAX, RunConfig
from rollgen.engines.address import Address
from rollgen.engines.asking import logprobs_wanted
from rollgen.engines.base import Capture, Extras, RequestError, SampleRequest
from rollgen.engines.extras import read_layout
from rollgen.engines.generate_route import (
    GENERATE_PATH,
    is_answer_to,
    largest_answer,
    read_choice,
    read_sample,
    request_body,
)
from rollgen.engines.meter import read_load
from rollgen.engines.replay import is_sampling_parameter
from rollgen.engines.server import ServerModel, refusal
from rollgen.engines.wire import Oversized, Refused, Unreachable, Wire
from rollgen.errors import CaptureError, EngineError, IncompleteSupport, UnfitEngine, UsageError
from rollgen.rollouts import Prompt, Sampling

Wanted = Literal["auto", "native", "logprobs", "none"]

SCHEMA_PATH: Final = "/openapi.json"
TOKENIZE_PATH: Final = "/tokenize"
TOKENIZED_TEXT: Final = "The  sea, 12345 + 67.8 =\n\tif (x != 0): return ['\u00efve', '\u4f60\u597d', '\U0001f600']"
"""In which tokenizers differ: spaces, digits, code, and characters of one to four bytes."""
MAX_TOKENIZED: Final = 1 << 16
"""Bytes of an answer to it."""
PROBE_NAME: Final = "rollgen-probe"
"""How the ids of its requests begin."""
TOKENS: Final = 2
"""Of the answer to a probe."""
PROMPT_TOKENS: Final = 3
PROBE_TOP_K: Final = 4
PROBE_LOGPROBS: Final = 12
"""Below the 20 that vLLM allows by default, and enough to see ids that top_k has excluded."""
PROBE_TEMPERATURE: Final = 0.5
"""Not 1, at which logprobs from before and after the temperature are the same."""
PROBE_SECONDS: Final = 120.0
"""For all questions: a busy server has them wait in its queue."""
_UNMETERED: Final = (
    "does not count its tokens in /metrics: that it works shows only when samples finish, so --stall-timeout must be "
    "longer than any of them takes"
)
_NAMELESS: Final = "does not repeat X-Request-Id: that an answer is the one to its request is not checked"
_UNTOKENIZED: Final = "does not answer /tokenize: whether --model's tokenizer is its own is not checked"
_UNLIMITED: Final = "does not check ids: whether --model's vocabulary is its own is not checked"


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probed server does."""

    capture: Capture
    extras: Extras
    repeats_id: bool
    """Whether an answer names the request that it belongs to."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """The questions of one run to one server."""

    wire: Wire
    address: Address
    model: ServerModel
    config: RunConfig
    vocab_size: int
    capture_wanted: Wanted
    untruncated: Literal["some", "none"]
    largest_top_k: int
    """Of the run's prompts."""
    encode: Callable[[str], Sequence[int]]
    """Our tokenizer, without special tokens."""
    request_id: str = field(default_factory=lambda: f"{PROBE_NAME}-{secrets.token_hex(4)}", init=False)
    """Of one request after the other; other runs may probe the same server."""

    async def run(self) -> Findings:
        """Raises UsageError for a server that is started with the wrong flags, EngineError for one that fails."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return await self._findings()
        except TimeoutError:
            raise EngineError(
                f"{self.address}: did not answer some requests for {TOKENS} tokens within {PROBE_SECONDS:g} s: it is "
                "overloaded, or hangs"
            ) from None

    async def _findings(self) -> Findings:
        self._check_context()
        if self.config.sampling_arg:
            await self._check_parameters()
        untokenized = await self._check_tokenizer()
        choice, repeats_id = await self._ask_how()
        unlimited = await self._check_vocabulary()
        has_masks = choice.get("sampling_mask") is not None
        capture, note = self._capture(has_masks=has_masks)
        if capture != "none":
            await self._ask_as_configured(capture)
        if capture == "none" or self.untruncated == "some":
            await self._ask_untruncated(has_masks=has_masks)
        unmetered = None if await read_load(self.wire) else _UNMETERED
        lacks = (unmetered, untokenized, unlimited, None if repeats_id else _NAMELESS)
        notes = (note, *(f"{self.address} {lack}" for lack in lacks if lack))
        return Findings(capture, self._extras(choice), repeats_id, tuple(note for note in notes if note))

    def _check_context(self) -> None:
        wanted = self.config.max_model_len
        if wanted is not None and wanted > self.model.max_model_len:
            raise UsageError(
                f"--max-model-len: {wanted} tokens, but the context of {self.address} is {self.model.max_model_len}; "
                "use at most that"
            )

    async def _check_parameters(self) -> None:
        known = parameters_of(await self._schema())
        for name in self.config.sampling_arg:
            if name not in known if known else not is_sampling_parameter(name):
                raise UsageError(
                    f"--sampling-arg {name}: vLLM {self.model.version} at {self.address} has no such sampling "
                    "parameter and would ignore it in silence; leave it out, or start a version that has it"
                )

    async def _schema(self) -> bytes:
        """What FastAPI tells of the routes; nothing where it may not."""
        try:
            return await self.wire.get(SCHEMA_PATH)
        except (Refused, Oversized):
            return b""
        except Unreachable as error:
            raise EngineError(f"{self.address}: no server answers: {error}") from None

    async def _check_tokenizer(self) -> str | None:
        """What could not be checked. Raises UsageError when the server would make other ids of a text than we do."""
        asked = {"model": self.model.name, "prompt": TOKENIZED_TEXT, "add_special_tokens": False}
        try:
            answer = await self.wire.post(
                TOKENIZE_PATH, orjson.dumps(asked), most=MAX_TOKENIZED, request_id=self.request_id
            )
            theirs = orjson.loads(answer)["tokens"]
        except (Refused, Oversized, orjson.JSONDecodeError, LookupError, TypeError):
            theirs = None
        except Unreachable as error:
            raise EngineError(f"{self.address}: {TOKENIZE_PATH} got no answer: {error}") from None
        if not isinstance(theirs, list):
            return _UNTOKENIZED
        if theirs != list(self.encode(TOKENIZED_TEXT)):
            raise UsageError(
                f"--model: its tokenizer is not that of {self.address}, which makes other ids of the same text; name "
                "the model that is served there, and no --tokenizer of another one"
            )
        return None

    async def _check_vocabulary(self) -> str | None:
        """What could not be checked. Raises UsageError when the server's vocabulary is not as large as ours."""
        if not await self._may_stop_at(self.vocab_size - 1):
            raise UsageError(self._other_vocabulary("fewer"))
        if not await self._may_stop_at(self.vocab_size):
            return None
        if await self._may_stop_at(INT32_MAX):
            return _UNLIMITED
        raise UsageError(self._other_vocabulary("more"))

    async def _may_stop_at(self, token_id: int) -> bool:
        sampling = Sampling(PROBE_TEMPERATURE, top_k=PROBE_TOP_K, max_tokens=1, stop_token_ids=(token_id,))
        try:
            await self._post(self._request(sampling), 0, {})
        except Refused as refused:
            if refused.status in (400, 422):
                return False
            raise self._explain(refused, 0) from None
        return True

    def _other_vocabulary(self, how_many: str) -> str:
        return (
            f"--model: has a vocabulary of {self.vocab_size} ids, and what {self.address} serves has {how_many}; name "
            "the model that is served there"
        )

    async def _ask_how(self) -> tuple[dict[str, Any], bool]:
        """A sample of which both captures, as far as they are possible, must tell the same, and whether it names its
        request."""
        sampling = Sampling(PROBE_TEMPERATURE, top_k=PROBE_TOP_K, max_tokens=TOKENS)
        choice = await self._ask(sampling, PROBE_LOGPROBS, {}, capture="logprobs")
        if choice.get("sampling_mask") is not None:
            self._read(choice, sampling, "native")
        return choice, is_answer_to(choice, self.request_id)

    def _extras(self, choice: dict[str, Any]) -> Extras:
        experts, layout = choice.get("routed_experts"), None
        if isinstance(experts, str):
            try:
                layout = read_layout(experts)
            except CaptureError as error:
                raise UsageError(f"{self.address}: {error}; start the server without them") from None
        return Extras(choice.get("weight_versions") is not None, layout)

    def _capture(self, *, has_masks: bool) -> tuple[Capture, str | None]:
        """The capture, and why it is not native though the user would take that."""
        if self.capture_wanted in ("none", "logprobs"):
            return self.capture_wanted, None
        if self.untruncated == "some":
            problem = "vLLM's masks need top_k > 0 on every request, some prompts have top_k 0"
        elif not has_masks:
            problem = (
                f"{self.address} returns none: start it with --return-sampling-mask (vLLM 0.30 or later with Triton "
                "and Model Runner V2)"
            )
        else:
            return "native", None
        if self.capture_wanted == "native":
            raise UsageError(f"--capture native: {problem}; or use --capture logprobs")
        return "logprobs", f"supports are read from logprobs instead of sampling masks: {problem}"

    async def _ask_as_configured(self, capture: Capture) -> None:
        config = self.config
        sampling = Sampling(
            config.temperature,
            config.top_p,
            self.largest_top_k,
            config.min_p,
            self._tokens(),
            config.stop,
            config.stop_token_ids,
        )
        first = logprobs_wanted(capture, sampling, self.vocab_size, support_logprobs=config.support_logprobs)
        await self._ask(sampling, first, config.sampling_arg, capture=capture)

    async def _ask_untruncated(self, *, has_masks: bool) -> None:
        sampling = Sampling(self.config.temperature, top_k=0, max_tokens=self._tokens())
        try:
            choice = await self._post(self._request(sampling), 0, self.config.sampling_arg)
        except Refused as refused:
            if not has_masks:
                raise self._explain(refused, 0) from None
            raise UsageError(
                f"{self.address}: was started with --return-sampling-mask and refuses prompts with top_k 0, which some "
                f"are ({refused}); start it without, or set a top_k that never binds, like 1000"
            ) from None
        self._read(choice, sampling, "none")

    def _tokens(self) -> int:
        """Of an answer: a few, but as many as a sampling argument demands."""
        least = self.config.sampling_arg.get("min_tokens")
        return max(TOKENS, least if isinstance(least, int) else 0)

    async def _ask(
        self, sampling: Sampling, num_logprobs: int, arguments: Mapping[str, Any], *, capture: Capture
    ) -> dict[str, Any]:
        """The choice that the server returns, which must be readable by this capture."""
        request = self._request(sampling)
        try:
            choice = await self._post(request, num_logprobs, arguments)
            self._read(choice, sampling, capture)
        except Refused as refused:
            raise self._explain(refused, num_logprobs) from None
        except IncompleteSupport:
            more = min(2 * num_logprobs, self.vocab_size)
            if more == num_logprobs:
                raise UsageError(f"{self.address}: its logprobs exclude no id: no support can be read") from None
            return await self._ask(sampling, more, arguments, capture=capture)
        return choice

    def _request(self, sampling: Sampling) -> SampleRequest:
        token_ids = np.arange(PROMPT_TOKENS, dtype=np.int32) % self.vocab_size
        return SampleRequest(Prompt("probe", 0, token_ids, sampling, n=1, seed=0), 0)

    async def _post(self, request: SampleRequest, num_logprobs: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Refused, and UsageError or EngineError for any other answer but a choice."""
        body = request_body(request, num_logprobs, model=self.model.name, arguments=arguments)
        most = largest_answer(request, num_logprobs)
        try:
            answer = await self.wire.post(GENERATE_PATH, body, most=most, request_id=self.request_id)
            return read_choice(answer)
        except (Unreachable, Oversized) as error:
            raise EngineError(f"{self.address}: a request for {TOKENS} tokens got no answer: {error}") from None
        except RequestError as error:
            raise UsageError(f"{self.address}: {error}; is that the URL of a vLLM server?") from None
        except CaptureError as error:
            raise UsageError(f"{self.address}, vLLM {self.model.version}: {error}") from None

    def _explain(self, refused: Refused, num_logprobs: int) -> UsageError | EngineError:
        """The error for a refused probe, with what to do."""
        if refused.status == 403:
            return UsageError(
                f"{self.address}: {GENERATE_PATH} is disabled (403): start the server with --enable-scale-out"
            )
        if refused.status == 404 and refused.param != "model":
            return UsageError(
                f"{self.address}: has no {GENERATE_PATH} (404): it takes a vLLM that has --enable-scale-out, started "
                "with that"
            )
        if refused.status in (400, 422):
            if num_logprobs and (refused.param == "logprobs" or "max allowed" in refused.message):
                return UsageError(
                    f"{self.address}: refuses logprobs={num_logprobs}, which this run needs ({refused.message}): start "
                    f"it with --max-logprobs {num_logprobs} at least; -1, no limit, is best: ties can need more"
                )
            return UsageError(f"{self.address}: refuses how this run samples: {refused.message}")
        return refusal(refused, self.address, f"POST {GENERATE_PATH}")

    def _read(self, choice: dict[str, Any], sampling: Sampling, capture: Capture) -> None:
        """Raises IncompleteSupport, and UsageError for whatever else is wrong."""
        try:
            read_sample(
                choice,
                truncates=sampling.truncates,
                vocab_size=self.vocab_size,
                capture=capture,
                sampling=sampling,
            )
        except IncompleteSupport:
            raise
        except UnfitEngine as error:
            raise UsageError(
                f"{self.address}: its logprobs are not those of the distribution that it samples from ({error}): start "
                "the server with --logprobs-mode processed_logprobs"
            ) from None
        except CaptureError as error:
            raise UsageError(f"{self.address}: no exact supports come back: {error}") from None


def parameters_of(schema: bytes) -> frozenset[str]:
    """The sampling parameters that a server's schema names; none where it names none."""
    try:
        request = orjson.loads(schema)["components"]["schemas"]["GenerateRequest"]
        return frozenset(request["properties"]["sampling_params"]["properties"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return frozenset()
