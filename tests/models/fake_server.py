"""A server without a model that speaks vLLM's wire: real HTTP on 127.0.0.1, in a thread, with faults on demand.

Its logits are random numbers out of a request's seed, truncated and sampled as vLLM does it. What it is like (flags,
versions, keys) are fields that may be changed at any time. `faults` are taken off one by one, by requests for samples;
`run_faults` by those of them that are no probe's.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from aiohttp import web
from models.ports import listening

VOCAB_SIZE = 64
MODEL = "fake"
CLAMPED = -9999.0
HANGS = 180
"""Seconds in which it has started or stopped."""
LONGEST = 8
"""Tokens of an answer at most."""

Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Answers in place of the server; None leaves it to the server."""


@dataclass
class FakeServer:
    """Use as a context manager, or `start` and `stop`: it keeps its port."""

    masks: bool = True
    mode: str = "processed_logprobs"
    max_logprobs: int = 20
    scale_out: bool = True
    has_route: bool = True
    api_key: str | None = None
    version: str = "0.32.0"
    model: str = MODEL
    root: str | None = None
    """None for one that its model's name has."""
    max_model_len: int = 256
    is_metered: bool = True
    parameters: tuple[str, ...] | None = ("temperature", "min_tokens", "repetition_penalty")
    """The names that its schema has; None for no schema."""
    vocab_size: int = VOCAB_SIZE
    experts: Callable[[int], str | None] = lambda positions: None
    """`routed_experts` of so many positions."""
    long_page: str | None = None
    """The path of a page of 1,000 bytes."""
    tied: int = 0
    """Ids that are equally likely, and more than all others."""
    checks_ids: bool = True
    """Whether it refuses ids to stop at that are none of its vocabulary."""
    shift: int | None = 0
    """What its tokenizer adds to the ids of ours; None for a server that tokenizes nothing."""
    repeats_id: bool = True
    healthy: bool = True
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and text of what it answers at a path, in place of its own."""
    faults: list[Fault] = field(default_factory=list)
    run_faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    """Of requests that are no probe's, where there are no others."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of requests for samples."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Those of them that are no probe's."""
    ids: list[str] = field(default_factory=list)
    """Their X-Request-Id."""
    looks: Counter[str] = field(default_factory=Counter)
    """How often each path was asked for."""
    of_others: int = 0
    """Requests that others have in flight here."""
    lost: int = 0
    """Requests in flight of which it knows nothing."""
    tells_requests: bool = True
    in_flight: int = 0
    most_in_flight: int = 0
    aborted: int = 0
    """Requests whose connection was closed from outside."""
    generated: int = 0
    port: int = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(HANGS)

    def stop(self) -> None:
        """Close the port and break all connections."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(HANGS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANGS)
        self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(client_max_size=1 << 26, middlewares=[self._authenticate])
        application.router.add_get("/health", self._health)
        application.router.add_get("/version", self._answer_version)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/openapi.json", self._schema)
        application.router.add_post("/tokenize", self._tokenize)
        application.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        place = socket.create_server(("127.0.0.1", self.port)) if self.port else listening()
        self.port = place.getsockname()[1]
        await web.SockSite(self._runner, place).start()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.looks[request.path] += 1
        guarded = request.path.startswith(("/v1", "/inference"))
        if guarded and self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.pages:
            status, text = self.pages[request.path]
            return web.Response(status=status, text=text)
        answer: web.StreamResponse = await handler(request)
        return web.Response(text=" " * 1000) if request.path == self.long_page else answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _answer_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        root = self.root or f"/models/{self.model}"
        card = {"id": self.model, "root": root, "parent": None, "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        told = {"generation_tokens_total": self.generated} if self.is_metered else {}
        if self.tells_requests:
            told |= {"num_requests_running": self.in_flight - self.lost, "num_requests_waiting": self.of_others}
        labels = f'{{engine="0",model_name="{self.model}"}}'
        lines = [f"# TYPE vllm:{name} x\nvllm:{name}{labels} {float(value)}\n" for name, value in told.items()]
        return web.Response(text="".join(lines))

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.shift is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": [one + self.shift for one in text.encode()], "max_model_len": 256})

    async def _schema(self, request: web.Request) -> web.Response:
        if self.parameters is None:
            return web.Response(status=404)
        fields = {"sampling_params": {"properties": {name: {} for name in self.parameters}}}
        return web.json_response({"components": {"schemas": {"GenerateRequest": {"properties": fields}}}})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, request_id = await request.json(), request.headers["X-Request-Id"]
        self.seen.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if not request_id.startswith("rollgen-probe"):
            self.asked.append(body)
            self.ids.append(request_id)
            fault = fault or (self.run_faults.pop(0) if self.run_faults else self.always)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = None if fault is None else await fault(request)
            return answer or self._sample(body, request_id)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.in_flight -= 1

    def _sample(self, body: dict[str, Any], request_id: str) -> web.Response:
        params = body["sampling_params"]
        if not self.has_route:
            return web.json_response({"detail": "Not Found"}, status=404)
        if not self.scale_out:
            return error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out")
        if body["model"] != self.model:
            return error(404, f"The model `{body['model']}` does not exist.", param="model")
        if 0 <= self.max_logprobs < params["logprobs"]:
            told = f"Requested sample logprobs of {params['logprobs']}, which is greater than max allowed: "
            return error(400, f"{told}{self.max_logprobs}", param="logprobs")
        if self.checks_ids and any(one >= self.vocab_size for one in params["stop_token_ids"]):
            return error(400, "stop_token_ids contain out-of-vocab token ids", param="stop_token_ids")
        if self.masks and params["top_k"] <= 0:
            return error(500, "")
        choice = sample(params, masks=self.masks, mode=self.mode, tied=self.tied, vocab_size=self.vocab_size)
        choice["routed_experts"] = self.experts(len(body["token_ids"]) + len(choice["token_ids"]) - 1)
        self.generated += len(choice["token_ids"])
        told = f"generate-tokens-{request_id if self.repeats_id else 'x'}"
        return web.json_response({"request_id": told, "model": self.model, "choices": [choice]})


def error(status: int, message: str, *, param: str | None = None) -> web.Response:
    """As vLLM tells it."""
    told = {"message": message, "type": "Error", "param": param, "code": status}
    return web.json_response({"error": told}, status=status)


def sample(
    params: dict[str, Any],
    *,
    masks: bool,
    mode: str = "processed_logprobs",
    tied: int = 0,
    vocab_size: int = VOCAB_SIZE,
) -> dict[str, Any]:
    """A choice: as many tokens as the seed says, up to max_tokens."""
    rng = np.random.default_rng(params["seed"])
    tokens = min(params["max_tokens"], int(rng.integers(2, LONGEST + 1)))
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length" if tokens == params["max_tokens"] else "stop",
        "stop_reason": None,
        "token_ids": [],
        "sampling_mask": [] if masks else None,
        "routed_experts": None,
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "logprobs": {"content": []},
    }
    for _ in range(tokens):
        logits = (2 * rng.normal(size=vocab_size)).astype(np.float32)
        logits[:tied] = 9.0
        processed = truncate(logits / np.float32(params["temperature"]), params)
        probabilities = np.exp(processed, dtype=np.float64)
        token = int(rng.choice(vocab_size, p=probabilities / probabilities.sum()))
        told = processed if mode == "processed_logprobs" else log_softmax(logits)
        choice["token_ids"].append(token)
        choice["logprobs"]["content"].append(logprobs_of(token, told, params["logprobs"]))
        if masks:
            choice["sampling_mask"].append(np.flatnonzero(np.isfinite(processed)).tolist())
    return choice


