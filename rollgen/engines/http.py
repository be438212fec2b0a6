"""A running vLLM server: one request a sample over HTTP, masks read natively or from processed logprobs.

What the server was started with is what it does: nothing can be set from here, so it is probed first (`probe.py`). A
request that fails without a fault of its own (no connection, 429, 500 to 504, an aborted one) is sent again with the
same seed, after a pause that is random up to twice that of the time before; no other is. A server that is away for some
seconds is waited for; one that stays away is dead, and `start` waits for it to come back, and probes it again.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from rollgen.config import RunConfig
from rollgen.engines.address import parse_address, read_api_key
from rollgen.engines.asking import WINDOW_PER_SLOT, ask, logprobs_wanted
from rollgen.engines.availability import Availability, generated_tokens, wait_until_healthy
from rollgen.engines.base import RequestError, SampleRequest
from rollgen.engines.descriptors import afford
from rollgen.engines.generate_route import GENERATE_PATH, largest_answer, read_choice, read_sample, request_body
from rollgen.engines.installed import PROCESSORS
from rollgen.engines.outputs import SampledOutput, completion_of
from rollgen.engines.probe import Findings, Probe, Wanted
from rollgen.engines.server import UNKNOWN, ServerModel, describe_server
from rollgen.engines.wire import Oversized, Refused, Unreachable, Wire, run_apart
from rollgen.errors import EngineError, UnfitEngine, UsageError
from rollgen.format.manifest import EngineRecord
from rollgen.rollouts import Completion

if TYPE_CHECKING:
    from rollgen.rollouts import Int32Array

SERVER_MAX_NUM_SEQS: Final = 256
"""Places in a server's batch, unless --max-num-seqs says otherwise: it cannot be asked."""
MAX_TRIES: Final = 6
"""Of one request while the server is there."""
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
"""Seconds before the next try: up to the first, doubled with each try up to the longest."""
METER_SECONDS: Final = 5.0
"""Between two looks at the server's count of generated tokens."""
LARGE_ANSWER: Final = 1 << 18
"""Bytes from which an answer is read in a thread, so that others are not kept waiting."""
_TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})
_NEVER: Final = frozenset({401, 403, 404})
"""Answers that no other request would get rid of."""
_SPARE_CONNECTIONS: Final = 4
"""For signs of life, which never wait for samples."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """What a started engine has."""

    wire: Wire
    availability: Availability
    meter: asyncio.Task[None]

    async def close(self) -> None:
        self.meter.cancel()
        await self.wire.close()
        await self.availability.close()


class HttpEngine:
    """`engines.base.Engine` on a vLLM server. Constructing it probes the server, and blocks for that.

    `capture_wanted`, `untruncated`, `replayable` and `decode` are as in `VllmEngine`; `dtype` is what the server is
    taken to compute in, because none tells; `largest_top_k` is that of the run's prompts, if not the configuration's.
    Raises UsageError when the server is started with the wrong flags, EngineError when it does not answer.
    """

    def __init__(
        self,
        config: RunConfig,
        url: str,
        *,
        vocab_size: int,
        capture_wanted: Wanted,
        untruncated: Literal["some", "none"],
        replayable: bool,
        decode: Callable[[Int32Array], str],
        dtype: str,
        largest_top_k: int | None = None,
    ) -> None:
        self._config = config
        self.address = parse_address(url, read_api_key(config.api_key_env))
        self._vocab_size = vocab_size
        self._capture_wanted: Wanted = capture_wanted
        self._untruncated: Literal["some", "none"] = untruncated
        self._largest_top_k = config.top_k if largest_top_k is None else largest_top_k
        self._replayable = replayable
        self._decode = decode
        self._run_id = secrets.token_hex(4)
        """Of other runs at the same server there may be requests of the same name."""
        self._connection: _Connection | None = None
        self._closing: asyncio.Task[None] | None = None
        """Kept, for an event loop does not keep its tasks."""
        self._is_metered = False
        self._is_inspected = True
        self._server, findings = run_apart(self._inspect_apart())
        self.capture, self.extras, self.notes = findings.capture, findings.extras, findings.notes
        self._offered = findings.extras
        self.record = EngineRecord(
            name="vllm",
            version=self._server.version,
            device=UNKNOWN,
            versions={},
            processors=PROCESSORS["vllm"],
        )
        self.dtype = dtype
        self.window = int(WINDOW_PER_SLOT * (config.max_num_seqs or SERVER_MAX_NUM_SEQS))
        self.resampled = 0
        self.tokens = 0

    async def start(self) -> None:
        """Find the server answering, for `--stall-timeout` at most; after `close`, probe it again."""
        wire = Wire(self.address, connections=self.window + _SPARE_CONNECTIONS)
        try:
            await wait_until_healthy(wire, self.address, self._config.stall_timeout)
            if not self._is_inspected:
                await self._inspect_again(wire)
        except BaseException:
            await wire.close()
            raise
        availability = Availability(wire, self.address, partial(self._inspect_again, wire))
        self._connection = _Connection(wire, availability, asyncio.create_task(self._measure(wire)))

    async def sample(self, request: SampleRequest) -> Completion:
        """See `engines.base.Engine.sample`."""
        sampling, store = request.prompt.sampling, self._config.support_logprobs
        first = logprobs_wanted(self.capture, sampling, self._vocab_size, support_logprobs=store)
        return await ask(self, first, self._vocab_size, partial(self._make, request))

    def close(self) -> None:
        """Close the connections, so that the server aborts what is in flight. In the event loop of `start`."""
        if self._connection is not None:
            self._closing = asyncio.get_running_loop().create_task(self._connection.close())
            self._connection = None
            self._is_inspected = False

    async def _make(self, request: SampleRequest, num_logprobs: int) -> Completion:
        sampled = await self._generate(request, num_logprobs)
        completion = completion_of(
            request,
            sampled,
            replayable=self._replayable,
            support_logprobs=self._config.support_logprobs,
            text=self._decode(sampled.token_ids),
            extras=self.extras,
        )
        if not self._is_metered:
            self.tokens += len(completion.token_ids)
        return completion

    async def _generate(self, request: SampleRequest, num_logprobs: int) -> SampledOutput:
        """Ask until an answer comes. Raises as `engines.base.Engine.sample`, and IncompleteSupport."""
        connection = self._connection
        if connection is None:
            raise EngineError(f"{self.address}: the engine is not started")
        trouble: Unreachable | Refused | None = None
        for tries in range(MAX_TRIES):
            if trouble is not None:
                await asyncio.sleep(_pause(tries, trouble))
            await connection.availability.wait()
            try:
                with connection.availability.request():
                    return await self._once(connection.wire, request, num_logprobs, tries)
            except Refused as refused:
                if refused.status not in _TRANSIENT:
                    raise self._refusal(refused, num_logprobs) from None
                trouble = refused
            except Unreachable as unreachable:
                trouble = unreachable
            except Oversized as error:
                raise RequestError(str(error)) from None
            connection.availability.doubt()
        raise RequestError(f"the server failed it {MAX_TRIES} times, the last time: {trouble}")

    async def _once(self, wire: Wire, request: SampleRequest, num_logprobs: int, tries: int) -> SampledOutput:
        """One try: the same body each time, the seed in it."""
        answer = await wire.post(
            GENERATE_PATH,
            request_body(request, num_logprobs, model=self._server.name, arguments=self._config.sampling_arg),
            most=largest_answer(request, num_logprobs),
            request_id=f"rollgen-{self._run_id}-{request.request_id}-{num_logprobs}-{tries}",
        )
        if len(answer) < LARGE_ANSWER:
            return self._read(request, answer)
        return await asyncio.to_thread(self._read, request, answer)

    def _read(self, request: SampleRequest, answer: bytes) -> SampledOutput:
        sampling = request.prompt.sampling
        return read_sample(
            read_choice(answer),
            truncates=sampling.truncates,
            vocab_size=self._vocab_size,
            capture=self.capture,
            sampling=sampling,
        )

    def _refusal(self, refused: Refused, num_logprobs: int) -> RequestError | UnfitEngine:
        """The error for an answer that would be the same another time."""
        if refused.status < 400 or refused.status in _NEVER:
            return UnfitEngine(f"{self.address}: the server takes no requests of this run any more: {refused}")
        if num_logprobs and refused.param == "logprobs":
            return RequestError(
                f"a tie goes past the logprobs that the server may return ({refused.message}): start it with "
                "--max-logprobs -1"
            )
        return RequestError(f"the server refuses it: {refused}")

    async def _inspect_apart(self) -> tuple[ServerModel, Findings]:
        async with Wire(self.address) as wire:
            return await self._inspect(wire, self._capture_wanted)

    async def _inspect(self, wire: Wire, capture_wanted: Wanted) -> tuple[ServerModel, Findings]:
        server = await describe_server(wire, self.address)
        probe = Probe(
            wire,
            self.address,
            server,
            self._config,
            self._vocab_size,
            capture_wanted,
            self._untruncated,
            self._largest_top_k,
        )
        return server, await probe.run()

    async def _inspect_again(self, wire: Wire) -> None:
        """Whether the server that is back is the one that it was. Raises UnfitEngine, or EngineError."""
        try:
            server, findings = await self._inspect(wire, self.capture)
        except UsageError as error:
            raise UnfitEngine(str(error)) from None
        if server != self._server or findings.extras != self._offered:
            raise UnfitEngine(
                f"{self.address}: is back with another model, context or version: {server}, it was {self._server}"
            )
        self._is_inspected = True

    async def _measure(self, wire: Wire) -> None:
        """Follow the server's own count, which grows while samples are unfinished, and begins anew with the server."""
        before: int | None = None
        while True:
            count = await generated_tokens(wire)
            self._is_metered = count is not None
            if count is not None and before is not None:
                self.tokens += count - before if count >= before else count
            before = count
            await asyncio.sleep(min(METER_SECONDS, self._config.stall_timeout / 4))


