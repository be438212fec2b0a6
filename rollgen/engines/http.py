"""A running vLLM server: one request a sample over HTTP, masks read natively or from processed logprobs.

What the server was started with is what it does: nothing can be set from here, so it is probed first (`probe.py`). A
request that fails without a fault of its own (no connection, 404, 429, 500 to 504, an aborted one, the answer to
another) is sent again with the same seed, after a pause that is random up to twice that of the time before; no other
is. One that fails again and again has failed itself, if the server still answers a probe and others. A server that is
away for some seconds is waited for; one that stays away is dead, and `start` waits for it to come back, and probes
it again. No answer counts before the server has said, after it, that it is still the same: see `availability.py`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from rollgen.config import RunConfig
from rollgen.engines.address import parse_address, read_api_key
from rollgen.engines.asking import WINDOW_PER_SLOT, ask, logprobs_wanted
from rollgen.engines.availability import Availability, wait_until_well
from rollgen.engines.base import RequestError, SampleRequest
from rollgen.engines.descriptors import afford
from rollgen.engines.generate_route import (
    GENERATE_PATH,
    is_answer_to,
    largest_answer,
    read_choice,
    read_sample,
    request_body,
)
from rollgen.engines.inspection import Inspection
from rollgen.engines.installed import PROCESSORS
from rollgen.engines.meter import Meter, read_load
from rollgen.engines.outputs import SampledOutput, completion_of
from rollgen.engines.probe import Probe, Wanted
from rollgen.engines.server import UNKNOWN, ServerModel
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
_TRANSIENT: Final = frozenset({404, 429, 500, 502, 503, 504})
"""404: of a gateway behind which no server is for a while; of another server a probe finds out."""
_NEVER: Final = frozenset({401, 403})
"""Answers that no other request would get rid of."""
_SPARE_CONNECTIONS: Final = 4
"""For signs of life, which never wait for samples."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """What a started engine has."""

    wire: Wire
    availability: Availability
    meter: Meter
    measuring: asyncio.Task[None]

    def check(self) -> None:
        """Raise what the measuring raised, if it did."""
        if self.measuring.done():
            self.measuring.result()

    async def close(self) -> None:
        self.measuring.cancel()
        await self.wire.close()
        await self.availability.close()


class HttpEngine:
    """`engines.base.Engine` on a vLLM server. Constructing it probes the server, and blocks for that.

    `capture_wanted`, `untruncated`, `replayable` and `decode` are as in `VllmEngine`; `dtype` is what the server is
    taken to compute in, because none tells; `largest_top_k` is that of the run's prompts, if not the configuration's;
    `encode` is the tokenizer without special tokens. The probe ends as soon as `given_up` says that it is not wanted.
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
        encode: Callable[[str], Sequence[int]],
        dtype: str,
        largest_top_k: int | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self.address = parse_address(url, read_api_key(config.api_key_env))
        self._vocab_size = vocab_size
        self._replayable = replayable
        self._decode = decode
        self._run_id = secrets.token_hex(4)
        """Of other runs at the same server there may be requests of the same name."""
        self._connection: _Connection | None = None
        self._closing: asyncio.Task[None] | None = None
        """Kept, for an event loop does not keep its tasks."""
        self._is_inspected = True

        def make_probe(wire: Wire, model: ServerModel, wanted: Wanted) -> Probe:
            top_k = config.top_k if largest_top_k is None else largest_top_k
            return Probe(wire, self.address, model, config, vocab_size, wanted, untruncated, top_k, encode)

        self._inspection = Inspection(self.address, make_probe)
        with self.address.discreet():
            run_apart(self._inspection.first(capture_wanted), given_up)
        findings = self._inspection.findings
        self.capture, self.extras, self.notes = findings.capture, findings.extras, findings.notes
        self.record = EngineRecord(
            name="vllm",
            version=self._inspection.model.version,
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
        patience = self._config.stall_timeout
        try:
            with self.address.discreet():
                await wait_until_well(wire, self.address, self._inspection, patience, probed=self._is_inspected)
        except BaseException:
            await wire.close()
            raise
        availability, meter = Availability(wire, self.address, self._inspection), Meter(patience)
        measuring = asyncio.create_task(self._measure(wire, availability, meter))
        self._connection = _Connection(wire, availability, meter, measuring)

    async def sample(self, request: SampleRequest) -> Completion:
        """See `engines.base.Engine.sample`."""
        sampling, store = request.prompt.sampling, self._config.support_logprobs
        first = logprobs_wanted(self.capture, sampling, self._vocab_size, support_logprobs=store)
        with self.address.discreet():
            return await ask(self, first, self._vocab_size, partial(self._make, request))

    def close(self) -> None:
        """Close the connections, so that the server aborts what is in flight. In the event loop of `start`."""
        if self._connection is not None:
            self._closing = asyncio.get_running_loop().create_task(self._connection.close())
            self._connection = None
            self._is_inspected = False

    async def _make(self, request: SampleRequest, num_logprobs: int) -> Completion:
        connection = self._connection
        if connection is None:
            raise EngineError(f"{self.address}: the engine is not started")
        sampled = await self._generate(connection, request, num_logprobs)
        completion = completion_of(
            request,
            sampled,
            replayable=self._replayable,
            support_logprobs=self._config.support_logprobs,
            text=self._decode(sampled.token_ids),
            extras=self.extras,
        )
        connection.meter.answered()
        if not connection.meter.is_counting:
            self.tokens += len(completion.token_ids)
        return completion

    async def _generate(self, connection: _Connection, request: SampleRequest, num_logprobs: int) -> SampledOutput:
        """Ask until an answer comes. Raises as `engines.base.Engine.sample`, and IncompleteSupport."""
        availability = connection.availability
        trouble: Unreachable | Refused | None = None
        for tries in range(MAX_TRIES):
            if trouble is not None:
                await asyncio.sleep(_pause(tries, trouble))
            connection.check()
            await availability.wait()
            try:
                return await self._once(connection, request, num_logprobs, tries)
            except Refused as refused:
                if refused.status not in _TRANSIENT:
                    raise await self._refusal(availability, refused, num_logprobs) from None
                trouble = refused
            except Unreachable as unreachable:
                trouble = unreachable
            except Oversized as error:
                raise RequestError(str(error)) from None
            is_elsewhere = isinstance(trouble, Unreachable) or trouble.status == 404
            availability.doubt(thorough=is_elsewhere)
        await availability.failed()
        raise RequestError(f"the server failed it {MAX_TRIES} times, the last time: {trouble}")

    async def _once(
        self, connection: _Connection, request: SampleRequest, num_logprobs: int, tries: int
    ) -> SampledOutput:
        """One try: the same body each time, the seed in it. Its answer is that of the server that was probed."""
        request_id = f"rollgen-{self._run_id}-{request.request_id}-{num_logprobs}-{tries}"
        arguments = self._config.sampling_arg
        with connection.availability.request():
            answer = await connection.wire.post(
                GENERATE_PATH,
                request_body(request, num_logprobs, model=self._inspection.model.name, arguments=arguments),
                most=largest_answer(request, num_logprobs),
                request_id=request_id,
            )
        await connection.availability.confirm()
        if len(answer) < LARGE_ANSWER:
            sampled = self._read(request, request_id, answer)
        else:
            sampled = await asyncio.to_thread(self._read, request, request_id, answer)
        connection.availability.answered()
        return sampled

    def _read(self, request: SampleRequest, request_id: str, answer: bytes) -> SampledOutput:
        choice, sampling = read_choice(answer), request.prompt.sampling
        if self._inspection.findings.repeats_id and not is_answer_to(choice, request_id):
            raise Unreachable("its answer is one to another request")
        return read_sample(
            choice,
            truncates=sampling.truncates,
            vocab_size=self._vocab_size,
            capture=self.capture,
            sampling=sampling,
        )

    async def _refusal(
        self, availability: Availability, refused: Refused, num_logprobs: int
    ) -> RequestError | UnfitEngine:
        """The error for an answer that would be the same another time. Raises EngineError when the server changed."""
        if refused.status < 400 or refused.status in _NEVER:
            return UnfitEngine(f"{self.address}: the server takes no requests of this run any more: {refused}")
        await availability.confirm()
        if num_logprobs and refused.param == "logprobs":
            return RequestError(
                f"a tie goes past the logprobs that the server may return ({refused.message}): start it with "
                "--max-logprobs -1"
            )
        return RequestError(f"the server refuses it: {refused}")

    async def _measure(self, wire: Wire, availability: Availability, meter: Meter) -> None:
        """Follow the server's own count, which grows while samples are unfinished, and begins anew with the server."""
        while True:
            self.tokens += meter.growth(await read_load(wire), availability.in_flight)
            await asyncio.sleep(min(METER_SECONDS, self._config.stall_timeout / 4))


def connect(config: RunConfig, **common: Any) -> list[HttpEngine]:
    """An engine for each server, with the other arguments of `HttpEngine`. They are probed at the same time.

    Raises as that does, for the first of those that fail, and UsageError when they cannot make one dataset.
    """
    contexts = [copy_context() for _ in config.server]  # `given_up` may look into it

    def probed(context: Context, url: str) -> HttpEngine:
        return context.run(HttpEngine, config, url, **common)

    with ThreadPoolExecutor(len(config.server)) as threads:
        engines = [*threads.map(probed, contexts, config.server)]
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