def truncate(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """float32 [V], log-probabilities over what min_p, top_k and top_p leave, in vLLM's order; ties are kept."""
    logprobs = log_softmax(logits)
    kept = logprobs >= logprobs.max() + np.log(params["min_p"] or 1e-30)
    if params["top_k"] > 0:
        kept &= logprobs >= np.sort(logprobs)[-min(params["top_k"], len(logprobs))]
    order = np.argsort(-np.where(kept, logprobs, -np.inf), kind="stable")
    mass = np.exp(logprobs[order]) / np.exp(logprobs[kept]).sum()
    kept[order[np.cumsum(mass) - mass >= params["top_p"]]] = False
    return log_softmax(np.where(kept, logits, -np.inf))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 [V]"""
    shifted = logits - logits.max()
    normalised: np.ndarray = (shifted - np.log(np.exp(shifted, dtype=np.float64).sum())).astype(np.float32)
    return normalised


def logprobs_of(token: int, logprobs: np.ndarray, count: int) -> dict[str, Any]:
    """vLLM's entry of a token: the sampled id first, then the most likely ones, `count` in all or the one."""
    ranked = [token, *(int(one) for one in np.argsort(-logprobs, kind="stable")[:count] if one != token)]
    told = [{"token_id": one, "logprob": max(float(logprobs[one]), CLAMPED), "rank": 1} for one in ranked]
    return told[0] | {"top_logprobs": told[: max(count, 1)]}


def answers(status: int, body: object = "", **headers: str) -> Fault:
    """A fault: this answer."""

    async def fault(request: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, text=text, headers=names, content_type="application/json")

    return fault


async def disconnects(request: web.Request) -> None:
    """A fault: the connection breaks before the answer."""
    assert request.transport is not None
    request.transport.abort()


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """A fault: the connection breaks in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs(request: web.Request) -> None:
    """A fault: it takes for ever."""
    await asyncio.Event().wait()


def waits(gate: threading.Event) -> Fault:
    """A fault: it takes until this is set."""

    async def fault(request: web.Request) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)

    return fault