def connect(config: RunConfig, **common: Any) -> list[HttpEngine]:
    """An engine for each server, with the other arguments of `HttpEngine`. They are probed at the same time.

    Raises as that does, for the first of those that fail, and UsageError when they cannot make one dataset.
    """
    with ThreadPoolExecutor(len(config.server)) as threads:
        engines = [*threads.map(lambda url: HttpEngine(config, url, **common), config.server)]
    check_alike(engines)
    _limit_windows(engines)
    return engines


def _limit_windows(engines: Sequence[HttpEngine]) -> None:
    """Keep all connections together below what the system allows this process, and tell where that is less."""
    wanted = sum(engine.window + _SPARE_CONNECTIONS for engine in engines)
    affordable = afford(wanted)
    if affordable == wanted:
        return
    window = max(1, affordable // len(engines) - _SPARE_CONNECTIONS)
    first = engines[0]
    first.notes += (
        f"the system lets this process open {wanted - affordable} files too few for {first.window} requests in flight "
        f"at each of {len(engines)} servers: it is {window} at each; raise the hard limit (ulimit -Hn)",
    )
    for engine in engines:
        engine.window = window


def check_alike(engines: Sequence[HttpEngine]) -> None:
    """Raise UsageError when several servers cannot make one dataset: what they return with a sample differs."""
    first = engines[0]
    for other in engines[1:]:
        if (other.capture, other.extras) != (first.capture, first.extras):
            raise UsageError(
                f"{first.address} and {other.address} return different things with a sample ({first.capture}, "
                f"{first.extras}; {other.capture}, {other.extras}): start them with the same flags, of which "
                "--return-sampling-mask and --enable-return-routed-experts decide it"
            )


def _pause(tries: int, trouble: Unreachable | Refused) -> float:
    """Seconds before try number `tries` (from 0): random, so that all who failed at once do not come back at once."""
    asked = trouble.retry_after if isinstance(trouble, Refused) else 0.0
    return max(asked, random.uniform(0, min(FIRST_PAUSE * 2 ** (tries - 1), LONGEST_PAUSE)))
