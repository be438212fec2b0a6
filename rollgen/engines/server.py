"""What a running vLLM server says of itself: its model, context and version. Asked before anything is planned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from rollgen.config import INT32_MAX, digest
from rollgen.engines.address import Address, parse_addresses
from rollgen.engines.wire import Oversized, Refused, Unreachable, Wire, run_apart
from rollgen.errors import EngineError, UsageError
from rollgen.inert import brief, plain

MODELS_PATH: Final = "/v1/models"
VERSION_PATH: Final = "/version"
UNKNOWN: Final = "unspecified"
"""The version of a server whose front does not let `/version` through, and what no server tells."""
LONGEST_NAME: Final = 1000
"""Characters of a name, a path or a version."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What a server tells of itself."""

    name: str
    """The id under which it serves the model: what requests name."""
    root: str
    """The path or Hugging Face id that it was started with; a path is one on the server's machine."""
    max_model_len: int
    """Prompt and response tokens together, at most."""
    version: str
    """Of vLLM."""

    @property
    def fingerprint(self) -> str:
        """`server:` and the SHA-256 of its word for what it serves: name, root and context. No weight was looked at."""
        told = {"id": self.name, "root": self.root, "max_model_len": self.max_model_len}
        return f"server:{digest(told)}"


def _check_name(told: str) -> str:
    """A name is shown, recorded and sent: it must be visible, and a name."""
    if len(told) > LONGEST_NAME or plain(told) != told:
        raise ValueError("no name: too long, or with characters that nobody sees")
    return told


_Name = Annotated[str, AfterValidator(_check_name)]


class _Model(BaseModel):
    """An entry of `/v1/models`, as far as it is read."""

    id: _Name
    max_model_len: Annotated[int, Field(ge=1, le=INT32_MAX)]
    root: _Name | None = None
    parent: str | None = None
    """The base model of an adapter."""


class KeyRefused(UsageError):
    """The server knows us no more, or never did."""


class _Models(BaseModel):
    data: list[_Model]


class _Version(BaseModel):
    version: _Name


def describe(urls: Sequence[str], api_key: str | None) -> ServerModel:
    """What the servers at `urls`, at least one, all say. Blocks, for some seconds at most.

    Raises EngineError for one that does not answer, and UsageError for one that is none of vLLM's, or serves another
    model, context or version than the first.
    """
    addresses = parse_addresses(urls, api_key)
    first, *others = zip(addresses, run_apart(_describe_all(addresses)), strict=True)
    for other in others:
        with addresses[0].discreet():
            _check_same(first, other)
    return first[1]


async def describe_server(wire: Wire, address: Address) -> ServerModel:
    """What one server says. Raises as `describe`."""
    try:
        models = _Models.model_validate_json(await wire.get(MODELS_PATH)).data
        version = await _version(wire, address)
    except Unreachable as error:
        raise EngineError(f"{address}: no server answers: {error}; start it, or check --server") from None
    except Refused as refused:
        raise refusal(refused, address, f"GET {MODELS_PATH}") from None
    except (ValidationError, Oversized):
        raise UsageError(
            f"{address}: {MODELS_PATH} does not answer as vLLM's does: no readable id, root and max_model_len; check "
            "--server"
        ) from None
    model = _base_model(models, address)
    return ServerModel(model.id, model.root or model.id, model.max_model_len, version)


def refusal(refused: Refused, address: Address, request: str) -> UsageError | EngineError:
    """The error for a server that refuses what every server must answer."""
    if refused.status in (401, 403):
        return KeyRefused(
            f"{address}: refuses the API key ({refused.status}): put the server's into the environment variable that "
            "--api-key-env names, VLLM_API_KEY by default"
        )
    if refused.status >= 500 or refused.status == 429:
        return EngineError(f"{address}: answers {request} with {refused}; see the server's log")
    return UsageError(f"{address}: answers {request} with {refused}; is that the URL of a vLLM server?")


async def _describe_all(addresses: Sequence[Address]) -> list[ServerModel]:
    return await asyncio.gather(*map(_describe_one, addresses))


async def _describe_one(address: Address) -> ServerModel:
    with address.discreet():
        async with Wire(address) as wire:
            return await describe_server(wire, address)


async def _version(wire: Wire, address: Address) -> str:
    """Raises EngineError for a server that would tell another time."""
    try:
        return _Version.model_validate_json(await wire.get(VERSION_PATH)).version
    except Refused as refused:
        if refused.status >= 500 or refused.status == 429:
            raise refusal(refused, address, f"GET {VERSION_PATH}") from None
        return UNKNOWN
    except (Oversized, ValidationError):
        return UNKNOWN


def _base_model(models: Sequence[_Model], address: Address) -> _Model:
    """The one model that is served, under the first of its names; adapters are other models on top of it."""
    bases = [model for model in models if model.parent is None]
    if len({model.root or model.id for model in bases}) != 1:
        names = brief(", ".join(model.id for model in bases)) or "none"
        raise UsageError(f"{address}: serves several models, or none ({names}); rollgen takes a server of one")
    return bases[0]


def _check_same(first: tuple[Address, ServerModel], other: tuple[Address, ServerModel]) -> None:
    (one, ours), (another, theirs) = first, other
    for field in fields(ServerModel):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            raise UsageError(
                f"{one} and {another} do not serve the same: {field.name} is {here!r} and {there!r}; start them with "
                "the same model, --served-model-name, --max-model-len and version of vLLM"
            )
